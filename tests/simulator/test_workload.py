from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from msgspec.structs import replace as replace_request

from penstock.core.request import Tier
from penstock.simulator.workload import (
    END_TOKEN_ID,
    Arrival,
    Fixed,
    LogNormal,
    Tenant,
    Uniform,
    Workload,
    generate,
)


def arrivals(seed: int = 0, **changes: object) -> list[Arrival]:
    settings: dict[str, object] = {
        "num_requests": 400,
        "requests_per_s": 10.0,
        "prompt_tokens": Uniform(1, 50),
        "output_tokens": Fixed(5),
    }
    return list(generate(Workload(**{**settings, **changes}), Random(seed)))  # type: ignore[arg-type]


def test_a_seed_is_a_workload() -> None:
    assert arrivals(seed=3) == arrivals(seed=3)
    assert arrivals(seed=3) != arrivals(seed=4)


def test_prompts_without_hashes_have_the_same_lengths_and_answers() -> None:
    """Nothing compares such prompts, so that each of their parts repeats its first token."""
    workload = Workload(num_requests=50, requests_per_s=9.0, prompt_tokens=Uniform(1, 50), output_tokens=Fixed(5),
                        prefix_tokens=Fixed(40), session_share=0.5)  # fmt: skip
    plain = list(generate(workload, Random(0), block_size=None))
    hashed = list(generate(workload, Random(0)))
    assert not any(arrival.block_hashes for arrival in plain)
    for simple, full in zip(plain, hashed, strict=True):
        prompts = simple.request.prompt_token_ids, full.request.prompt_token_ids
        assert len(prompts[0]) == len(prompts[1])
        assert simple.output_tokens(0, 5) == full.output_tokens(0, 5)
        request = replace_request(full.request, prompt_token_ids=prompts[0])
        assert simple == full._replace(request=request, block_hashes=())


def test_arrivals_come_in_order_and_at_the_rate_asked_for() -> None:
    times = [arrival.time_s for arrival in arrivals()]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert times[-1] == pytest.approx(40.0, rel=0.2)


def test_ids_are_unique() -> None:
    assert len({arrival.request.id for arrival in arrivals()}) == 400


def test_tenants_share_their_own_prefixes_and_nothing_else() -> None:
    found = arrivals(tenants=(Tenant("a"), Tenant("b")), prefix_tokens=Fixed(20), prefixes_per_tenant=2)
    prefixes = {(a.request.tenant, a.request.prompt_token_ids[:20]) for a in found}
    tails = [a.request.prompt_token_ids[20:] for a in found]
    assert Counter(tenant for tenant, _ in prefixes) == {"a": 2, "b": 2}
    assert len({prefix for _, prefix in prefixes}) == 4
    assert len(set(tails)) == len(tails)


def test_weights_and_tiers_follow_the_tenants() -> None:
    found = arrivals(tenants=(Tenant("a", 3.0, Tier.PRIORITY), Tenant("b", 1.0, Tier.BATCH)))
    counts = Counter((arrival.request.tenant, arrival.request.tier) for arrival in found)
    assert set(counts) == {("a", Tier.PRIORITY), ("b", Tier.BATCH)}
    assert counts["a", Tier.PRIORITY] == pytest.approx(300, rel=0.15)


def test_the_simulated_answer_ends_with_the_end_token() -> None:
    (arrival,) = arrivals(num_requests=1, max_tokens=100)
    answer = [arrival.output_token(index) for index in range(5)]
    assert answer[-1] == END_TOKEN_ID
    assert END_TOKEN_ID not in answer[:-1]
    assert END_TOKEN_ID not in arrival.request.prompt_token_ids
    assert arrival.request.sampling.max_tokens == 100


def test_without_max_tokens_clients_ask_for_what_they_get() -> None:
    (arrival,) = arrivals(num_requests=1)
    assert arrival.request.sampling.max_tokens == arrival.num_output_tokens == 5


def test_deadlines_and_departures_lie_after_arrival() -> None:
    for arrival in arrivals(timeout_s=3.0, mean_patience_s=2.0):
        assert arrival.request.deadline_s == pytest.approx(arrival.time_s + 3.0)
        assert arrival.departs_s is not None
        assert arrival.departs_s > arrival.time_s


def test_log_normal_lengths_have_their_median_and_stay_in_bounds() -> None:
    rng = Random(0)
    drawn = sorted(LogNormal(median=100, sigma=1.0, maximum=1000).draw(rng) for _ in range(2000))
    assert drawn[1000] == pytest.approx(100, rel=0.15)
    assert drawn[0] >= 1
    assert drawn[-1] == 1000
