"""The settings of limits: figures, the callers that they apply to, and the rule for several matches; and the reasons
why limiters refuse requests, as errors for clients and as metrics.

A figure that is absent is inherited: an override by id first, then the first matching pattern in the file's order,
then the scope's default. Only `"unlimited"` lifts a limit that would be inherited. Knows neither buckets, Redis nor
time.

`LimiterMetrics` also says whether a shared limiter can reach Redis.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sized
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError, QuotaExceeded, RateLimited, RequestExceedsLimit
from penstock.core.identity import Principal, RateLimits
from penstock.gateway.metrics.table import Figures

UNLIMITED: Literal["unlimited"] = "unlimited"
Count: TypeAlias = Annotated[int, Meta(ge=1)] | Literal["unlimited"] | None
Dollars: TypeAlias = Annotated[float, Meta(gt=0)] | Literal["unlimited"] | None

_PATTERN_CHARACTERS = frozenset("*?[")
# One answer never reserves more of an output limit than this, so that a few with a huge max_tokens do not lock the
# caller out. Tokens beyond the reservation of an answer are charged when the answer ends.
MAX_RESERVED_OUTPUT_SHARE = 0.25


class LimitScope(enum.StrEnum):
    """Whose use is added up. The value is the name of the table in the settings."""

    KEY = "key"
    WORKSPACE = "workspace"
    MODEL = "model"  # by all callers together
    KEY_MODEL = "key_model"
    WORKSPACE_MODEL = "workspace_model"


class Subject(NamedTuple):
    """One key, workspace or model, or a pair of them written `id/model`."""

    scope: LimitScope
    name: str


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures for one subject. None inherits."""

    requests_per_minute: Count = None
    input_tokens_per_minute: Count = None  # without those read from the cache
    output_tokens_per_minute: Count = None
    concurrent_requests: Count = None
    dollars_per_day: Dollars = None
    dollars_per_month: Dollars = None


class ScopeLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults of a scope, and exceptions by id, model name or pattern (`*`, `?`, `[a-z]`)."""

    overrides: dict[str, Limits] = {}


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about limits that may change while the gateway runs."""

    key: ScopeLimits = ScopeLimits()
    workspace: ScopeLimits = ScopeLimits()
    model: ScopeLimits = ScopeLimits()
    key_model: ScopeLimits = ScopeLimits()
    workspace_model: ScopeLimits = ScopeLimits()
    max_reserved_output_tokens: Annotated[int, Meta(ge=1)] = 1024

    def check(self) -> None:
        """Raise ConfigError for what the types cannot say."""
        for scope in LimitScope:
            for pattern in self.scope(scope).overrides:
                if "_" in scope and "/" not in pattern:
                    raise ConfigError(
                        f"limits.{scope}.overrides has {pattern!r}, which should read ID/MODEL.",
                        hint="Either half may be a pattern, such as '*/llama-*'.",
                    )

    def scope(self, scope: LimitScope) -> ScopeLimits:
        limits: ScopeLimits = getattr(self, scope.value)
        return limits


class ResolvedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one subject; None is no limit."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    dollars_per_day: float | None = None
    dollars_per_month: float | None = None

    @property
    def has_budget(self) -> bool:
        return self.dollars_per_day is not None or self.dollars_per_month is not None


NO_LIMITS = ResolvedLimits()


class AppliedLimits(NamedTuple):
    subject: Subject
    limits: ResolvedLimits


class CallerLimits(NamedTuple):
    """Everything that limits one caller of one model."""

    applying: tuple[AppliedLimits, ...]  # only subjects that are limited at all
    max_reserved_output_tokens: int
    has_budget: bool

    @property
    def reserves(self) -> bool:
        """Return whether any of them counts tokens or money, which are reserved apart from the request."""
        return self.has_budget or any(
            limits.input_tokens_per_minute is not None or limits.output_tokens_per_minute is not None
            for _, limits in self.applying
        )


class LimitResolver:
    """Finds the limits that apply to a caller, for one immutable LimitSettings."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._scopes = tuple(scope for scope in LimitScope if settings.scope(scope) != ScopeLimits())

    def limits_of_caller(self, principal: Principal, model: str | None) -> CallerLimits:
        """Without a model, only the limits that apply to all models."""
        subjects = [
            subject
            for subject in subjects_of(principal.workspace_id, principal.key_id, model)
            if subject.scope in self._scopes
        ]
        pairs = (AppliedLimits(subject, self.limits_of(subject)) for subject in subjects)
        applying = tuple(pair for pair in pairs if pair.limits != NO_LIMITS)
        max_reserved = self._settings.max_reserved_output_tokens
        for _, limits in applying:
            if limits.output_tokens_per_minute is not None:
                share = int(limits.output_tokens_per_minute * MAX_RESERVED_OUTPUT_SHARE)
                max_reserved = min(max_reserved, max(1, share))
        return CallerLimits(applying, max_reserved, any(limits.has_budget for _, limits in applying))

    def limits_of(self, subject: Subject) -> ResolvedLimits:
        scope_limits = self._settings.scope(subject.scope)
        sources = [*_matching(scope_limits.overrides, subject.name), scope_limits]
        figures = ResolvedLimits.__struct_fields__
        return ResolvedLimits(**{figure: _first_stated(figure, sources) for figure in figures})


def subjects_of(workspace: str, key: str, model: str | None) -> tuple[Subject, ...]:
    """Return everything whose use a request counts for, in the order of the scopes."""
    callers = Subject(LimitScope.KEY, key), Subject(LimitScope.WORKSPACE, workspace)
    if model is None:
        return callers
    return (
        *callers,
        Subject(LimitScope.MODEL, model),
        Subject(LimitScope.KEY_MODEL, f"{key}/{model}"),
        Subject(LimitScope.WORKSPACE_MODEL, f"{workspace}/{model}"),
    )


def _matching(overrides: dict[str, Limits], name: str) -> list[Limits]:
    """Return the limits that match, the most specific first."""
    exact = [overrides[name]] if name in overrides else []
    patterns = (pattern for pattern in overrides if not _PATTERN_CHARACTERS.isdisjoint(pattern))
    return exact + [overrides[pattern] for pattern in patterns if fnmatchcase(name, pattern)]


def _first_stated(figure: str, sources: list[Limits]) -> Any:
    for source in sources:
        value = getattr(source, figure)
        if value is not None:
            return None if value == UNLIMITED else value
    return None


# Bounds for the wait that a full concurrency limit suggests, which is only an estimate.
MIN_SLOT_WAIT_S = 0.1
MAX_SLOT_WAIT_S = 60.0


class Figure(enum.StrEnum):
    """One kind of limit of a subject. The value is the name of the limit in the settings."""

    REQUESTS = "requests_per_minute"
    INPUT_TOKENS = "input_tokens_per_minute"
    OUTPUT_TOKENS = "output_tokens_per_minute"
    CONCURRENCY = "concurrent_requests"
    DAY_BUDGET = "dollars_per_day"
    MONTH_BUDGET = "dollars_per_month"


_SUBJECTS = {
    LimitScope.KEY: "this key",
    LimitScope.WORKSPACE: "this workspace",
    LimitScope.MODEL: "this model",
    LimitScope.KEY_MODEL: "this key and model",
    LimitScope.WORKSPACE_MODEL: "this workspace and model",
}


class Refusal(NamedTuple):
    """A limit that refuses a request, and the seconds to wait; infinity where waiting does not help. The largest
    refusal is told."""

    wait_s: float
    figure: Figure
    subject: Subject
    limit: float
    amount: float  # what the request needed of it


def error_for(refusal: Refusal, rate_limits: RateLimits) -> RateLimited:
    error = _error_for(refusal)
    error.rate_limits = rate_limits
    return error


def _error_for(refusal: Refusal) -> RateLimited:
    whose = _SUBJECTS[refusal.subject.scope]
    match refusal.figure:
        case Figure.DAY_BUDGET | Figure.MONTH_BUDGET:
            period = "daily" if refusal.figure is Figure.DAY_BUDGET else "monthly"
            return QuotaExceeded(
                f"The {period} budget of {_dollars(refusal.limit)} for {whose} is used up, or would be by this "
                "request and those that run.",
                retry_after_s=refusal.wait_s,
            )
        case Figure.CONCURRENCY:
            return RateLimited(
                f"{_number(refusal.limit)} requests at once are allowed for {whose}, and as many are running.",
                retry_after_s=refusal.wait_s,
            )
    what = refusal.figure.removesuffix("_per_minute").replace("_", " ")
    if math.isinf(refusal.wait_s):
        return RequestExceedsLimit(
            f"The request needs {_number(refusal.amount)} {what}, more than the {_number(refusal.limit)} per minute "
            f"that {whose} may use."
        )
    return RateLimited(
        f"The limit of {_number(refusal.limit)} {what} per minute for {whose} is reached.",
        retry_after_s=refusal.wait_s,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _dollars(value: float) -> str:
    """Return a budget in words. A budget of less than a cent is not rounded to nothing."""
    return f"${value:,.2f}" if value >= 0.01 or not value else f"${value:.6f}".rstrip("0")


class SlotTimes:
    """Measures how long slots of a concurrency limit are held, so that a refusal can say when a slot may be free."""

    __slots__ = ("_mean_s",)

    _WEIGHT_OF_NEWEST = 0.1

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def observe(self, duration_s: float) -> None:
        if self._mean_s is None:
            self._mean_s = duration_s
        else:
            self._mean_s += self._WEIGHT_OF_NEWEST * (duration_s - self._mean_s)

    def wait_s(self, num_running: int) -> float:
        """Until the first of `num_running`, begun at random moments, may be expected to end."""
        mean_s = 1.0 if self._mean_s is None else self._mean_s
        return min(MAX_SLOT_WAIT_S, max(MIN_SLOT_WAIT_S, mean_s / max(1, num_running)))


class LimiterMetrics:
    """Written by limiters on the event loop, read by a scrape. `redis_is_up` stays None without Redis."""

    def __init__(self) -> None:
        self.admitted = 0
        self.refusals: Counter[tuple[str, str]] = Counter()  # by scope and figure
        self.subjects: Sized = ()
        self.redis_is_up: bool | None = None
        self.redis_errors = 0
        self.local_decisions = 0
        self.closed_refusals = 0
        self.settlements_pending = 0
        self.settlements_lost = 0

    def count_refusal(self, refusal: Refusal) -> None:
        self.refusals[refusal.subject.scope.value, refusal.figure.value] += 1

    def figures(self) -> Figures:
        own: Figures = {
            "limits_refused": self.refusals,
            "limits_admitted": self.admitted,
            "limits_subjects": len(self.subjects),
        }
        if self.redis_is_up is None:
            return own
        return {
            **own,
            "limits_redis_up": self.redis_is_up,
            "limits_settlements_pending": self.settlements_pending,
            "limits_redis_errors": self.redis_errors,
            "limits_local_decisions": self.local_decisions,
            "limits_closed_refusals": self.closed_refusals,
            "limits_settlements_lost": self.settlements_lost,
        }
