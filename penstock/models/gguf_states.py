"""Reads layers with a fixed state from GGUF files: the names and forms of their tensors, and the settings that
several families share."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, RecurrentConfig
from penstock.models.gguf_config import has_tensor, layers_with, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.layout import Layout
from penstock.models.mamba import Mamba1Config, mamba1_rows, mamba_rows
from penstock.models.recurrent import log_of_decay

_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_MAMBA1 = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    **{f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")},
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}


def gguf_mamba_config(file: GGUFFile) -> RecurrentConfig:
    """Read the settings of Mamba-2. Biases and norms follow from the tensors of the file."""
    fields, (num_heads, head_dim) = metadata_fields(file), _heads(file)
    return RecurrentConfig(
        layers=layers_with(file, "ssm_a"),
        conv_width=fields.integer("ssm.conv_kernel"),
        conv_bias=has_tensor(file, "ssm_conv1d.bias"),
        bias=has_tensor(file, "ssm_in.bias"),
        output_bias=has_tensor(file, "ssm_out.bias"),
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.integer("ssm.group_count", 1),
        state_size=fields.integer("ssm.state_size"),
        has_norm=has_tensor(file, "ssm_norm.weight"),
    )


def gguf_mamba1_config(file: GGUFFile, selection_eps: float | None) -> Mamba1Config:
    """Read the settings of Mamba 1. `selection_eps` is that of norms of step, write and read, if there are any."""
    fields = metadata_fields(file)
    return Mamba1Config(
        layers=layers_with(file, "ssm_a"),
        conv_width=fields.integer("ssm.conv_kernel"),
        conv_bias=has_tensor(file, "ssm_conv1d.bias"),
        bias=has_tensor(file, "ssm_in.bias"),
        output_bias=has_tensor(file, "ssm_out.bias"),
        state_size=fields.integer("ssm.state_size"),
        num_channels=fields.integer("ssm.inner_size"),
        step_rank=fields.integer("ssm.time_step_rank"),
        selection_eps=selection_eps,
    )


def gguf_delta_config(file: GGUFFile) -> RecurrentConfig:
    """Read the settings of gated delta nets."""
    fields, (num_heads, head_dim) = metadata_fields(file), _heads(file)
    return RecurrentConfig(
        layers=layers_with(file, "ssm_a"),
        conv_width=fields.integer("ssm.conv_kernel"),
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.integer("ssm.group_count"),
        state_size=fields.integer("ssm.state_size"),
    )


def _heads(file: GGUFFile) -> tuple[int, int]:
    """Read the number of heads with a state, and their size."""
    fields = metadata_fields(file)
    inner, num_heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    if inner % num_heads:
        raise ModelLoadError(
            f"{file.path.name} has {num_heads} heads with a state that do not fill {inner} numbers."
        )
    return num_heads, inner // num_heads


def gguf_mamba_layout(
    config: ArchitectureConfig, name: str, names: Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of files with Mamba 1 or 2, which the family has under `name`. Decays are stored as they are
    used, where folders have their logarithms."""
    is_first = isinstance(config.recurrent, Mamba1Config)
    own = {stored: f"{name}.{usual}" for stored, usual in (_MAMBA1 if is_first else _MAMBA).items()}
    return gguf_layout(
        {**own, **(names or {})},
        cut=mamba1_rows(config, name) if is_first else mamba_rows(config, name),
        num_experts=config.num_experts,
        changed={f"{name}.A_log": log_of_decay},
    )
