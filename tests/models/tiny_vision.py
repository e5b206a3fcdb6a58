"""What tiny vision-language checkpoints have in common: sizes, templates, pictures, a tokenizer and processors."""

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


def byte_tokenizer(folder: Path, specials: Sequence[str]) -> Any:
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


def save_vision(folder: Path, config: Any, tokenizer: Any, processor: Any, template: str | None) -> Any:
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
    if template is not None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return model


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


class PrefixProcessor(PlainProcessor):
    """As PaliGemma's processor: all tokens of the prompt attend to each other."""

    def __call__(self, text: str, images: Any, return_tensors: str) -> dict[str, Any]:
        inputs = PlainProcessor.__call__(self, text, images, return_tensors)
        return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The settings of an image processor that transformers has with torchvision only."""

    settings: dict[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))
