"""The scheduling objective, and policy sets."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import ConfigError
from penstock.core.objective import (
    MAX_RATIO,
    ObjectiveSettings,
    PolicySet,
    RoutingWeights,
    Targets,
    TierSums,
    TierTarget,
    Weights,
    added,
    check_names,
    objective_of,
    policy_of,
    utilisation_of,
)
from penstock.core.request import Tier

SETTINGS = ObjectiveSettings(
    weights=Weights(ttft=1.0, itl=2.0, idle=0.5, drops=10.0),
    targets=Targets(default=TierTarget(ttft_s=1.0, itl_s=0.1), batch=TierTarget(ttft_s=10.0, weight=0.5)),
)


def sums(tier: Tier, *requests: tuple[float | None, float | None, bool]) -> dict[Tier, TierSums]:
    total = TierSums()
    for ttft_s, itl_s, dropped in requests:
        total.add(SETTINGS.targets.of(tier), ttft_s, itl_s, is_dropped=dropped)
    return {tier: total}


def test_terms_are_means_in_units_of_their_targets() -> None:
    found = objective_of(sums(Tier.DEFAULT, (0.5, 0.2, False), (1.5, None, False)), SETTINGS, 0.75)
    terms = found.by_tier[Tier.DEFAULT]
    assert (terms.ttft, terms.itl, terms.drops) == (1.0, 4.0, 0.0)
    assert terms.idle == 0.125
    assert found.total == terms.total == pytest.approx(5.125)


def test_a_dropped_request_costs_its_weight_and_no_time() -> None:
    found = objective_of(sums(Tier.DEFAULT, (1.0, None, False), (None, None, True)), SETTINGS, 1.0)
    assert (found.overall.ttft, found.overall.drops) == (1.0, 5.0)


def test_one_very_late_request_does_not_hide_all_others() -> None:
    assert objective_of(sums(Tier.DEFAULT, (1e6, None, False)), SETTINGS, 1.0).total == MAX_RATIO


def test_tiers_have_targets_and_weights_of_their_own() -> None:
    both = sums(Tier.DEFAULT, (1.0, None, False)) | sums(Tier.BATCH, (20.0, None, False))
    found = objective_of(both, SETTINGS, 1.0)
    assert found.by_tier[Tier.BATCH].ttft == 2.0
    assert found.overall.ttft == pytest.approx((1.0 * 1.0 + 0.5 * 2.0) / 1.5)


def test_without_requests_only_idle_time_costs() -> None:
    assert objective_of({}, SETTINGS, 0.0).total == 0.5


def test_sums_of_windows_add_up() -> None:
    first = sums(Tier.DEFAULT, (1.0, 0.1, False))
    second = sums(Tier.DEFAULT, (3.0, 0.3, True)) | sums(Tier.BATCH, (1.0, None, False))
    whole = added([first, second, {}])
    assert whole[Tier.DEFAULT] == sums(Tier.DEFAULT, (1.0, 0.1, False), (3.0, 0.3, True))[Tier.DEFAULT]
    assert whole[Tier.BATCH].num_requests == 1
    assert first[Tier.DEFAULT].num_requests == 1  # unchanged


def test_utilisation_is_between_none_and_all() -> None:
    assert [utilisation_of(rate, 100.0) for rate in (-1.0, 50.0, 200.0)] == [0.0, 0.5, 1.0]
    assert utilisation_of(1.0, 0.0) == 0.0


def test_a_policy_set_changes_only_what_it_names() -> None:
    policy = PolicySet(itl_target_ms=20.0, preempt_batch=False, routing=RoutingWeights(recompute_weight=1.5))
    before = SchedulerConfig(max_num_seqs=8)
    after = policy.applied_to(before)
    assert (after.itl_target_ms, after.preempt_batch, after.max_num_seqs) == (20.0, False, 8)
    assert policy.engine_settings() == {"itl_target_ms": 20.0, "preempt_batch": False}


def test_every_part_of_a_set_that_is_no_routing_or_weight_is_a_setting_of_the_scheduler() -> None:
    names = set(PolicySet.__struct_fields__) - {"routing", "weights"}
    assert names <= set(SchedulerConfig.__struct_fields__)


def test_a_policy_set_is_written_as_the_settings_file_reads_it() -> None:
    policy = PolicySet(
        length_bins="off",
        tier_shares="8,3,1",
        preempt_batch=False,
        itl_target_ms=20.0,
        routing=RoutingWeights(policy="least-loaded"),
        weights=Weights(drops=3.0),
    )
    for name in ("tuned", "v1.2"):
        tables = tomllib.loads(policy.to_toml(name))["policies"]
        assert msgspec.convert(tables[name], PolicySet) == policy


def test_the_default_set_is_there_and_others_must_be_described() -> None:
    assert policy_of({}, "default") == PolicySet()
    with pytest.raises(ConfigError, match="There is no policy set 'fast'") as refusal:
        policy_of({"slow": PolicySet()}, "fast")
    assert "default, slow" in (refusal.value.hint or "")


@pytest.mark.parametrize("name", ["default", "", "a b", "x" * 65, "-x"])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(ConfigError):
        check_names({name: PolicySet()})
