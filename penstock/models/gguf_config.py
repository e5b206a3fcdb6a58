"""Reads the settings that most decoders share from GGUF metadata. Imports no torch."""

from __future__ import annotations

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig, RopeScaling
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import windows_by_pattern


def metadata_fields(file: GGUFFile) -> Fields:
    """Return the metadata below the file's architecture: `attention.head_count` reads
    `llama.attention.head_count`."""
    return Fields(file.metadata, file.path.name, prefix=f"{file.architecture}.")


def mixture_in_gguf(file: GGUFFile) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path.name} holds a mixture of experts, which is read from safetensors only.",
        hint="Give the folder of the original checkpoint.",
    )


def common_gguf_config(file: GGUFFile, architecture: str) -> ArchitectureConfig:
    fields = metadata_fields(file)
    if fields.raw("expert_count"):  # files of Mixtral call themselves "llama"
        raise mixture_in_gguf(file)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path.name} has keys and values of different sizes.")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{file.path.name} rotates {rotary_dim} of the {head_dim} numbers of a head, "
            "which cannot be done in pairs."
        )
    tokenizer = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    bos_token_ids = tokenizer.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, hidden_size),
        max_positions=fields.integer("context_length"),
        norm_eps=fields.number(
            "attention.layer_norm_rms_epsilon",
            fields.optional_number("attention.layer_norm_epsilon"),
        ),
        rope=_rope(fields, None if rotary_dim == head_dim else rotary_dim),
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tokenizer.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )


def gguf_windows(fields: Fields, num_layers: int, default_period: int) -> tuple[int | None, ...]:
    """Read the windows. The pattern is a period, or one flag for each layer; most files leave it out."""
    window = fields.integer("attention.sliding_window")
    flags = fields.raw("attention.sliding_window_pattern")
    if isinstance(flags, list) and len(flags) == num_layers:
        return tuple(window if flag else None for flag in flags)
    period = fields.integer("attention.sliding_window_pattern", default_period)
    return windows_by_pattern(window, period, num_layers)


def _vocab_size(file: GGUFFile, hidden_size: int) -> int:
    """Return the rows of the embedding table: the metadata may lack the size, or count without padding rows."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(f"{file.path.name} has no tensor token_embd.weight.")
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ModelLoadError(
            f"{file.path.name} has token_embd.weight of shape {list(table.shape)} "
            f"where the embedding length is {hidden_size}."
        )
    return table.shape[0]


def _rope(fields: Fields, rotary_dim: int | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    scaling = None
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=factor)
    elif kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
        scaling = RopeScaling(kind="yarn", factor=factor, original_max_positions=original)
    elif kind == "longrope":
        scaling = longrope_of(fields)
    elif kind != "none":
        raise ModelLoadError(
            f"{fields.where} asks for rope scaling of kind {kind!r}; known are none, linear, yarn and longrope."
        )
    return RopeConfig(theta, scaling, rotary_dim)


def longrope_of(fields: Fields) -> RopeScaling:
    """Return the settings of longrope, whose divisors are stored as tensors."""
    return RopeScaling(
        kind="longrope",
        factor=1.0,
        original_max_positions=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )
