"""Reads the settings of layers with a fixed state from GGUF files, and names their tensors. Imports no torch."""

from __future__ import annotations

from penstock.core.errors import ModelLoadError
from penstock.models.config import RecurrentConfig
from penstock.models.gguf_config import metadata_fields, per_layer
from penstock.models.gguf_file import GGUFFile


def layers_without_attention(file: GGUFFile) -> frozenset[int]:
    """Return the layers for which the file names no key-value heads."""
    counts = per_layer(metadata_fields(file), "attention.head_count_kv")
    return frozenset(index for index, count in enumerate(counts) if not count)


def any_layer_has(file: GGUFFile, layers: frozenset[int], name: str) -> bool:
    return any(f"blk.{layer}.{name}" in file.tensors for layer in layers)


def gguf_mamba_config(file: GGUFFile, layers: frozenset[int]) -> RecurrentConfig:
    """Read the settings of Mamba-2. Files store no limits of steps."""
    fields = metadata_fields(file)
    num_heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if not num_heads or inner % num_heads:
        raise ModelLoadError(
            f"{file.path.name} has {num_heads} heads of Mamba-2 that do not fill {inner} numbers."
        )
    return RecurrentConfig(
        layers=layers,
        conv_width=fields.integer("ssm.conv_kernel"),
        conv_bias=any_layer_has(file, layers, "ssm_conv1d.bias"),
        bias=any_layer_has(file, layers, "ssm_in.bias"),
        output_bias=any_layer_has(file, layers, "ssm_out.bias"),
        num_heads=num_heads,
        head_dim=inner // num_heads,
        num_groups=fields.integer("ssm.group_count", 1),
        state_size=fields.integer("ssm.state_size"),
        has_norm=any_layer_has(file, layers, "ssm_norm.weight"),
    )


def mamba_names(name: str) -> dict[str, str]:
    """Return the usual names of the tensors of Mamba-2, for `gguf_layout`. `name` is the module in a layer."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }
