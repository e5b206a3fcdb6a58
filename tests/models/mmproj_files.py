"""Writes a tiny vision-language checkpoint as GGUF users have it: a text model, and its vision part in a second file.

The `gguf` package names the tensors of published checkpoints, which have other names than transformers' modules."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from tests.models.gguf_files import Vocabulary, finish, interleave, write_model
from tests.models.tiny_vision import TinyVision

Tensors = dict[str, np.ndarray]
_TEXT_PREFIX = re.compile(r"^model\.(language_model|text_model)\.")
_CONTROL, _NORMAL, _UNUSED = 3, 1, 5
_MOST_NUMBERS = 8  # of layers, and of parts of a projector
_LAST_MERGE = "Ā Ā"  # of bytes that no prompt has: a file has merges
# Text models within checkpoints, and the models that they are.
_TEXT_KINDS = {
    "mistral": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Written:
    """How the vision part of a checkpoint is written."""

    projector: str
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # parts of names, as published checkpoints have them
    changed: Callable[[Any, Tensors], Tensors] = lambda config, tensors: tensors
    settings: Callable[[Any], Mapping[str, int]] = lambda config: {}  # keys below clip.vision
    flags: tuple[str, ...] = ("use_gelu",)
    text_architecture: str | None = None
    dropped_layers: int = 0  # the last ones of the tower


def _gemma3_tensors(config: Any, tensors: Tensors) -> Tensors:
    norm = "multi_modal_projector.mm_soft_emb_norm.weight"
    return {**tensors, norm: tensors[norm] + 1}


_SIGLIP = {"vision_tower.": "vision_tower.vision_model."}


def _legacy_tensors(config: Any, tensors: Tensors) -> Tensors:
    """Return the tensors as the first converter wrote them: the layers that are used, and MLPs with swapped names."""
    kept = {}
    swapped = {"fc1": "fc2", "fc2": "fc1"}
    for name, values in tensors.items():
        if ".layers.2." in name or "post_layernorm" in name:
            continue
        name = re.sub("fc[12]", lambda match: swapped[match[0]], name)
        name = name.replace("multi_modal_projector.linear_1", "mm.0").replace(
            "multi_modal_projector.linear_2", "mm.2"
        )
        kept["model.image_newline" if name == "image_newline" else name] = values
    return kept


def _pixtral_tensors(config: Any, tensors: Tensors) -> Tensors:
    heads = config.vision_config.num_attention_heads
    return {
        name: interleave(values, heads) if "q_proj" in name or "k_proj" in name else values
        for name, values in tensors.items()
    }


def _two_frames(tensors: Tensors) -> Tensors:
    frames = tensors.pop("visual.patch_embed.proj.weight")
    return {**tensors, "v.patch_embd.weight": frames[:, :, 0], "v.patch_embd.weight.1": frames[:, :, 1]}


def _qwen2_tensors(config: Any, tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, values in _two_frames(tensors).items():
        parts = np.split(values, 3) if ".qkv." in name else [values]
        names = [name.replace("qkv", part) for part in "qkv"] if ".qkv." in name else [name]
        made |= dict(zip(names, parts, strict=True))
    return made


def _qwen3_tensors(config: Any, tensors: Tensors) -> Tensors:
    made, deep = {}, getattr(config.vision_config, "deepstack_visual_indexes", ())
    for name, values in _two_frames(tensors).items():
        name = re.sub(r"visual\.merger\.linear_fc([12])", lambda m: f"mm.{2 * int(m[1]) - 2}", name)
        name = name.replace("visual.merger.norm", "v.post_ln")
        # By the number of the layer.
        name = re.sub(
            r"visual\.deepstack_merger_list\.(\d)", lambda m: f"v.deepstack.{deep[int(m[1])]}", name
        )
        made[name.replace("linear_", "") if "deepstack" in name else name] = values
    return made


def _qwen_settings(config: Any) -> dict[str, int]:
    return {"image_min_pixels": 256, "image_max_pixels": 2400, "spatial_merge_size": 2}


def _internvl_tensors(config: Any, tensors: Tensors) -> Tensors:
    numbers = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    made = {}
    for name, values in tensors.items():
        name = re.sub(
            r"multi_modal_projector\.(layer_norm|linear_\d)", lambda m: f"mlp1.{numbers[m[1]]}", name
        )
        ends = ("position_embeddings", "lambda_1", "lambda_2")
        made[f"{name}.weight" if name.endswith(ends) else name] = values.squeeze()
    return made


WRITTEN: dict[str, Written] = {
    "gemma3": Written(
        "gemma3",
        {**_SIGLIP, "mm_input_projection_weight": "mm_input_projection.weight"},
        _gemma3_tensors,
        lambda config: {"projector.scale_factor": 1},
    ),
    "idefics3": Written(
        "idefics3",
        {"connector.": "model.connector.", "vision_model.": "model.vision_model."},
        settings=lambda config: {"projector.scale_factor": 2, "preproc_image_size": 96},
    ),
    "llava": Written("mlp", _SIGLIP, _legacy_tensors, flags=(), dropped_layers=1),
    "llava-next": Written("mlp", _SIGLIP, _legacy_tensors, flags=(), dropped_layers=1),
    "pixtral": Written("pixtral", changed=_pixtral_tensors),
    "mistral3": Written(
        "pixtral", changed=_pixtral_tensors, settings=lambda config: {"spatial_merge_size": 2}
    ),
    "lighton-ocr": Written(
        "lightonocr",
        {"vision_encoder.": "vision_tower.", "vision_projection.": "multi_modal_projector."},
        _pixtral_tensors,
        lambda config: {"spatial_merge_size": 2},
    ),
    "internvl": Written(
        "internvl",
        {"vision_tower.": "model.vision_tower."},
        _internvl_tensors,
        lambda config: {"projector.scale_factor": 2, "preproc_min_tiles": 1, "preproc_max_tiles": 6},
    ),
    "qwen2-vl": Written(
        "qwen2vl_merger",
        changed=_qwen2_tensors,
        settings=_qwen_settings,
        flags=(),
        text_architecture="qwen2vl",
    ),
    "qwen2.5-vl": Written(
        "qwen2.5vl_merger",
        changed=_qwen2_tensors,
        settings=lambda config: {**_qwen_settings(config), "n_wa_pattern": 2, "window_size": 16},
        flags=("use_silu",),
        text_architecture="qwen2vl",
    ),
    "qwen3-vl": Written(
        "qwen3vl_merger", changed=_qwen3_tensors, settings=_qwen_settings, text_architecture="qwen3vl"
    ),
    "qwen3.5": Written("qwen3vl_merger", changed=_qwen3_tensors, settings=_qwen_settings),
}


def write_pair(folder: Path, model: TinyVision, name: str) -> tuple[Path, Path]:
    """Write the text model and the vision part; return both paths."""
    how = WRITTEN[name]
    text = folder / f"{name}-F32.gguf"
    write_model(
        text,
        _TextHalf(model),  # type: ignore[arg-type]
        GGMLQuantizationType.F32,
        name=how.text_architecture,
        vocabulary=_vocabulary(model.folder),
    )
    return text, write_mmproj(folder / f"mmproj-{name}-F16.gguf", model, how)


class _TextHalf:
    """The text model within a vision-language model, as `write_model` takes a model."""

    def __init__(self, model: TinyVision) -> None:
        self.model = self
        self.config = copy.deepcopy(model.model.config.get_text_config())
        kind = self.config.model_type
        self.config.model_type = _TEXT_KINDS.get(kind, kind)
        self._tensors = model.model.state_dict()

    def state_dict(self) -> dict[str, Any]:
        named = {_TEXT_PREFIX.sub("model.", name): values for name, values in self._tensors.items()}
        return {
            name: named[name]
            for name, before in zip(named, self._tensors, strict=True)
            if _TEXT_PREFIX.match(before) or before.startswith("lm_head")
        }


def _vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of a folder with a byte-level tokenizer, as long as the embedding."""
    stated = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["id"]: token["content"] for token in stated["added_tokens"]}
    ids = {number: token for token, number in stated["model"]["vocab"].items()} | special
    tokens = [ids.get(number, f"[PAD{number}]") for number in range(400)]
    tokens[-1] = _LAST_MERGE.replace(" ", "")
    types = [_CONTROL if number in special else _NORMAL for number in range(400)]
    for number in range(len(ids), 399):
        types[number] = _UNUSED
    calls = {"add_bos_token_id": 1, "add_eos_token_id": 2, "add_pad_token_id": 0, "add_add_bos_token": False}
    return Vocabulary(
        tokens=tokens,
        types=types,
        merges=[_LAST_MERGE],
        settings={**calls, "add_chat_template": settings["chat_template"]},
    )


def write_mmproj(
    path: Path,
    model: TinyVision,
    how: Written,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **changes: Any,
) -> Path:
    """Write the vision part of a model. `kind` is the type of matrices. `changes` are other settings, by the names of
    the writer's calls."""
    config = model.model.config
    vision, writer = config.vision_config, GGUFWriter(path, "clip")
    images = json.loads((model.folder / "preprocessor_config.json").read_text())
    calls = {
        "clip_has_vision_encoder": True,
        "clip_projector_type": how.projector,
        "vision_projection_dim": config.get_text_config().hidden_size,
        "vision_image_size": _side(getattr(vision, "image_size", 32)),
        "vision_patch_size": _side(vision.patch_size),
        "vision_embedding_length": getattr(vision, "embed_dim", None) or vision.hidden_size,
        "vision_feed_forward_length": getattr(vision, "intermediate_size", None) or 1,
        "vision_block_count": _depth(vision) - how.dropped_layers,
        "vision_head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
        "vision_attention_layernorm_eps": getattr(vision, "layer_norm_eps", 1e-6),
        "vision_image_mean": images["image_mean"],
        "vision_image_std": images["image_std"],
        **changes,
    }
    for name, value in calls.items():
        getattr(writer, f"add_{name}")(value)
    for key, number in how.settings(config).items():
        writer.add_uint32(f"clip.vision.{key}", number)
    if shapes := getattr(config, "image_grid_pinpoints", None):
        writer.add_array("clip.vision.image_grid_pinpoints", [side for shape in shapes for side in shape])
    if deep := getattr(vision, "deepstack_visual_indexes", None):
        writer.add_vision_is_deepstack_layers([index in deep for index in range(_depth(vision))])
    for flag in how.flags:
        writer.add_bool(f"clip.{flag}", True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, _MOST_NUMBERS)
    for name, values in how.changed(config, _vision_tensors(model)).items():
        for part, published in how.renamed.items():
            name = name.replace(part, published, 1)
        stored = (
            name
            if name.startswith(("v.", "mm.", "model.image_newline"))
            else names.get_name(name, (".weight", ".bias"))
        )
        assert stored is not None, f"the package has no name for {name}"
        values = np.ascontiguousarray(values)
        if values.ndim == 2 and values.shape[-1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    return finish(writer, path)


def _vision_tensors(model: TinyVision) -> Tensors:
    return {
        name.removeprefix("model."): values.float().numpy()
        for name, values in model.model.state_dict().items()
        if not _TEXT_PREFIX.match(name) and not name.startswith("lm_head") and ".head." not in name
    }


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _depth(vision: Any) -> int:
    return int(getattr(vision, "depth", None) or vision.num_hidden_layers)
