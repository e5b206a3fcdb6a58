"""Holds a policy against a request before it runs: the request comes out as it was, changed, or refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from penstock.core.errors import ContentRefused, InvalidRequest, SafetyCheckFailed
from penstock.gateway.guards.guard import GuardFailed, Review, Subject
from penstock.gateway.guards.policy import Direction, PolicyRule
from penstock.gateway.guards.prompts import (
    Passage,
    hidden,
    passages,
    replaced,
    spans_across_edges,
    subject_of,
)
from penstock.gateway.guards.reports import Case
from penstock.gateway.guards.scanner import Span, scan_whole
from penstock.gateway.guards.settings import Action
from penstock.gateway.prompts import GenerationRequest, TokenPrompt

RETRY_AFTER_S = 5.0
# Up to here a scan is quicker than handing it to a thread; beyond, the event loop must not wait for it.
INLINE_CHARS = 8192

# Token prompts are text to a guard, and this is how it reads them.
Decode: TypeAlias = Callable[[Sequence[int]], Awaitable[str]]
RunLater: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True, slots=True)
class _Scan:
    """What patterns found in one passage."""

    spans: tuple[Span, ...]
    pieces: tuple[str, ...]  # with what is to be redacted replaced


def refusal(rule: PolicyRule) -> ContentRefused:
    return ContentRefused(
        f"The request was refused by a safety policy (rule {rule.name!r}).",
        hint="Ask the operator of this server what its policy allows.",
    )


def failure() -> SafetyCheckFailed:
    return SafetyCheckFailed("A safety check could not be completed.", retry_after_s=RETRY_AFTER_S)


async def check_input(
    case: Case, request: GenerationRequest, decode: Decode, run_later: RunLater
) -> GenerationRequest:
    """The request as it may run. Raises ContentRefused, or SafetyCheckFailed when a check that must be made failed.
    `run_later` takes reviews whose result the request does not wait for."""
    stage = case.policy.input
    if not stage.rules:
        return request
    case.begins("input")
    by_prompt = [
        [Passage((await decode(prompt.token_ids),), is_trusted=False)]
        if isinstance(prompt, TokenPrompt)
        else passages(prompt)
        for prompt in request.prompts
    ]
    routes: list[str] = []
    if stage.has_detectors:
        request = await _apply_patterns(case, request, by_prompt, routes)
    subject = subject_of(by_prompt)
    watching = tuple(rule for rule in stage.reviews if not rule.decides)
    if watching:
        run_later(watch(case, watching, [subject], "input"))
    for rule in stage.reviews:
        if not rule.decides:
            continue
        review = await reviewed(case, rule, subject, "input")
        if review is not None and rule.action is Action.REFUSE:
            raise refusal(rule)
        if review is not None and rule.route_to is not None:
            routes.append(rule.route_to)
    if not routes:
        return request
    return msgspec.structs.replace(request, model=routes[0], model_is_given=True)


async def watch(
    case: Case, rules: Sequence[PolicyRule], subjects: Sequence[Subject], direction: Direction
) -> None:
    """Reviews that only report."""
    for subject in subjects:
        for rule in rules:
            with contextlib.suppress(SafetyCheckFailed):
                await reviewed(case, rule, subject, direction)


async def reviewed(case: Case, rule: PolicyRule, subject: Subject, direction: Direction) -> Review | None:
    """The review of a rule's guard. When the guard fails, the policy decides: no finding, or SafetyCheckFailed."""
    try:
        review = await rule.guard.review(subject, case)
    except GuardFailed as error:
        case.failed(rule, direction, str(error))
    except Exception as error:  # whatever a guard does, the policy says what follows
        case.failed(rule, direction, f"{type(error).__name__}: {error}")
    else:
        if review is not None:
            case.found(rule, direction, review.label, review.reason, subject.text)
        return review
    if rule.fails_open:
        return None
    raise failure()


async def _apply_patterns(
    case: Case, request: GenerationRequest, by_prompt: Sequence[Sequence[Passage]], routes: list[str]
) -> GenerationRequest:
    num_chars = sum(len(passage.text) for prompt in by_prompt for passage in prompt)
    try:
        if num_chars <= INLINE_CHARS:
            scans = _scan_all(case, by_prompt)
        else:
            scans = await asyncio.to_thread(_scan_all, case, by_prompt)
    except GuardFailed as error:
        return _after_failed_scan(case, request, str(error))
    rule_of = case.policy.input.rule_of
    for scan, passage in _pairs(scans, by_prompt):
        for span in scan.spans:
            rule = rule_of[id(span.detector)]
            reason = f"holds {span.detector.label}"
            case.found(rule, "input", span.detector.label, reason, passage.text[span.start : span.end])
            if rule.action is Action.REFUSE:
                raise refusal(rule)
            if rule.route_to is not None:
                routes.append(rule.route_to)
    return _with_redactions(request, scans, rule_of)


def _pairs(
    scans: Sequence[Sequence[_Scan]], by_prompt: Sequence[Sequence[Passage]]
) -> list[tuple[_Scan, Passage]]:
    return [pair for both in zip(scans, by_prompt, strict=True) for pair in zip(*both, strict=True)]


def _scan_all(case: Case, by_prompt: Sequence[Sequence[Passage]]) -> list[list[_Scan]]:
    deadline = monotonic() + case.policy.scan_timeout_s

    def check_time() -> None:
        if monotonic() > deadline:
            raise GuardFailed(f"patterns took longer than {case.policy.scan_timeout_s:g} s")

    return [[_scan(case, passage, check_time) for passage in prompt] for prompt in by_prompt]


def _scan(case: Case, passage: Passage, check_time: Callable[[], None]) -> _Scan:
    stage = case.policy.input
    scanner = stage.scanner()
    shown = scan_whole(passage.text, scanner, is_json=passage.is_json, between_slices=check_time)
    if len(passage.pieces) == 1:
        return _Scan(tuple(scanner.spans), (shown,))
    spans = _spans_of_parts(case, passage, scanner.spans, check_time)
    hides = [span for span in spans if stage.rule_of[id(span.detector)].action is Action.REDACT]
    return _Scan(spans, hidden(passage.pieces, hides))


def _spans_of_parts(
    case: Case, passage: Passage, found: Sequence[Span], check_time: Callable[[], None]
) -> tuple[Span, ...]:
    """What was found in a message of several parts, and what is only found once the line breaks between them go."""
    scanner = case.policy.input.scanner()
    scan_whole("".join(passage.pieces), scanner, between_slices=check_time)
    every = [*found, *spans_across_edges(passage.pieces, scanner.spans)]
    return tuple(sorted(every, key=lambda span: (span.start, -span.end)))


def _after_failed_scan(case: Case, request: GenerationRequest, reason: str) -> GenerationRequest:
    scanning = [rule for rule in case.policy.input.rules if rule.guard.detectors]
    for rule in scanning:
        case.failed(rule, "input", reason)
    if all(rule.fails_open for rule in scanning):
        return request
    raise failure()


def _with_redactions(
    request: GenerationRequest, scans: Sequence[Sequence[_Scan]], rule_of: dict[int, PolicyRule]
) -> GenerationRequest:
    prompts = []
    for prompt, its_scans in zip(request.prompts, scans, strict=True):
        is_changed = any(
            rule_of[id(span.detector)].action is Action.REDACT for scan in its_scans for span in scan.spans
        )
        if is_changed and isinstance(prompt, TokenPrompt):
            raise InvalidRequest(
                "A safety policy would have to redact this prompt, which cannot be done to token ids.",
                param="prompt",
                hint="Send the prompt as text.",
            )
        prompts.append(replaced(prompt, iter([scan.pieces for scan in its_scans])) if is_changed else prompt)
    return msgspec.structs.replace(request, prompts=tuple(prompts))
