"""The projector types of `mmproj` files whose towers take an image in its own shape. See `mmproj_projectors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.mmproj_file import MmprojFile
from penstock.models.mmproj_projectors import Projector
from penstock.models.rope import pair_order

_LARGEST_WINDOW = 1 << 12  # pixels


def _pixtral_names(tower: str, projector: str) -> dict[str, str]:
    return {
        f"{tower}.transformer.layers": "v.blk",
        **{f"attention.{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
        "attention.o_proj": "attn_out",
        "attention_norm": "ln1",
        "ffn_norm": "ln2",
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        f"{tower}.patch_conv": "v.patch_embd",
        f"{tower}.ln_pre": "v.pre_ln",
        f"{projector}.norm": "mm.input_norm",
        f"{projector}.patch_merger.merging_layer": "mm.patch_merger",
        f"{projector}.linear_1": "mm.1",
        f"{projector}.linear_2": "mm.2",
    }


class PixtralProjector(Projector):
    """Pixtral, and Mistral 3 with squares of patches that become one row."""

    output = "mm.2.weight"
    image_tokens = ("[IMG]",)
    names: ClassVar[Mapping[str, str]] = _pixtral_names("vision_tower", "multi_modal_projector")

    @property
    def _merges(self) -> bool:
        return self._file.has("mm.patch_merger.weight")

    def class_name(self) -> str:
        return f"{'Mistral3' if self._merges else 'Llava'}ForConditionalGeneration"

    def settings(self) -> dict[str, Any]:
        activation = "silu" if self._file.all_fields.flag("use_silu", False) else "gelu"
        vision = {**self.vision_settings(), "model_type": "pixtral", "hidden_act": activation}
        vision["rope_theta"] = self._file.all_fields.number("rope.freq_base", 10000.0)
        settings = {
            "vision_config": vision,
            "vision_feature_layer": -1,
            "multimodal_projector_bias": self._file.has("mm.1.bias"),
        }
        if self._merges:
            return {**settings, "spatial_merge_size": self._fields.integer("spatial_merge_size")}
        return {**settings, "vision_feature_select_strategy": "full"}

    def text_settings(self) -> dict[str, Any]:
        return {**super().text_settings(), "model_type": "mistral"}

    def processor(self) -> Any:
        from transformers import PixtralImageProcessorPil

        longest = self._fields.integer("preproc_image_size", self._image_size)
        patch = {"height": self._patch_size, "width": self._patch_size}
        return PixtralImageProcessorPil(size={"longest_edge": longest}, patch_size=patch, **self._colors)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        values = super().tensor(name, shape)
        if not name.endswith(("attention.q_proj.weight", "attention.k_proj.weight")):
            return values
        # Files have the rows of a rotated pair beside each other.
        head = self._file.hidden_size // self._fields.integer("attention.head_count")
        order = pair_order(head, head, interleaved=True)
        return values.view(-1, head, shape[-1])[:, order].reshape(*shape)


class LightOnOcrProjector(PixtralProjector):
    image_tokens = ("<|image_pad|>",)
    names = _pixtral_names("vision_encoder", "vision_projection")

    def class_name(self) -> str:
        return "LightOnOcrForConditionalGeneration"

    def text_settings(self) -> dict[str, Any]:
        return {**super().text_settings(), "model_type": "qwen3"}


class QwenProjector(Projector):
    """Qwen 2 VL; and what all Qwen towers share: one convolution over two frames, which files hold as two, and
    queries, keys and values in one matrix, which files may hold as three."""

    architecture = "Qwen2VLForConditionalGeneration"
    output = "mm.2.weight"
    image_tokens = ("<|image_pad|>",)
    min_pixels: ClassVar[int] = 56 * 56
    max_pixels: ClassVar[int] = 28 * 28 * 16384
    names: ClassVar[Mapping[str, str]] = {
        "visual.blocks": "v.blk",
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.merger.ln_q": "v.post_ln",
        "visual.merger.mlp.0": "mm.0",
        "visual.merger.mlp.2": "mm.2",
    }

    def __init__(self, file: MmprojFile, text: Fields) -> None:
        super().__init__(file, text)
        if not text.has("rope.dimension_sections"):
            raise ModelLoadError(
                f"{text.where} has no positions in three dimensions (rope.dimension_sections), which images of "
                f"{file.name} need: they belong to different models."
            )

    def settings(self) -> dict[str, Any]:
        return {"vision_config": {**self._sizes(), **self.tower_settings()}}

    def _sizes(self) -> dict[str, Any]:
        return {
            "depth": self._file.num_layers,
            "num_heads": self._fields.integer("attention.head_count"),
            "patch_size": self._patch_size,
            "spatial_merge_size": self._merge_size,
            "temporal_patch_size": 2,
        }

    def tower_settings(self) -> dict[str, Any]:
        """Return the settings in which the versions differ."""
        return {
            "embed_dim": self._file.hidden_size,
            "hidden_size": self._width,
            "mlp_ratio": self._file.intermediate_size // self._file.hidden_size,
        }

    def text_settings(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 0, 0]}
        return {**super().text_settings(), "rope_parameters": rope}

    @property
    def _merge_size(self) -> int:
        return self._fields.integer("spatial_merge_size", 2)

    def processor(self) -> Any:
        from transformers import Qwen2VLImageProcessorPil

        most = self._fields.integer("image_max_pixels", self.max_pixels)
        least = self._bounded("image_min_pixels", min(self.min_pixels, most), most)
        limits = {"shortest_edge": least, "longest_edge": most}
        return Qwen2VLImageProcessorPil(
            patch_size=self._patch_size, merge_size=self._merge_size, size=limits, **self._colors
        )

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        stored = self.stored_name(name)
        if stored == "v.patch_embd.weight":
            rest = shape[0], shape[1], *shape[3:]
            return torch.stack([self._file.tensor(f"{stored}{end}", rest) for end in ("", ".1")], dim=2)
        whole = stored.replace("attn.qkv", "attn_qkv")
        if whole != stored and not self._file.has(whole):
            third = shape[0] // 3, *shape[1:]
            return torch.cat([self._file.tensor(whole.replace("qkv", part), third) for part in "qkv"])
        return self._file.tensor(whole, shape)


class Qwen25Projector(QwenProjector):
    architecture = "Qwen2_5_VLForConditionalGeneration"
    names: ClassVar[Mapping[str, str]] = {
        **QwenProjector.names,
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }

    def tower_settings(self) -> dict[str, Any]:
        period, depth = self._fields.integer("n_wa_pattern"), self._file.num_layers
        return {
            "hidden_size": self._file.hidden_size,
            "intermediate_size": self._file.intermediate_size,
            "out_hidden_size": self._width,
            "fullatt_block_indexes": list(range(period - 1, depth, period)),
            "window_size": self._bounded("window_size", 112, _LARGEST_WINDOW),
        }


class Qwen3Projector(QwenProjector):
    """Qwen 3 VL and Qwen 3.5. Outputs of some layers become further columns of the rows."""

    architecture = "Qwen3VLForConditionalGeneration"
    min_pixels = 256 * 256
    max_pixels = 4096 * 4096
    names: ClassVar[Mapping[str, str]] = {
        **QwenProjector.names,
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
        "visual.pos_embed": "v.position_embd",
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
        "linear_fc1": "fc1",
        "linear_fc2": "fc2",
    }

    @property
    def _deep_layers(self) -> list[int]:
        flags = self._fields.raw("is_deepstack_layers") or []
        if not isinstance(flags, list):
            raise ModelLoadError(f"{self._file.name} has is_deepstack_layers that is not a list.")
        return [index for index, is_deep in enumerate(flags) if is_deep]

    def tower_settings(self) -> dict[str, Any]:
        return {
            "hidden_size": self._file.hidden_size,
            "intermediate_size": self._file.intermediate_size,
            "out_hidden_size": self._width,
            "num_position_embeddings": self._file.shape("v.position_embd.weight")[0],
            "deepstack_visual_indexes": self._deep_layers,
        }

    def stored_name(self, name: str) -> str:
        first, found, rest = name.partition("visual.deepstack_merger_list.")
        if found:  # files count the layers of the tower
            number, _, part = rest.partition(".")
            name = f"{first}v.deepstack.{self._deep_layers[int(number)]}.{part}"
        return super().stored_name(name)
