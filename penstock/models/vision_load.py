"""Reads the vision part of a vision-language checkpoint, and the settings of the text model within it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops
from penstock.models.config import Fields, axes_of_pairs
from penstock.models.vision import (
    Gemma3Vision,
    GotOcrVision,
    LlavaVision,
    PaliGemmaVision,
    TransformersVision,
)
from penstock.models.vision_grids import (
    Gemma4UnifiedVision,
    Gemma4Vision,
    GlmVision,
    KimiVision,
    LightOnOcrVision,
    MiniCPMVision,
    PaddleOCRVision,
    PixtralVision,
    QwenVision,
    VideoLlama3Vision,
)
from penstock.models.vision_tiles import (
    AyaVision,
    Cohere2Vision,
    DeepseekOcr2Vision,
    Idefics3Vision,
    InternVLVision,
    Lfm2VlVision,
    Llama4Vision,
    LlavaNextVision,
    LlavaOnevisionVision,
    QianfanVision,
)
from penstock.models.vision_weights import load_tower

logger = logging.getLogger(__name__)

EXTRA = "penstock-llm[images]"
OLDEST_TRANSFORMERS = (5, 23)  # with 5.17, towers of Idefics 3 and Qwen 3 VL return other features
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

# By the class in `architectures`. LLaVA's class serves Pixtral towers too.
FAMILIES: dict[str, type[TransformersVision]] = {
    "Idefics3ForConditionalGeneration": Idefics3Vision,
    "SmolVLMForConditionalGeneration": Idefics3Vision,
    "LlavaForConditionalGeneration": LlavaVision,
    "VipLlavaForConditionalGeneration": LlavaVision,
    "LlavaNextForConditionalGeneration": LlavaNextVision,
    "LlavaNextVideoForConditionalGeneration": LlavaNextVision,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionVision,
    "Gemma3ForConditionalGeneration": Gemma3Vision,
    "Gemma4ForConditionalGeneration": Gemma4Vision,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedVision,
    "PaliGemmaForConditionalGeneration": PaliGemmaVision,
    "InternVLForConditionalGeneration": InternVLVision,
    "AyaVisionForConditionalGeneration": AyaVision,
    "Cohere2VisionForConditionalGeneration": Cohere2Vision,
    "Lfm2VlForConditionalGeneration": Lfm2VlVision,
    "Mistral3ForConditionalGeneration": PixtralVision,
    "Qwen2VLForConditionalGeneration": QwenVision,
    "Qwen2_5_VLForConditionalGeneration": QwenVision,
    "Qwen3VLForConditionalGeneration": QwenVision,
    "Qwen3VLMoeForConditionalGeneration": QwenVision,
    "Qwen3_5ForConditionalGeneration": QwenVision,
    "Qwen3_5MoeForConditionalGeneration": QwenVision,
    "Exaone4_5_ForConditionalGeneration": QwenVision,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVision,
    "LightOnOcrForConditionalGeneration": LightOnOcrVision,
    "Glm4vForConditionalGeneration": GlmVision,
    "Glm4vMoeForConditionalGeneration": GlmVision,
    "Glm46VForConditionalGeneration": GlmVision,
    "GlmOcrForConditionalGeneration": GlmVision,
    "Llama4ForConditionalGeneration": Llama4Vision,
    "Kimi_K25ForConditionalGeneration": KimiVision,
    "KimiK25ForConditionalGeneration": KimiVision,  # as its makers call it
    "GotOcr2ForConditionalGeneration": GotOcrVision,
    "VideoLlama3ForConditionalGeneration": VideoLlama3Vision,
    "MiniCPMV4_6ForConditionalGeneration": MiniCPMVision,
    "DeepseekOcr2ForConditionalGeneration": DeepseekOcr2Vision,
    "DeepseekVLForConditionalGeneration": LlavaVision,
    "QianfanOCRForConditionalGeneration": QianfanVision,
    "Lfm3VlForConditionalGeneration": QwenVision,
    "Qwen2_5OmniForConditionalGeneration": QwenVision,
    "Qwen2_5OmniModel": QwenVision,  # as its makers call it
    "Qwen2_5OmniThinkerForConditionalGeneration": QwenVision,
    "Qwen3OmniMoeForConditionalGeneration": QwenVision,
    "Qwen3OmniMoeThinkerForConditionalGeneration": QwenVision,
}
# Classes whose images are not supported, and whose text model alone is a native decoder.
_TEXT_ALONE = frozenset(
    {
        "Gemma3nForConditionalGeneration",
        "MiniCPMOcrForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Nano_Omni_Reasoning_V3",
    }
)
# Where makers' folders have the settings of a text model that transformers cannot find.
_NESTED_TEXT = "llm_config"
# Text models within checkpoints whose own class is the same decoder under another name.
_TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "glm_ocr_text": "glm4",
    "paddleocr_vl_text": "llama",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
}
# Pairs of a head that time, rows and columns turn, for files that do not say so.
_ROPE_SECTIONS = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), (16, 24, 24)
    ),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), (8, 12, 12)),
}
# Text models whose attention has biases, or none, whatever the file says.
_HAS_BIASES = {"glm4v_text": True, "glm_ocr_text": False}
_OUTER_KEYS = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")


def _class_of(fields: Fields) -> str:
    """Return the class in `architectures`, or where a folder with a tower names none, the class of its type."""
    named = fields.raw("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    kind = fields.raw("model_type")
    if not isinstance(kind, str) or not (fields.has("vision_config") or fields.has("thinker_config")):
        return ""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as names
    except ImportError:
        return ""
    return str(names.get(kind) or names.get(f"{kind}_thinker") or "")


def family_of(fields: Fields) -> type[TransformersVision] | None:
    family = FAMILIES.get(_class_of(fields))
    vision = fields.raw("vision_config")
    if family is LlavaVision and isinstance(vision, dict) and vision.get("model_type") == "pixtral":
        return PixtralVision
    return family


def text_fields(path: Path, fields: Fields) -> Fields:
    """Return the settings of the text model within a vision-language checkpoint, with the defaults of its class; the
    settings of other checkpoints as they are."""
    family, is_alone = family_of(fields), _class_of(fields) in _TEXT_ALONE
    # Our Gemma 3 and 4 and Llama 4 read their own settings.
    if family in (Gemma3Vision, Gemma4Vision, Gemma4UnifiedVision, Llama4Vision) or (
        family is None and not is_alone
    ):
        return fields
    nested = fields.raw(_NESTED_TEXT)
    text = dict(nested) if isinstance(nested, dict) else _config(path).get_text_config().to_dict()
    text |= {key: fields.raw(key) for key in _OUTER_KEYS if fields.has(key)}
    if text["model_type"] == "qwen3_vl_moe_text":
        text["norm_topk_prob"] = True  # whatever the file says: its router always does so
    if text["model_type"] == "paddleocr_vl_text":
        text["attention_bias"] = text["mlp_bias"] = text["use_bias"]
    if text["model_type"] in _HAS_BIASES:
        text["attention_bias"] = _HAS_BIASES[text["model_type"]]
    sections = _ROPE_SECTIONS.get(text["model_type"])
    text["model_type"] = _TEXT_TYPES.get(text["model_type"], text["model_type"])
    text.pop("architectures", None)
    if family is PaliGemmaVision:
        text["use_bidirectional_attention"] = None  # of prompts only: the image says so
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, dict) and sections is not None:
            rope = {"mrope_section": sections, **rope}
        if isinstance(rope, dict) and "mrope_section" in rope:
            if family is None or not family.has_axes:  # a text has the same position on all axes
                text[key] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
                continue
            text["rope_axes"] = axes_of_pairs(
                rope["mrope_section"], interleaved="qwen3" in text["model_type"]
            )
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
            text[key] = plain | {name: "default" for name in ("rope_type", "type") if name in plain}
    return Fields(text, fields.where)


def load_vision(
    path: Path, fields: Fields, tokenizer_json: bytes, ops: Ops, *, is_random: bool = False
) -> TransformersVision | None:
    """Load the vision part of a checkpoint; None for a model of texts, or without the needed files."""
    family = family_of(fields)
    if family is None:
        if _class_of(fields) in _TEXT_ALONE:
            logger.warning("%s takes text only: images of %s are not supported", path, _class_of(fields))
        return None
    if not any((path / name).is_file() for name in _PROCESSOR_FILES):
        logger.warning("%s has no %s: the model takes text only", path, _PROCESSOR_FILES[0])
        return None
    if (reason := family.refusal(fields)) is not None:
        logger.warning("%s takes text only: %s", path, reason)
        return None
    try:
        import PIL.Image  # noqa: F401
        import transformers
    except ImportError:
        logger.warning("images need %s: the model takes text only", EXTRA)
        return None
    if _release(transformers.__version__) < OLDEST_TRANSFORMERS:
        logger.warning(
            "images need transformers %d.%d or newer, not %s: the model takes text only",
            *OLDEST_TRANSFORMERS,
            transformers.__version__,
        )
        return None
    config = _config(path)
    config = getattr(config, "thinker_config", config)  # of models that also speak
    with quiet_transformers():
        with _named_errors(path):
            processor = family.load_processor(path)
        tower = load_tower(path, fields, config, ops, is_random=is_random)
    spellings = {
        token["id"]: token["content"] for token in json.loads(tokenizer_json).get("added_tokens", ())
    }
    with _named_errors(path):
        return family(config, processor, tower, ops, spellings)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn what transformers raises over settings of an image processor into an error that names their file."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # transformers and torch raise errors of all kinds for sizes that do not fit
        name = next(name for name in _PROCESSOR_FILES if (path / name).is_file())
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".") or type(error).__name__
        raise ModelLoadError(
            f"{path / name} has no settings of an image processor that can be used: {said.split('. ')[0]:.200}.",
            hint="Fetch the file again, or take it out of the folder to serve the model for texts.",
        ) from error


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version such as `5.23.0` or `5.24.0.dev0`."""
    return tuple(int(part) for part in version.split(".")[:2])


def _config(path: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelLoadError(
            "The settings of this vision-language model are read with transformers, which is not installed.",
            hint=f"pip install '{EXTRA}'",
        ) from error
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # ... and for settings of unexpected types
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ModelLoadError(
            f"Transformers cannot read {path / 'config.json'}: {said.split('. ')[0]:.200}."
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' report that the layers of the text model were not loaded."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
