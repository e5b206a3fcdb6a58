"""Which replicas prefill and which decode, by the flags of `penstock serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cluster.role_scaling import pool_scaling
from penstock.core.config import ClusterConfig, ScalingConfig, ServeConfig
from penstock.core.errors import ConfigError
from penstock.serve.control import planned_replicas


def test_roles_share_a_revision_and_exchange_kv() -> None:
    config = ServeConfig(cluster=ClusterConfig(prefill_replicas=1, decode_replicas=2))
    specs = planned_replicas(config, Path("/model"))
    assert [spec.role for spec in specs] == ["prefill", "decode", "decode"]
    assert all(spec.engine.kv_transfer for spec in specs)
    assert len({spec.revision for spec in specs}) == 1


def test_both_pools_share_a_ceiling_and_have_targets_of_their_own() -> None:
    config = ServeConfig(
        cluster=ClusterConfig(prefill_replicas=1, decode_replicas=2), scaling=ScalingConfig(max_replicas=6)
    )
    prefill, decode = pool_scaling(config.scaling, planned_replicas(config, Path("/model")))
    assert prefill is not None
    assert decode is not None
    assert (prefill.min_replicas, prefill.max_replicas, prefill.itl_target_s) == (1, 6, None)
    assert (decode.min_replicas, decode.max_replicas, decode.itl_target_s) == (1, 6, 0.1)
    fixed = ServeConfig(cluster=ClusterConfig(prefill_replicas=1, decode_replicas=1))
    assert pool_scaling(fixed.scaling, planned_replicas(fixed, Path("/model"))) == [None, None]


def test_without_them_replicas_do_both() -> None:
    specs = planned_replicas(ServeConfig(cluster=ClusterConfig(replicas=2)), Path("/model"))
    assert [(spec.role, spec.engine.kv_transfer) for spec in specs] == [("both", False)] * 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (ServeConfig(cluster=ClusterConfig(prefill_replicas=1)), "need each other"),
        (
            ServeConfig(cluster=ClusterConfig(prefill_replicas=1, decode_replicas=1, replicas=2)),
            "take the place of --replicas",
        ),
        (
            ServeConfig(
                cluster=ClusterConfig(prefill_replicas=1, decode_replicas=1),
                scaling=ScalingConfig(max_replicas=1),
            ),
            "together, and there are 2",
        ),
        (
            ServeConfig(
                cluster=ClusterConfig(prefill_replicas=1, decode_replicas=1),
                scaling=ScalingConfig(min_replicas=2, max_replicas=3),
            ),
            "for each of the prefill and decode pools",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(config: ServeConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        planned_replicas(config, Path("/model"))


def test_a_host_of_a_shared_fleet_may_have_one_role_only() -> None:
    config = ServeConfig(cluster=ClusterConfig(decode_replicas=2))
    specs = planned_replicas(config, Path("/model"), is_shared=True)
    assert [(spec.role, spec.engine.kv_transfer) for spec in specs] == [("decode", True)] * 2
