"""Refuses settings that data-parallel attention does not support, before anything is loaded. Imports no torch."""

from __future__ import annotations

from penstock.core.engine_config import EngineConfig, parse_speculate
from penstock.core.errors import ConfigError


def check_data_parallel(config: EngineConfig) -> None:
    """Raise ConfigError for settings that one engine with data-parallel attention cannot have."""
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return
    if not parallel.enable_expert_parallel:
        raise ConfigError(
            "The ranks of --data-parallel-size share experts, and --enable-expert-parallel is not given.",
            hint="Add --enable-expert-parallel, or start as many replicas.",
        )
    drafts = parse_speculate(config.speculate)
    refused = {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--kv-transfer, which prefill and decode replicas need": config.kv_transfer,
        f"--speculate {config.speculate}": drafts.kind in ("draft", "heads"),
    }
    for what, is_given in refused.items():
        if is_given:
            raise ConfigError(
                f"Data-parallel attention does not support {what}.",
                hint="Leave either that or --data-parallel-size out.",
            )
