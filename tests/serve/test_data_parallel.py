"""--data-parallel-size means what users of vLLM know: copies of the model, or ranks that share experts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from penstock.cli.chat import generate
from penstock.core.errors import ConfigError
from penstock.serve.config import resolve


def test_without_shared_experts_it_is_the_number_of_replicas() -> None:
    for given in ({}, {"replicas": "3"}):
        config = resolve({}, {"data_parallel_size": "3", **given})
        assert (config.cluster.replicas, config.engine.parallel.num_ranks) == (3, 1)
    assert resolve({"data_parallel_size": 2}, {}).cluster.replicas == 2
    with pytest.raises(ConfigError, match="another name for --replicas, and the two differ"):
        resolve({}, {"data_parallel_size": "3", "replicas": "2"})


def test_with_shared_experts_it_is_the_number_of_ranks_of_a_replica() -> None:
    config = resolve({}, {"data_parallel_size": "4", "enable_expert_parallel": "true", "replicas": "2"})
    parallel = config.engine.parallel
    assert (config.cluster.replicas, parallel.num_ranks, parallel.ranks_per_stage) == (2, 4, 4)


def test_a_command_with_one_engine_starts_no_replicas() -> None:
    result = CliRunner().invoke(generate, ["-dp", "2", "--model", "echo", "text"])
    assert result.exit_code != 0
    assert "This command runs one engine" in result.output
