"""The projector types of `mmproj` files: which class of transformers each is, its settings, and its tensors' names.

A file says less than the folder of a checkpoint. The missing settings are the same in all published models of a type,
and are listed here. The names of tokens are looked up in the vocabulary of the text model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.mmproj_file import MmprojFile

_MOST_TILES = 64


def siglip_names(tower: str) -> dict[str, str]:
    """Return the stored names for parts of names in a SigLIP or CLIP tower."""
    return {
        f"{tower}.encoder.layers": "v.blk",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")},
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        f"{tower}.embeddings.class_embedding": "v.class_embd",
        f"{tower}.embeddings.patch_embedding": "v.patch_embd",
        f"{tower}.embeddings.position_embedding": "v.position_embd",
        f"{tower}.pre_layrnorm": "v.pre_ln",
        f"{tower}.post_layernorm": "v.post_ln",
    }


class Projector(ABC):
    """One type of projector, of one file. `text` has the settings of the text model, `width` is its hidden size."""

    architecture: ClassVar[str]  # the class of transformers, for types that have one
    output: ClassVar[str]  # the stored tensor that makes rows for the text model
    names: ClassVar[Mapping[str, str]]  # stored names, by parts of transformers' names between dots
    image_tokens: ClassVar[tuple[str, ...]] = ("<image>",)  # the first that the vocabulary has
    other_tokens: ClassVar[Mapping[str, str]] = {}  # by the setting that holds the id
    any_token: ClassVar[bool] = False  # older vocabularies have no such token: any that no text has will do
    unused: ClassVar[tuple[str, ...]] = ()  # parts of the tower that images do not pass, and files may lack

    def __init__(self, file: MmprojFile, text: Fields) -> None:
        self._file = file
        self._fields = file.fields
        self._text = text
        self._width = text.integer("embedding_length")
        shape = file.shape(self.output)
        if self._width not in shape:
            raise ModelLoadError(
                f"{file.name} belongs to another model: it has {self.output} of shape {list(shape)}, and the hidden "
                f"size of {text.where} is {self._width}."
            )

    def class_name(self) -> str:
        """Return the name of the class of transformers."""
        return self.architecture

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings of the class, without those of the text model and without tokens."""
        ...

    @abstractmethod
    def processor(self) -> Any:
        """Return the image processor."""
        ...

    def text_settings(self) -> dict[str, Any]:
        """Return the settings of a text model without layers, which stands in for the real one."""
        return {
            "hidden_size": self._width,
            "intermediate_size": 1,
            "num_hidden_layers": 0,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
            "vocab_size": 1,
            "layer_types": [],
            "pad_token_id": None,
            "rms_norm_eps": self._text.number("attention.layer_norm_rms_epsilon", 1e-5),
        }

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor by the name that it has in the class."""
        stored = self.stored_name(name)
        if name.startswith(self.unused) and not self._file.has(stored):
            return torch.zeros(*shape)
        return self._file.tensor(stored, shape)

    def stored_name(self, name: str) -> str:
        parts = "|".join(sorted(map(re.escape, self.names), key=len, reverse=True))
        return re.sub(rf"(?<![^.])(?:{parts})(?![^.])", lambda match: self.names[match[0]], name)

    def vision_settings(self) -> dict[str, Any]:
        return {
            "hidden_size": self._file.hidden_size,
            "intermediate_size": self._file.intermediate_size,
            "num_hidden_layers": self._file.num_layers,
            "num_attention_heads": self._fields.integer("attention.head_count"),
            "image_size": self._image_size,
            "patch_size": self._patch_size,
        }

    def siglip_settings(self) -> dict[str, Any]:
        return {
            **self.vision_settings(),
            "layer_norm_eps": self._fields.number("attention.layer_norm_epsilon", 1e-6),
            "vision_use_head": False,
        }

    def _bounded(self, key: str, default: int, largest: int) -> int:
        """Read a number on which the work for an image depends, such as its pixels."""
        value = self._fields.integer(key, default)
        if value > largest:
            raise ModelLoadError(f"{self._file.name} has {key} = {value}, which is more than {largest}.")
        return value

    @property
    def _image_size(self) -> int:
        return self._fields.integer("image_size")

    @property
    def _patch_size(self) -> int:
        return self._fields.integer("patch_size")

    @property
    def _square(self) -> dict[str, int]:
        return {"height": self._image_size, "width": self._image_size}

    @property
    def _colors(self) -> dict[str, list[float]]:
        """Return how pixels become numbers around zero."""
        return {
            "image_mean": list(self._fields.numbers("image_mean", positive=False)),
            "image_std": list(self._fields.numbers("image_std")),
        }


class Gemma3Projector(Projector):
    architecture = "Gemma3ForConditionalGeneration"
    output = "mm.input_projection.weight"
    image_tokens = ("<image_soft_token>",)
    any_token = True
    other_tokens: ClassVar[Mapping[str, str]] = {
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    }
    names: ClassVar[Mapping[str, str]] = {
        **siglip_names("vision_tower"),
        "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    }

    def settings(self) -> dict[str, Any]:
        side = self._image_size // self._patch_size // self._fields.integer("projector.scale_factor", 4)
        return {"vision_config": self.siglip_settings(), "mm_tokens_per_image": side**2}

    def processor(self) -> Any:
        from transformers import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size=self._square, **self._colors)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        values = super().tensor(name, shape)
        # Files hold what the norm multiplies by.
        return values - 1 if name.endswith("mm_soft_emb_norm.weight") else values


class Idefics3Projector(Projector):
    """Idefics 3 and SmolVLM."""

    architecture = "Idefics3ForConditionalGeneration"
    output = "mm.model.fc.weight"
    names: ClassVar[Mapping[str, str]] = {
        **siglip_names("vision_model"),
        "connector.modality_projection.proj": "mm.model.fc",
    }

    def settings(self) -> dict[str, Any]:
        return {
            "vision_config": self.siglip_settings(),
            "scale_factor": self._fields.integer("projector.scale_factor", 2),
        }

    def processor(self) -> Any:
        from transformers import Idefics3ImageProcessorPil

        tile = self._image_size
        longest = self._fields.integer("preproc_image_size", 4 * tile)  # which older files lack
        return Idefics3ImageProcessorPil(
            size={"longest_edge": longest}, max_image_size={"longest_edge": tile}, **self._colors
        )


class LlavaProjector(Projector):
    """LLaVA 1.5 and 1.6, with a CLIP or SigLIP tower. Files hold the layers up to the one whose output is used."""

    output = "mm.2.weight"
    any_token = True
    unused = ("vision_tower.post_layernorm",)
    names: ClassVar[Mapping[str, str]] = {
        **siglip_names("vision_tower"),
        "multi_modal_projector.linear_1": "mm.0",
        "multi_modal_projector.linear_2": "mm.2",
        "image_newline": "model.image_newline",
    }

    @property
    def _shapes(self) -> list[list[int]]:
        """Return the heights and widths that tiles may fill together: nothing in LLaVA 1.5."""
        if not self._fields.has("image_grid_pinpoints"):
            return []
        sides = [int(side) for side in self._fields.numbers("image_grid_pinpoints")]
        if any(side % self._image_size or side > _MOST_TILES * self._image_size for side in sides):
            raise ModelLoadError(
                f"{self._file.name} has image_grid_pinpoints that are not up to {_MOST_TILES} tiles of "
                f"{self._image_size} pixels."
            )
        return [[height, width] for height, width in zip(sides[::2], sides[1::2], strict=False)]

    def class_name(self) -> str:
        return f"Llava{'Next' if self._shapes else ''}ForConditionalGeneration"

    def settings(self) -> dict[str, Any]:
        if self._fields.has("feature_layer") and len(self._fields.numbers("feature_layer")) > 1:
            raise ModelLoadError(
                f"{self._file.name} uses the outputs of several layers, which is not supported."
            )
        is_clip = self._file.has("v.class_embd")
        vision = {**self.siglip_settings(), "model_type": "siglip_vision_model"}
        if is_clip:
            activation = "gelu" if self._file.all_fields.flag("use_gelu", False) else "quick_gelu"
            vision |= {"model_type": "clip_vision_model", "hidden_act": activation}
        settings = {
            "vision_config": vision,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default" if is_clip else "full",
        }
        return {**settings, "image_grid_pinpoints": self._shapes} if self._shapes else settings

    def text_settings(self) -> dict[str, Any]:
        return {**super().text_settings(), "model_type": "llama"}

    def processor(self) -> Any:
        from transformers import CLIPImageProcessorPil, LlavaNextImageProcessorPil

        sizes = {"size": {"shortest_edge": self._image_size}, "crop_size": self._square, **self._colors}
        if self._shapes:
            return LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=self._shapes)
        return CLIPImageProcessorPil(**sizes)


class InternVLProjector(Projector):
    architecture = "InternVLForConditionalGeneration"
    output = "mm.model.mlp.3.weight"
    image_tokens = ("<IMG_CONTEXT>",)
    names: ClassVar[Mapping[str, str]] = {
        "vision_tower.encoder.layer": "v.blk",
        **{f"attention.{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
        **{f"attention.{part}_norm": f"attn_{part}_norm" for part in ("q", "k")},
        "attention.projection_layer": "attn_out",
        "layernorm_before": "ln1",
        "layernorm_after": "ln2",
        "lambda_1": "ls1.weight",
        "lambda_2": "ls2.weight",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "vision_tower.embeddings.cls_token": "v.class_embd",
        "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
        "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
        "multi_modal_projector.layer_norm": "mm.model.mlp.0",
        "multi_modal_projector.linear_1": "mm.model.mlp.1",
        "multi_modal_projector.linear_2": "mm.model.mlp.3",
    }

    def settings(self) -> dict[str, Any]:
        vision = {
            **self.vision_settings(),
            "image_size": [self._image_size] * 2,
            "patch_size": [self._patch_size] * 2,
            "layer_norm_eps": self._fields.number("attention.layer_norm_epsilon", 1e-6),
            "attention_bias": self._file.has("v.blk.0.attn_q.bias"),
            "use_qk_norm": self._file.has("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if self._file.has("v.blk.0.ln1.bias") else "rms_norm",
        }
        scale = self._fields.integer("projector.scale_factor", 2)
        return {"vision_config": vision, "downsample_ratio": 1 / scale}

    def text_settings(self) -> dict[str, Any]:
        return {**super().text_settings(), "model_type": "qwen2"}

    def processor(self) -> Any:
        from transformers import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(
            size=self._square,
            crop_to_patches=True,
            min_patches=self._bounded("preproc_min_tiles", 1, _MOST_TILES),
            max_patches=self._bounded("preproc_max_tiles", 12, _MOST_TILES),
            **self._colors,
        )
