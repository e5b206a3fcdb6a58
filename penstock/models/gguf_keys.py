"""Refuses GGUF files with settings that change a model's numbers and that its family does not read. Imports no torch.

Keys that only describe a model, such as `vocab_size`, are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile

# Settings that no family reads, with the values that change nothing; None: any value changes numbers.
_UNREAD: Mapping[str, float | None] = {
    "activation.situ_beta": None,
    "activation_sparsity_scale": 0.0,
    "altup.num_inputs": 1.0,
    "attention.compress_ratios": None,
    "attention.output_scale": 1.0,
    "attention.relative_buckets_count": None,
    "attention.value_scale": 1.0,
    "attn_res.block_size": None,
    "expert_group_scale": 1.0,
    "hyper_connection.count": 1.0,
    "kda.gate_lower_bound": None,
    "num_loops": 1.0,
    "rescale_every_n_layers": 0.0,
    "rope.scaling.alpha": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "router_logit_softcapping": 0.0,
    "swiglu_clamp_exp": 0.0,
    "swiglu_clamp_shexp": 0.0,
    "token_shift_count": None,
}


def refuse_unread_settings(file: GGUFFile, config: ArchitectureConfig) -> None:
    """Raise ModelLoadError for the first setting that would be passed over in silence."""
    fields = metadata_fields(file)
    for key, neutral in _UNREAD.items():
        if fields.has(key) and not _is(fields.raw(key), neutral):
            raise _unread(file, key)
    experts = config.experts
    # Values that differ if the family reads the setting.
    unchanged: dict[str, tuple[bool, float]] = {
        "attention.clamp_kqv": (config.qkv_limit is None, 0.0),
        "attention.scale": (
            math.isclose(config.attention_scale, config.head_dim**-0.5),
            config.head_dim**-0.5,
        ),
        "attn_logit_softcapping": (config.attention_softcap is None, 0.0),
        "final_logit_softcapping": (config.logit_softcap is None, 0.0),
        "logit_scale": (config.logit_scale == 1.0, 1.0),
        "residual_scale": (config.residual_scale == 1.0, 1.0),
        "embedding_scale": (config.embedding_scale == 1.0, 1.0),
        "expert_weights_scale": (experts is None or experts.weight_scale == 1.0, 1.0),
    }
    for key, (is_unchanged, neutral) in unchanged.items():
        value = fields.raw(key)
        # Some converters write 0 for a scale that a model does not have.
        if value is not None and is_unchanged and not _is(value, neutral) and not _is(value, 0.0):
            raise _unread(file, key)


def _is(value: object, neutral: float | None) -> bool:
    values = value if isinstance(value, list) else [value]
    return neutral is not None and all(
        isinstance(each, int | float) and math.isclose(each, neutral, rel_tol=1e-4) for each in values
    )


def _unread(file: GGUFFile, key: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path.name} has {file.architecture}.{key}, which changes the numbers of the model and is not known "
        "of this architecture.",
        hint="Give the folder of the original checkpoint, with --model-implementation transformers.",
    )
