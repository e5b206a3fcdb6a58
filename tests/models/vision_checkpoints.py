"""Tiny vision-language checkpoints with random weights, made with transformers: model, image processor, tokenizer and
chat template in one folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEXT: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
# As SmolVLM's: the parts of a turn in a loop.
PARTS_TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ 'IMAGE' }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyVision:
    """A checkpoint, the transformers model that wrote it, and the processor as transformers composes it."""

    folder: Path
    model: Any
    processor: Any

    def expected(
        self, text: str, images: Sequence[Image.Image], num_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and the greedy answer of transformers."""
        inputs = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        with torch.inference_mode():
            made = self.model.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, made[0].tolist()[len(prompt) :]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with structure at all scales, so that towers see more than noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _tokenizer(folder: Path, specials: Sequence[str]) -> Any:
    """Write a byte-level tokenizer whose special tokens are `specials`, the first three as pad, bos and eos."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>"]
    vocabulary = {name: number for number, name in enumerate([*names, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in [*names, *specials]]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def _save(folder: Path, config: Any, tokenizer: Any, processor: Any, template: str) -> Any:
    """Write the checkpoint. Weights are larger than usual, so that images change the answers."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.12)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return model


IDEFICS3_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


def _idefics3(folder: Path, *, smol: bool = False) -> TinyVision:
    from transformers import (
        Idefics3Config,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        SmolVLMConfig,
        SmolVLMImageProcessorPil,
    )

    tokenizer = _tokenizer(folder, IDEFICS3_TOKENS)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    settings: dict[str, Any] = {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": image_id,
        "pad_token_id": 0,
    }
    config = SmolVLMConfig(**settings) if smol else Idefics3Config(**settings)
    kind = SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil
    images = kind(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    model = _save(folder, config, tokenizer, images, PARTS_TEMPLATE.replace("IMAGE", "<image>"))
    # SmolVLM's own processor writes the same text, but needs a package that spells numbers.
    return TinyVision(folder, model, Idefics3Processor(images, tokenizer, image_seq_len=4))


CLIP_SIZES: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def _with_clip(
    folder: Path, config_kind: Any, processor_kind: Any, images: Any, settings: dict[str, Any]
) -> TinyVision:
    """Write a checkpoint of the LLaVA family, whose tower is CLIP's. `settings` are those of the class alone."""
    tokenizer = _tokenizer(folder, ("<image>",))
    config = config_kind(
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        **settings,
    )
    model = _save(folder, config, tokenizer, images, PARTS_TEMPLATE.replace("IMAGE", "<image>"))
    processor = processor_kind(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return TinyVision(folder, model, processor)


def _llava(folder: Path) -> TinyVision:
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaProcessor

    settings = {"text_config": {"model_type": "llama", **TEXT}, "image_seq_length": 16}
    return _with_clip(folder, LlavaConfig, LlavaProcessor, CLIPImageProcessorPil(**CLIP_SIZES), settings)


def _llava_next(folder: Path) -> TinyVision:
    from transformers import LlavaNextConfig, LlavaNextImageProcessorPil, LlavaNextProcessor

    shapes = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]}
    images = LlavaNextImageProcessorPil(**CLIP_SIZES, **shapes)
    settings = {"text_config": {"model_type": "qwen2", **TEXT}, **shapes}
    return _with_clip(folder, LlavaNextConfig, LlavaNextProcessor, images, settings)


@dataclass(frozen=True, slots=True)
class PlainProcessor:
    """Stands in for processors that need torchvision: the text comes from what the image processor has made."""

    images: Any
    tokenizer: Any
    token: str
    written: Callable[[Any, int], str]
    options: dict[str, Any]
    marks_images: bool = False

    def __call__(self, text: str, images: Any, return_tensors: str) -> dict[str, Any]:
        made = dict(self.images(images=images, return_tensors="pt", **self.options)) if images else {}
        first, *rest = text.split(self.token)
        text = first + "".join(self.written(made, number) + piece for number, piece in enumerate(rest))
        inputs = dict(self.tokenizer(text, return_tensors="pt"))
        if self.marks_images:
            image_id = self.tokenizer.convert_tokens_to_ids(self.token)
            made["mm_token_type_ids"] = (inputs["input_ids"] == image_id).int()
        inputs.pop("token_type_ids", None)
        return inputs | made


# As Qwen's and Gemma's: plain text or parts.
EITHER_TEMPLATE = (
    "<s>{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _gemma3(folder: Path) -> TinyVision:
    from transformers import Gemma3Config, Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = _tokenizer(folder, ("<start_of_image>", "<image_soft_token>", "<end_of_image>"))
    tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = (
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    )
    names = ("boi_token", "eoi_token", "image_token")
    ids = {name: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for name in names}
    tokenizer.boi_token_id, tokenizer.image_token_id = ids["boi_token"], ids["image_token"]
    config = Gemma3Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 16,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config=VISION,
        tie_word_embeddings=False,  # a tied random model only repeats its last token
        mm_tokens_per_image=16,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    template = EITHER_TEMPLATE.replace("IMAGE", "<start_of_image>")
    model = _save(folder, config, tokenizer, images, template)
    return TinyVision(folder, model, Gemma3Processor(images, tokenizer, image_seq_length=16))


QWEN35_TEXT: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def _qwen(folder: Path, version: str) -> TinyVision:
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(folder, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"))
    ids = [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")]
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    patch = 4
    if version == "2":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    elif version == "2_5_":
        vision |= {"fullatt_block_indexes": [1], "window_size": 16}
    elif version == "3":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    else:
        vision |= {"num_position_embeddings": 64}
    text = {**TEXT, "num_hidden_layers": 3}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if version.startswith("3_5"):
        text |= QWEN35_TEXT
    settings = {
        "text_config": text,
        "vision_config": {**vision, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "image_token_id": ids[0],
        "video_token_id": ids[1],
    }
    kind = version if version.startswith("3_5") else f"{version}VL"
    config = getattr(transformers, f"Qwen{kind}Config")(**settings)
    images = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    template = EITHER_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    model = _save(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return "<|image_pad|>" * (int(made["image_grid_thw"][number].prod()) // 4)

    processor = PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}, marks_images=True)
    return TinyVision(folder, model, processor)


def _pixtral(folder: Path, *, mistral3: bool = False) -> TinyVision:
    from transformers import (
        LlavaConfig,
        Mistral3Config,
        PixtralImageProcessorPil,
    )

    tokenizer = _tokenizer(folder, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16}
    settings: dict[str, Any] = {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {**vision, "image_size": 64},
        "image_token_id": tokenizer.convert_tokens_to_ids("[IMG]"),
        "vision_feature_layer": -1,
    }
    if mistral3:
        config = Mistral3Config(**settings, spatial_merge_size=2)
    else:
        config = LlavaConfig(**settings, vision_feature_select_strategy="full", image_seq_length=1)
    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    model = _save(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "[IMG]"))
    patch = 16 if mistral3 else 8

    def written(made: Any, number: int) -> str:
        rows, columns = (int(side) // patch for side in made["image_sizes"][number])
        lines = ["[IMG]" * columns] * rows
        return "[IMG_BREAK]".join(lines) + "[IMG_END]"

    options = {"patch_size": {"height": patch, "width": patch}}
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "[IMG]", written, options))


def _internvl(folder: Path) -> TinyVision:
    from transformers import GotOcr2ImageProcessorPil, InternVLConfig

    names = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    tokenizer = _tokenizer(folder, names)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    model = _save(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n"))

    def written(made: Any, number: int) -> str:
        count = int(made["num_patches"][number])
        if number == len(made["num_patches"]) - 1:
            del made["num_patches"]  # which the model does not take
        return f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>"

    options = {"crop_to_patches": True}
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<IMG_CONTEXT>", written, options))


CHECKPOINTS: dict[str, Callable[[Path], TinyVision]] = {
    "idefics3": _idefics3,
    "smolvlm": lambda folder: _idefics3(folder, smol=True),
    "llava": _llava,
    "llava-next": _llava_next,
    "gemma3": _gemma3,
    "qwen2-vl": lambda folder: _qwen(folder, "2"),
    "qwen2.5-vl": lambda folder: _qwen(folder, "2_5_"),
    "qwen3-vl": lambda folder: _qwen(folder, "3"),
    "qwen3.5": lambda folder: _qwen(folder, "3_5"),
    "qwen3.5-moe": lambda folder: _qwen(folder, "3_5Moe"),
    "pixtral": _pixtral,
    "mistral3": lambda folder: _pixtral(folder, mistral3=True),
    "internvl": _internvl,
}


def make_vision(name: str, folder: Path) -> TinyVision:
    folder.mkdir(parents=True, exist_ok=True)
    return CHECKPOINTS[name](folder)
