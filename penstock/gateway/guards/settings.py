"""Safety policies as an operator writes them, and the workspaces that each applies to.

    [guards]
    default_policy = "standard"

    [guards.policies.standard]
    on_failure = "closed"
    rules = [
        { guard = "pii", action = "redact" },
        { guard = "blocklist", terms = ["project nightfall"], action = "refuse" },
    ]

    [guards.workspaces]
    ws_research = "none"

Plain data: `policy.compile_policy` turns it into something that runs.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.figures import Count, Share

NO_POLICY = "none"  # the name that exempts a workspace

Stage = Literal["input", "output", "both"]
OnFailure = Literal["open", "closed"]
PiiKind = Literal["email", "phone", "iban", "credit_card", "ip_address", "us_ssn"]
ALL_PII: tuple[PiiKind, ...] = ("email", "phone", "iban", "credit_card", "ip_address", "us_ssn")
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]  # names become labels of metrics


class Action(enum.StrEnum):
    """The action on text in which a rule found something. If several rules apply, the strictest action counts."""

    ALLOW = "allow"  # nothing; it is counted
    FLAG = "flag"  # it is logged
    REDACT = "redact"  # a label takes the place of what was found
    ROUTE = "route"  # another model answers
    REFUSE = "refuse"  # the request is refused, or the answer ends before what was found


class RuleSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="guard", tag="rule"
):
    """The fields of every rule."""

    name: Name | None = None  # in logs and metrics; the guard's own name when absent
    stage: Stage = "both"
    action: Action = Action.REFUSE
    route_to: str | None = None  # the model that answers instead, with action = "route"
    on_failure: OnFailure | None = None  # None: as the policy says


class BlocklistRule(RuleSettings, frozen=True, kw_only=True, tag="blocklist"):
    terms: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    patterns: tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...] = ()  # RE2
    ignore_case: bool = True
    whole_words: bool = True  # of terms; patterns say so themselves


class PiiRule(RuleSettings, frozen=True, kw_only=True, tag="pii"):
    action: Action = Action.REDACT
    kinds: tuple[PiiKind, ...] = ALL_PII
    national_ids: dict[Name, str] = {}  # RE2 patterns by name


class InjectionRule(RuleSettings, frozen=True, kw_only=True, tag="injection"):
    stage: Stage = "input"
    threshold: Share = 0.6


class JudgeRule(RuleSettings, frozen=True, kw_only=True, tag="judge"):
    constitution: Annotated[str, Meta(min_length=1, max_length=20_000)]
    model: str | None = None  # any served model; None: the only one there is
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 20.0
    max_tokens: Annotated[int, Meta(ge=16, le=4096)] = 200
    max_characters: Count = 200_000  # of one text; for a longer one the check has failed


Rule: TypeAlias = BlocklistRule | PiiRule | InjectionRule | JudgeRule


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rules: tuple[Rule, ...] = ()
    on_failure: OnFailure = "closed"  # when a guard breaks or takes too long: let pass, or refuse
    scan_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0  # for the patterns of one prompt
    log_text: bool = False  # whether logs may quote what was found


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policies: dict[Name, PolicySettings] = {}
    default_policy: str | None = None  # for workspaces that are not listed
    workspaces: dict[str, str] = {}  # workspace id → policy, or "none"


def check_guard_settings(settings: GuardSettings) -> None:
    """Raises ConfigError for what types alone cannot tell."""
    known = {*settings.policies, NO_POLICY}
    if NO_POLICY in settings.policies:
        raise ConfigError(f"A policy cannot be called {NO_POLICY!r}, which means the absence of one.")
    for place, name in (("default_policy", settings.default_policy), *settings.workspaces.items()):
        if name is not None and name not in known:
            raise ConfigError(
                f"The guards of {place} name the policy {name!r}, which does not exist.",
                hint=f"There are: {', '.join(sorted(known))}.",
            )
    for name, policy in settings.policies.items():
        for rule in policy.rules:
            _check_rule(rule, f"A {type(rule).__struct_config__.tag} rule of policy {name!r}")


def _check_rule(rule: Rule, subject: str) -> None:
    if (rule.action is Action.ROUTE) != (rule.route_to is not None):
        raise ConfigError(f"{subject} needs both action = 'route' and route_to, or neither.")
    if rule.action is Action.ROUTE and rule.stage != "input":
        raise ConfigError(
            f"{subject} routes answers to another model, which can only be done with prompts.",
            hint="Say stage = 'input'.",
        )
    if isinstance(rule, InjectionRule | JudgeRule) and rule.action is Action.REDACT:
        raise ConfigError(f"{subject} judges a text as a whole, so it has no part to redact.")
    if isinstance(rule, InjectionRule) and rule.stage != "input":
        raise ConfigError(f"{subject} looks for instructions in prompts; it has no use for answers.")
    if isinstance(rule, BlocklistRule) and not rule.terms and not rule.patterns:
        raise ConfigError(f"{subject} has neither terms nor patterns.")
