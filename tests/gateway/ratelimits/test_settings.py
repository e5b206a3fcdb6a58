from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal
from penstock.gateway.ratelimits.settings import (
    LimitResolver,
    Limits,
    LimitScope,
    LimitSettings,
    ScopeLimits,
    Subject,
)
from penstock.gateway.ratelimits.shared import _Caller as RedisCaller
from penstock.gateway.settings.settings import parse_settings

CALLER = Principal(key_id="key-1", workspace_id="ws-1")


def test_the_example_of_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text("utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    limits = parse_settings(example, "limits.md").limits
    assert LimitResolver(limits).limits_of(Subject(LimitScope.KEY, "key_ci7")).dollars_per_day == 5.0
    assert LimitResolver(limits).limits_of(Subject(LimitScope.KEY, "key_ci7")).concurrent_requests == 50
    assert (
        LimitResolver(limits).limits_of(Subject(LimitScope.WORKSPACE, "ws_batch")).dollars_per_month == 1000
    )


def test_nothing_applies_without_settings() -> None:
    assert LimitResolver(LimitSettings()).limits_of_caller(CALLER, "llama").applying == ()


def test_each_figure_comes_from_the_most_specific_place_that_states_it() -> None:
    settings = LimitSettings(
        key=ScopeLimits(
            requests_per_minute=1,
            input_tokens_per_minute=2,
            output_tokens_per_minute=3,
            concurrent_requests=4,
            overrides={
                "key-*": Limits(requests_per_minute=10, input_tokens_per_minute=20),
                "*": Limits(input_tokens_per_minute=99, output_tokens_per_minute=30),
                "key-1": Limits(requests_per_minute=100),
            },
        )
    )
    limits = LimitResolver(settings).limits_of(Subject(LimitScope.KEY, "key-1"))
    assert limits.requests_per_minute == 100
    assert limits.input_tokens_per_minute == 20
    assert limits.output_tokens_per_minute == 30
    assert limits.concurrent_requests == 4
    assert LimitResolver(settings).limits_of(Subject(LimitScope.KEY, "other")).requests_per_minute == 1


def test_unlimited_lifts_an_inherited_limit() -> None:
    settings = LimitSettings(
        workspace=ScopeLimits(
            requests_per_minute=5, overrides={"ws-1": Limits(requests_per_minute="unlimited")}
        )
    )
    resolver = LimitResolver(settings)
    assert resolver.limits_of_caller(CALLER, "llama").applying == ()
    other = Principal(workspace_id="ws-2")
    assert len(resolver.limits_of_caller(other, "llama").applying) == 1


def test_every_scope_names_its_subject() -> None:
    settings = LimitSettings(**{scope.value: ScopeLimits(requests_per_minute=5) for scope in LimitScope})
    subjects = [item.subject for item in LimitResolver(settings).limits_of_caller(CALLER, "a/b").applying]
    assert [(subject.scope.value, subject.name) for subject in subjects] == [
        ("key", "key-1"),
        ("workspace", "ws-1"),
        ("model", "a/b"),
        ("key_model", "key-1/a/b"),
        ("workspace_model", "ws-1/a/b"),
    ]


def test_pairs_can_be_overridden_by_either_half() -> None:
    settings = LimitSettings(
        workspace_model=ScopeLimits(
            overrides={"*/big-*": Limits(requests_per_minute=1), "ws-1/*": Limits(concurrent_requests=2)}
        )
    )
    resolver = LimitResolver(settings)
    assert resolver.limits_of(Subject(LimitScope.WORKSPACE_MODEL, "ws-9/big-70b")).requests_per_minute == 1
    assert resolver.limits_of(Subject(LimitScope.WORKSPACE_MODEL, "ws-1/small")).concurrent_requests == 2


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"key": {"requests_per_minute": 0}}, "requests_per_minute"),
        ({"key": {"requests_per_minute": "many"}}, "requests_per_minute"),
        ({"key": {"requests": 5}}, "requests"),
        ({"model": {"dollars_per_day": -1}}, "dollars_per_day"),
        ({"max_reserved_output_tokens": 0}, "max_reserved_output_tokens"),
    ],
)
def test_a_wrong_document_is_refused(document: dict[str, object], complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.convert(document, LimitSettings)


def test_an_override_of_a_pair_names_both_halves() -> None:
    settings = LimitSettings(key_model=ScopeLimits(overrides={"key-1": Limits(requests_per_minute=1)}))
    with pytest.raises(ConfigError, match="ID/MODEL"):
        settings.check()


def test_an_answer_never_reserves_more_than_a_quarter_of_the_smallest_output_limit() -> None:
    settings = LimitSettings(
        key=ScopeLimits(output_tokens_per_minute=1000), workspace=ScopeLimits(output_tokens_per_minute=400)
    )
    caller = LimitResolver(settings).limits_of_caller(CALLER, "llama")
    assert caller.max_reserved_output_tokens == 100
    generous = LimitSettings(key=ScopeLimits(output_tokens_per_minute=10**9))
    assert LimitResolver(generous).limits_of_caller(CALLER, "llama").max_reserved_output_tokens == 1024


def test_no_subject_has_a_redis_key_of_another() -> None:
    """The subject of a token is the caller's to choose, so it may end in `:leases`."""
    resolver = LimitResolver(LimitSettings(key=ScopeLimits(requests_per_minute=1)))
    keys = [
        key
        for key_id in ("a", "a:leases", "leases:a", "leases:key:a")
        for key in RedisCaller(resolver.limits_of_caller(Principal(key_id=key_id), "m")).keys
    ]
    assert len(set(keys)) == len(keys) == 8
