"""Encoders with BERT's order of norms, biases, and positions by rotation: GTE, whose MLPs are gated, and Jina 3."""

from __future__ import annotations

from typing import ClassVar

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields, RopeConfig, RopeScaling
from penstock.models.encoders.base import require_known
from penstock.models.encoders.bert import JINA_NAMES, ROBERTA_HEAD, LayerNames, RotatedBert, RotatedConfig
from penstock.models.huggingface_config import rope_config, rope_parameters

_FIXED = {
    "pack_qkv": True,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "position_embedding_type": "rope",
}  # settings of the makers' own files, which may name variants that are not known here


class Gte(RotatedBert):
    name = "gte"
    huggingface_names: ClassVar[tuple[str, ...]] = tuple(
        f"{family}{kind}"
        for family in ("Gte", "New")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    )
    prefixes: ClassVar[tuple[str, ...]] = ("gte.", "new.")
    default_theta: ClassVar[float] = 160_000.0
    default_eps: ClassVar[float] = 1e-12
    default_positions: ClassVar[int] = 8192
    is_gated = True
    is_gate_first = False
    # The makers' names, also in files that transformers writes.
    names: ClassVar[LayerNames] = LayerNames(
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        output_norm="mlp_ln",
    )

    @classmethod
    def read_config(cls, fields: Fields) -> RotatedConfig:
        require_known(fields, _FIXED)
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        max_positions = fields.integer("max_position_embeddings", cls.default_positions)
        return RotatedConfig(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_text_len=max_positions,
            norm_eps=fields.number("layer_norm_eps", cls.default_eps),
            activation=fields.text("hidden_act", "gelu"),
            rope=cls._rope(fields, max_positions, hidden_size // num_heads),
            num_token_types=0 if fields.raw("type_vocab_size") == 0 else fields.integer("type_vocab_size", 1),
        )

    @classmethod
    def _rope(cls, fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
        """Read the rope. NTK scaling in the makers' files is another theta, and the same factor for all pairs."""
        parameters = rope_parameters(fields)
        scaling = Fields(parameters, f"The rope settings of {fields.where}")
        if scaling.raw("type") != "ntk":
            return rope_config(
                parameters, fields, max_positions, head_dim=head_dim, default_theta=cls.default_theta
            )
        if scaling.has("mixed_b"):
            raise ModelLoadError(f"{fields.where} asks for mixed NTK scaling, which is not known.")
        factor = scaling.number("factor")
        theta = fields.number("rope_theta", cls.default_theta) * factor
        return RopeConfig(theta, RopeScaling(kind="linear", factor=factor ** (2 / head_dim)))


class JinaV3(Gte):
    """Jina 3 as transformers has it, without the adapters for tasks."""

    name = "jina_embeddings_v3"
    huggingface_names = tuple(
        f"JinaEmbeddingsV3{kind}" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    )
    prefixes = ("roberta.",)
    default_theta = 20_000.0
    default_eps = 1e-5
    default_positions = 8194
    is_gated = False
    names = JINA_NAMES
    head_layers = ROBERTA_HEAD
