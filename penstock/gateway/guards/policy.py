"""A compiled policy: each rule with its guard, sorted by the texts that the rule applies to.

`PolicyRun` is a policy at work on one request. It reports what guards found and did: a log line with the reason, and
counters. The log line quotes the prompt only if the policy says so.

The detectors of blocklists and of personal data are here too. Patterns find candidates for personal data, and
checksums tell real data from look-alikes. An ambiguous form is read in the way that hides more, but a number with a
wrong checksum is left alone.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.guards.detector import Check, Detector, Guard
from penstock.gateway.guards.reviews import Ask, InjectionGuard, JudgeGuard
from penstock.gateway.guards.scanner import Scanner
from penstock.gateway.guards.settings import (
    Action,
    BlocklistRule,
    InjectionRule,
    JudgeRule,
    PiiRule,
    PolicySettings,
    Rule,
)
from penstock.gateway.metrics.table import Figures

_EMAIL = r"[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,30}[A-Za-z0-9])?\.){1,5}[A-Za-z]{2,24}"
_PHONE = r"(?:\+|\b00)[1-9](?:[ .\-/()]{0,2}[0-9]){6,14}\b|(?:\(\d{3}\) ?|\b\d{3}[ .\-])\d{3}[ .\-]\d{4}\b"
_IBAN = r"\b[A-Z]{2}[0-9]{2}(?:[ \-]?[A-Za-z0-9]){11,30}\b"
_CARD = r"\b[0-9](?:[ \-]?[0-9]){12,18}\b"
_IPV4 = r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b"
_IPV6 = r"[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,44}"
_US_SSN = r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b"

# Length of an IBAN, by country.
_IBAN_LENGTHS = {
    country: int(length)
    for length, countries in (
        ("15", "NO"), ("16", "BE"), ("18", "DK FI FO GL NL SD"), ("19", "MK SI"),
        ("20", "AT BA EE KZ LT LU MN XK"), ("21", "CH CR HR LI LV"), ("22", "BG BH DE GB GE IE ME RS VA"),
        ("23", "AE GI IL IQ OM TL"), ("24", "AD CZ ES MD PK RO SA SE SK TN VG"), ("25", "LY PT ST"),
        ("26", "IS TR"), ("27", "BI DJ FR GR IT MC MR SM"), ("28", "AL AZ BY CY DO GT HU LB NI PL SV"),
        ("29", "BR EG PS QA UA"), ("30", "JO KW MU YE"), ("31", "MT SC"), ("32", "LC"), ("33", "RU"),
    )
    for country in countries.split()
}  # fmt: skip


def _end_after(text: str, start: int, end: int, num_characters: int) -> int | None:
    """Return where the `num_characters`-th letter or digit of a candidate ends; None when it has fewer."""
    for position in range(start, end):
        if text[position].isalnum():
            num_characters -= 1
            if num_characters == 0:
                return position + 1
    return None


def iban_end(text: str, start: int, end: int) -> int | None:
    length = _IBAN_LENGTHS.get(text[start : start + 2])
    real_end = _end_after(text, start, end, length) if length is not None else None
    if real_end is None:
        return None
    compact = re.sub(r"[ \-]", "", text[start:real_end]).upper()
    digits = "".join(str(int(character, 36)) for character in compact[4:] + compact[:4])
    return real_end if int(digits) % 97 == 1 else None


def passes_luhn(digits: str) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def card_end(text: str, start: int, end: int) -> int | None:
    """Return the end of a card number. Another number (an expiry date) may follow, so groups are dropped from the end
    until the rest is valid."""
    groups = re.split(r"[ \-]", text[start:end])
    digits = "".join(groups)
    if len(set(digits)) == 1:
        return None
    for group in reversed(groups):
        if len(digits) < 13:
            return None
        if passes_luhn(digits):
            return end
        digits = digits[: len(digits) - len(group)]
        end -= len(group) + 1
    return None


def ip_end(text: str, start: int, end: int) -> int | None:
    """Return the end of an address. A dot or colon after it, such as at the end of a sentence, is dropped. Part of a
    longer word is no address."""
    if start > 0 and (text[start - 1].isalnum() or text[start - 1] in ".:"):
        return None
    if end < len(text) and text[end].isalnum():
        return None
    candidate = text[start:end].rstrip(".")
    if candidate.endswith(":") and not candidate.endswith("::"):
        candidate = candidate[:-1]
    try:
        ipaddress.ip_address(candidate)
    except ValueError:
        return None
    return start + len(candidate) if len(candidate) > 3 else None


def ssn_end(text: str, start: int, end: int) -> int | None:
    area, group, serial = text[start:end].split("-")
    is_issued = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return end if is_issued else None


_DETECTORS: Mapping[str, tuple[tuple[str, Check | None], ...]] = {
    "email": ((_EMAIL, None),),
    "phone": ((_PHONE, None),),
    "iban": ((_IBAN, iban_end),),
    "credit_card": ((_CARD, card_end),),
    "ip_address": ((_IPV4, ip_end), (_IPV6, ip_end)),
    "us_ssn": ((_US_SSN, ssn_end),),
}
KINDS = tuple(_DETECTORS)


def pii_detectors(kinds: Iterable[str], national_ids: Mapping[str, str]) -> tuple[Detector, ...]:
    """Return the detectors of these kinds. `national_ids` are more patterns by name."""
    built_in = [
        Detector(kind.upper(), pattern, check=check) for kind in kinds for pattern, check in _DETECTORS[kind]
    ]
    return (*built_in, *(Detector(name.upper(), pattern) for name, pattern in national_ids.items()))


Direction = Literal["input", "output"]


@dataclass(frozen=True)
class PolicyRule:
    name: str
    action: Action
    guard: Guard
    directions: tuple[Direction, ...]
    fails_open: bool
    route_to: str | None = None

    @property
    def decides(self) -> bool:
        """Return whether a finding changes the request or the answer, so that the request must wait for the
        review."""
        return self.action not in (Action.ALLOW, Action.FLAG)


@dataclass(frozen=True)
class DirectionRules:
    """The rules of a policy for one direction: prompts or answers."""

    rules: tuple[PolicyRule, ...]

    @cached_property
    def rule_of(self) -> dict[int, PolicyRule]:
        """Return the rule of each detector, by the detector's identity."""
        return {id(detector): rule for rule in self.rules for detector in rule.guard.detectors}

    @cached_property
    def reviews(self) -> tuple[PolicyRule, ...]:
        return tuple(rule for rule in self.rules if rule.guard.reviews)

    @property
    def has_detectors(self) -> bool:
        return bool(self.rule_of)

    @cached_property
    def hides_text(self) -> bool:
        """Return whether a reader may see less than the model wrote."""
        return any(rule.action in (Action.REDACT, Action.REFUSE) for rule in self.rules)

    @cached_property
    def _detectors(self) -> tuple[tuple[Detector, ...], tuple[Detector, ...], tuple[Detector, ...]]:
        def of(*actions: Action) -> tuple[Detector, ...]:
            return tuple(
                detector for rule in self.rules if rule.action in actions for detector in rule.guard.detectors
            )

        return of(Action.REDACT), of(Action.REFUSE), of(Action.ALLOW, Action.FLAG, Action.ROUTE)

    def scanner(self) -> Scanner:
        hides, stops, notes = self._detectors
        return Scanner(hides, stops, notes)


@dataclass(frozen=True)
class Policy:
    name: str
    input: DirectionRules
    output: DirectionRules
    scan_timeout_s: float
    log_text: bool


def compile_policy(name: str, settings: PolicySettings, ask: Ask) -> Policy:
    """Raises ConfigError for a pattern that cannot be used."""
    rules = [_compile_rule(rule, settings, ask) for rule in settings.rules]
    for rule in rules:
        if "output" in rule.directions:
            for detector in rule.guard.detectors:
                detector.check_streamable()
    return Policy(
        name=name,
        input=DirectionRules(_in_direction(rules, "input")),
        output=DirectionRules(_in_direction(rules, "output")),
        scan_timeout_s=settings.scan_timeout_s,
        log_text=settings.log_text,
    )


def _in_direction(rules: Sequence[PolicyRule], direction: Direction) -> tuple[PolicyRule, ...]:
    return tuple(rule for rule in rules if direction in rule.directions)


def _compile_rule(rule: Rule, policy: PolicySettings, ask: Ask) -> PolicyRule:
    name = rule.name or str(type(rule).__struct_config__.tag)
    return PolicyRule(
        name=name,
        action=rule.action,
        guard=_guard(rule, name, ask),
        directions=("input", "output") if rule.stage == "both" else (rule.stage,),
        fails_open=(rule.on_failure or policy.on_failure) == "open",
        route_to=rule.route_to,
    )


def _guard(rule: Rule, name: str, ask: Ask) -> Guard:
    match rule:
        case BlocklistRule():
            return Guard(
                blocklist_detectors(
                    name.upper(),
                    rule.terms,
                    rule.patterns,
                    ignore_case=rule.ignore_case,
                    whole_words=rule.whole_words,
                )
            )
        case PiiRule():
            return Guard(pii_detectors(rule.kinds, rule.national_ids))
        case InjectionRule():
            return InjectionGuard(rule.threshold)
        case JudgeRule():
            return JudgeGuard(rule, ask)


class _Terms:
    """Checks whether a term stands at a place as a whole word. RE2 finds places fast, but prefers one of several
    terms that begin there, and that term need not end with a word."""

    def __init__(self, terms: Iterable[str], *, ignore_case: bool, whole_words: bool) -> None:
        self._ignore_case = ignore_case
        self._whole_words = whole_words
        self._terms = frozenset(map(self._folded, terms))
        self._lengths = sorted({len(term) for term in self._terms}, reverse=True)

    def __call__(self, text: str, start: int, end: int) -> int | None:
        for length in self._lengths:
            candidate_end = start + length
            if candidate_end > end or self._folded(text[start:candidate_end]) not in self._terms:
                continue
            if not self._whole_words or self._stands_alone(text, start, candidate_end):
                return candidate_end
        return None

    def _folded(self, text: str) -> str:
        return text.lower() if self._ignore_case else text

    def _stands_alone(self, text: str, start: int, end: int) -> bool:
        """Return whether a match is a whole word, in every script. RE2 knows ASCII words only."""
        begins = start == 0 or not (text[start - 1].isalnum() and text[start].isalnum())
        ends = end >= len(text) or not (text[end].isalnum() and text[end - 1].isalnum())
        return begins and ends


def blocklist_detectors(
    label: str, terms: Iterable[str], patterns: Iterable[str], *, ignore_case: bool, whole_words: bool
) -> tuple[Detector, ...]:
    detectors = [Detector(label, pattern, ignore_case=ignore_case) for pattern in patterns]
    # Longest first: the check looks no further than what RE2 found.
    ordered = sorted(set(terms), key=len, reverse=True)
    if ordered:
        alternatives = "|".join(map(re.escape, ordered))
        check = _Terms(ordered, ignore_case=ignore_case, whole_words=whole_words)
        detectors.append(Detector(label, alternatives, ignore_case=ignore_case, check=check))
    return tuple(detectors)


logger = logging.getLogger(__name__)

MAX_QUOTED_CHARS = 200
MAX_LOGGED_FINDINGS = 100  # of one rule in one direction of one request; the metrics count all


class GuardMetrics:
    """Counters of checks, findings and failures."""

    def __init__(self) -> None:
        self.findings: Counter[tuple[str, str, str, str]] = Counter()  # policy, rule, direction, action
        self.failures: Counter[tuple[str, str, str]] = Counter()  # policy, rule, outcome
        self.checked: Counter[tuple[str, str]] = Counter()  # policy, direction

    def figures(self) -> Figures:
        return {
            "guard_checks": self.checked,
            "guard_findings": self.findings,
            "guard_failures": self.failures,
        }


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One request under one policy: guards report about it, and judges ask on its behalf."""

    policy: Policy
    metrics: GuardMetrics
    request_id: str
    principal: Principal
    tier: Tier
    num_found: Counter[tuple[str, Direction]] = field(default_factory=Counter)  # by rule

    def begins(self, direction: Direction) -> None:
        self.metrics.checked[self.policy.name, direction] += 1

    def found(self, rule: PolicyRule, direction: Direction, label: str, reason: str, text: str = "") -> None:
        self.metrics.findings[self.policy.name, rule.name, direction, rule.action.value] += 1
        self.num_found[rule.name, direction] += 1
        if rule.action is Action.ALLOW or self.num_found[rule.name, direction] > MAX_LOGGED_FINDINGS:
            return
        quoted = f" in {text[:MAX_QUOTED_CHARS]!r}" if text and self.policy.log_text else ""
        logger.info(
            "guard %s: %s %s because it %s%s",
            rule.name,
            rule.action.value,
            direction,
            reason,
            quoted,
            extra={"fields": self._fields(rule, direction) | {"label": label}},
        )

    def failed(self, rule: PolicyRule, direction: Direction, reason: str) -> None:
        outcome = "open" if rule.fails_open else "closed"
        self.metrics.failures[self.policy.name, rule.name, outcome] += 1
        logger.warning(
            "guard %s failed, and its policy is %s: %s",
            rule.name,
            outcome,
            reason,
            extra={"fields": self._fields(rule, direction)},
        )

    def _fields(self, rule: PolicyRule, direction: Direction) -> dict[str, str]:
        return {
            "request_id": self.request_id,
            "workspace_id": self.principal.workspace_id,
            "policy": self.policy.name,
            "rule": rule.name,
            "direction": direction,
            "action": rule.action.value,
        }
