"""Checks a request against a policy before the request runs. The request is passed on, changed, or refused.

`passages` takes the texts out of the prompts, and `replaced` puts them back changed. Everything that a template may
write is a text here: contents, reasoning, names, ids, arguments and tools. The parts of a message are scanned twice:
with a line break between two parts, as the template writes them, and without line breaks. A match that extends over
two parts is therefore found as well.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from penstock.core.errors import ContentRefused, InvalidRequest, SafetyCheckFailed
from penstock.gateway.guards.detector import GuardFailed, Review, Subject
from penstock.gateway.guards.policy import Direction, PolicyRule, PolicyRun
from penstock.gateway.guards.scanner import Span, scan_whole
from penstock.gateway.guards.settings import Action
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from penstock.gateway.turns import in_thread

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
USUAL_ROLES = TRUSTED_ROLES | {"user", "tool", "function"}
PART_SEPARATOR = "\n"  # what templates, and external servers, put between the parts of a message


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of a prompt, in the pieces that the client sent it in."""

    pieces: tuple[str, ...]
    is_trusted: bool
    is_json: bool = False

    @property
    def text(self) -> str:
        """Return the pieces as a template writes them."""
        return PART_SEPARATOR.join(self.pieces)


def passages(prompt: Prompt) -> list[Passage]:
    """Return the texts of a prompt, in the order in which `replaced` expects them back. Token prompts have none: the
    caller must decode them."""
    if isinstance(prompt, TextPrompt):
        texts = (prompt.text,) if prompt.suffix is None else (prompt.text, prompt.suffix)
        return [Passage((text,), is_trusted=False) for text in texts]
    if isinstance(prompt, ChatPrompt):
        of_messages = [passage for message in prompt.messages for passage in _message_passages(message)]
        of_options = [Passage((text,), is_trusted=False) for text in _texts_of(prompt.template_options)]
        of_tools = [Passage((text,), is_trusted=True) for text in _texts_of(_tools_of(prompt))]
        return of_messages + of_options + of_tools
    return []


def _message_passages(message: ChatMessage) -> Iterator[Passage]:
    is_trusted = message.role in TRUSTED_ROLES
    content = message.content
    pieces = (content,) if isinstance(content, str) else tuple(part.text for part in content)
    yield Passage(pieces, is_trusted)
    for text in (message.reasoning, message.name, message.tool_call_id, _odd_role(message)):
        if text:
            yield Passage((text,), is_trusted)
    for call in message.tool_calls:
        yield Passage((call.arguments,), is_trusted, is_json=True)
        for text in (call.name, call.id):
            yield Passage((text,), is_trusted)


def _odd_role(message: ChatMessage) -> str | None:
    """Return the role of a message if a client invented the role; None for usual roles, which need no check."""
    return None if message.role in USUAL_ROLES else message.role


def replaced(prompt: Prompt, passages: Iterator[tuple[str, ...]]) -> Prompt:
    """Return `prompt` with the pieces of every passage replaced by the pieces in `passages`."""
    if isinstance(prompt, TextPrompt):
        (text,), suffix = next(passages), prompt.suffix
        if suffix is not None:
            (suffix,) = next(passages)
        return TextPrompt(text, suffix, prompt.add_special_tokens)
    if isinstance(prompt, ChatPrompt):
        messages = tuple(_replaced_message(message, passages) for message in prompt.messages)
        for param, value in (("chat_template_kwargs", prompt.template_options), ("tools", _tools_of(prompt))):
            if [(text,) for text in _texts_of(value)] != [next(passages) for _ in _texts_of(value)]:
                raise InvalidRequest(
                    f"A safety policy would have to redact a part of {param}, which cannot be done.",
                    param=param,
                )
        return msgspec.structs.replace(prompt, messages=messages)
    return prompt


def _tools_of(prompt: ChatPrompt) -> list[Any]:
    return [[tool.name, tool.description, tool.parameters] for tool in prompt.tools]


def _texts_of(given: Any) -> list[str]:
    """Return every text and number in what a client gives to the model's template, names included. Without recursion,
    because the value is a client's."""
    found: list[str] = []
    waiting: list[Any] = [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif type(value) in (int, float):
            found.append(str(value))
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
    return found


def _replaced_message(message: ChatMessage, passages: Iterator[tuple[str, ...]]) -> ChatMessage:
    pieces = next(passages)
    content: str | tuple[TextPart, ...]
    if isinstance(message.content, str):
        content = pieces[0]
    else:
        content = tuple(
            msgspec.structs.replace(part, text=text)
            for part, text in zip(message.content, pieces, strict=True)
        )

    def changed(text: str | None) -> str | None:
        return next(passages)[0] if text else text

    reasoning, name, tool_call_id = map(changed, (message.reasoning, message.name, message.tool_call_id))
    role = changed(_odd_role(message)) or message.role
    calls = tuple(
        msgspec.structs.replace(
            call, arguments=next(passages)[0], name=next(passages)[0], id=next(passages)[0]
        )
        for call in message.tool_calls
    )
    return msgspec.structs.replace(
        message,
        role=role,
        content=content,
        reasoning=reasoning,
        name=name,
        tool_call_id=tool_call_id,
        tool_calls=calls,
    )


def spans_across_edges(pieces: Sequence[str], spans: Sequence[Span]) -> list[Span]:
    """Return the findings that an edge between two pieces cuts in two. `spans` are positions in the pieces joined
    without separators; the result has positions in the text with separators."""
    edges = list(accumulate(len(piece) for piece in pieces))[:-1]
    found = []
    for span in spans:
        num_before = bisect_right(edges, span.start)
        num_inside = bisect_left(edges, span.end) - num_before
        if num_inside > 0:
            width = len(PART_SEPARATOR)
            start, end = span.start + num_before * width, span.end + (num_before + num_inside) * width
            found.append(Span(start, end, span.detector))
    return found


def hidden(pieces: Sequence[str], spans: Sequence[Span]) -> tuple[str, ...]:
    """`pieces` with labels in place of `spans`, which are in order. A label stands where its span begins. Each span
    is looked at once: there may be thousands of both."""
    shown = []
    offset = hidden_until = num_seen = 0
    for piece in pieces:
        piece_end = offset + len(piece)
        parts = []
        done = max(offset, min(hidden_until, piece_end))
        while num_seen < len(spans) and spans[num_seen].start < piece_end:
            span = spans[num_seen]
            num_seen += 1
            if span.start >= max(hidden_until, offset):
                parts.append(piece[done - offset : span.start - offset])
                parts.append(f"[{span.detector.label}]")
            hidden_until = max(hidden_until, span.end)
            done = max(done, min(hidden_until, piece_end))
        parts.append(piece[done - offset :])
        shown.append("".join(parts))
        offset = piece_end + len(PART_SEPARATOR)
    return tuple(shown)


def subject_of(prompts: Sequence[Sequence[Passage]]) -> Subject:
    """Everything that the prompts say, for a review as a whole."""
    every = [passage for prompt in prompts for passage in prompt if passage.text]
    return Subject(
        text="\n\n".join(passage.text for passage in every),
        untrusted="\n\n".join(
            text for passage in every if not passage.is_trusted for text in _readings_of(passage)
        ),
    )


def _readings_of(passage: Passage) -> list[str]:
    """Return the text of a passage with line breaks between its parts, and without, because a model may ignore line
    breaks."""
    return [passage.text] if len(passage.pieces) == 1 else [passage.text, "".join(passage.pieces)]


RETRY_AFTER_S = 5.0
# A longer text is scanned in a thread, so that the event loop does not wait; a shorter one is scanned sooner without.
INLINE_CHARS = 8192

# A function that decodes a token prompt, because guards read text.
Decode: TypeAlias = Callable[[Sequence[int]], Awaitable[str]]
RunLater: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True, slots=True)
class _Scan:
    """The findings of patterns in one passage."""

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
    case: PolicyRun, request: GenerationRequest, decode: Decode, run_later: RunLater
) -> GenerationRequest:
    """Return the request as it may run. Raises ContentRefused, or SafetyCheckFailed when a check that must be made
    failed. `run_later` takes reviews whose result the request does not wait for."""
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
    case: PolicyRun, rules: Sequence[PolicyRule], subjects: Sequence[Subject], direction: Direction
) -> None:
    """Run reviews that only report what they find."""
    for subject in subjects:
        for rule in rules:
            with contextlib.suppress(SafetyCheckFailed):
                await reviewed(case, rule, subject, direction)


async def reviewed(
    case: PolicyRun, rule: PolicyRule, subject: Subject, direction: Direction
) -> Review | None:
    """Return the review of a rule's guard. When the guard fails, the policy decides: no finding, or
    SafetyCheckFailed."""
    try:
        review = await rule.guard.review(subject, case)
    except GuardFailed as error:
        case.failed(rule, direction, str(error))
    except Exception as error:  # the policy decides what follows from any error of a guard
        case.failed(rule, direction, f"{type(error).__name__}: {error}")
    else:
        if review is not None:
            case.found(rule, direction, review.label, review.reason, subject.text)
        return review
    if rule.fails_open:
        return None
    raise failure()


async def _apply_patterns(
    case: PolicyRun, request: GenerationRequest, by_prompt: Sequence[Sequence[Passage]], routes: list[str]
) -> GenerationRequest:
    num_chars = sum(len(passage.text) for prompt in by_prompt for passage in prompt)
    try:
        if num_chars <= INLINE_CHARS:
            scans = _scan_all(case, by_prompt)
        else:
            scans = await in_thread(_scan_all, case, by_prompt)
    except GuardFailed as error:
        return _after_failed_scan(case, request, str(error))
    rule_of = case.policy.input.rule_of
    for scan, passage in _pairs(scans, by_prompt):
        text = passage.text if scan.spans else ""
        for span in scan.spans:
            rule = rule_of[id(span.detector)]
            reason = f"holds {span.detector.label}"
            case.found(rule, "input", span.detector.label, reason, text[span.start : span.end])
            if rule.action is Action.REFUSE:
                raise refusal(rule)
            if rule.route_to is not None:
                routes.append(rule.route_to)
    return _with_redactions(request, scans, rule_of)


def _pairs(
    scans: Sequence[Sequence[_Scan]], by_prompt: Sequence[Sequence[Passage]]
) -> list[tuple[_Scan, Passage]]:
    return [pair for both in zip(scans, by_prompt, strict=True) for pair in zip(*both, strict=True)]


def _scan_all(case: PolicyRun, by_prompt: Sequence[Sequence[Passage]]) -> list[list[_Scan]]:
    deadline = monotonic() + case.policy.scan_timeout_s

    def check_time() -> None:
        if monotonic() > deadline:
            raise GuardFailed(f"patterns took longer than {case.policy.scan_timeout_s:g} s")

    return [[_scan(case, passage, check_time) for passage in prompt] for prompt in by_prompt]


def _scan(case: PolicyRun, passage: Passage, check_time: Callable[[], None]) -> _Scan:
    stage = case.policy.input
    scanner = stage.scanner()
    shown = scan_whole(passage.text, scanner, is_json=passage.is_json, between_slices=check_time)
    if len(passage.pieces) == 1:
        return _Scan(tuple(scanner.spans), (shown,))
    spans = _spans_of_parts(case, passage, scanner.spans, check_time)
    hides = [span for span in spans if stage.rule_of[id(span.detector)].action is Action.REDACT]
    return _Scan(spans, hidden(passage.pieces, hides))


def _spans_of_parts(
    case: PolicyRun, passage: Passage, found: Sequence[Span], check_time: Callable[[], None]
) -> tuple[Span, ...]:
    """Return the findings in a message of several parts with line breaks between them, and the findings that exist
    only without line breaks."""
    scanner = case.policy.input.scanner()
    scan_whole("".join(passage.pieces), scanner, between_slices=check_time)
    every = [*found, *spans_across_edges(passage.pieces, scanner.spans)]
    return tuple(sorted(every, key=lambda span: (span.start, -span.end)))


def _after_failed_scan(case: PolicyRun, request: GenerationRequest, reason: str) -> GenerationRequest:
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
