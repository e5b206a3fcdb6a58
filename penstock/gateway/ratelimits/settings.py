"""The settings of limits: figures, the callers that they apply to, and the rule for several matches.

A figure that is absent is inherited: an override by id first, then the first matching pattern in the file's order,
then the scope's default. Only `"unlimited"` lifts a limit that would be inherited. Knows neither buckets nor time.
"""

from __future__ import annotations

import enum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal

UNLIMITED: Literal["unlimited"] = "unlimited"
Count: TypeAlias = Annotated[int, Meta(ge=1)] | Literal["unlimited"] | None
Dollars: TypeAlias = Annotated[float, Meta(gt=0)] | Literal["unlimited"] | None

_PATTERN_CHARACTERS = frozenset("*?[")
# One answer never reserves more of an output limit than this, so that a few with a huge max_tokens do not lock the
# caller out. What an answer uses beyond its reservation is charged when it ends.
MAX_RESERVED_OUTPUT_SHARE = 0.25


class LimitScope(enum.StrEnum):
    """Whose use is added up. The value is the name of the table in the settings."""

    KEY = "key"
    WORKSPACE = "workspace"
    MODEL = "model"  # by everybody together
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


class Applying(NamedTuple):
    subject: Subject
    limits: ResolvedLimits


class CallerLimits(NamedTuple):
    """Everything that limits one caller of one model."""

    applying: tuple[Applying, ...]  # only subjects that are limited at all
    max_reserved_output_tokens: int
    has_budget: bool

    @property
    def reserves(self) -> bool:
        """Say whether any of them counts tokens or money, which are reserved apart from the request."""
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
        names = ((scope, _name(scope, principal, model)) for scope in self._scopes)
        subjects = (Subject(scope, name) for scope, name in names if name is not None)
        pairs = (Applying(subject, self.limits_of(subject)) for subject in subjects)
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


def _name(scope: LimitScope, principal: Principal, model: str | None) -> str | None:
    if model is None and scope not in (LimitScope.KEY, LimitScope.WORKSPACE):
        return None
    match scope:
        case LimitScope.KEY:
            return principal.key_id
        case LimitScope.WORKSPACE:
            return principal.workspace_id
        case LimitScope.MODEL:
            return model
        case LimitScope.KEY_MODEL:
            return f"{principal.key_id}/{model}"
        case LimitScope.WORKSPACE_MODEL:
            return f"{principal.workspace_id}/{model}"


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
