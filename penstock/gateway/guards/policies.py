"""The policies of all workspaces (`GuardPolicies`), and answers that pass a policy on the way to their reader.

A change of the settings applies at once and as a whole; a running request keeps the policy that it began with.

`GuardedAnswer` wraps any answer stream. Text, reasoning and the arguments of tool calls each go through a scanner of
their own, which holds back only the characters that a pattern may still need. Rules that review whole answers hold
back the answer until the review is done, unless they only flag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.core.identity import Principal
from penstock.core.request import FinishReason, Tier
from penstock.gateway.answers.choice import Delta, ToolCallDelta, merge_deltas
from penstock.gateway.answers.stream import AnswerStream, WrappedAnswer
from penstock.gateway.guards.detector import Subject
from penstock.gateway.guards.inputs import Decode, RunLater, check_input, reviewed, watch
from penstock.gateway.guards.policy import GuardMetrics, Policy, PolicyRun, compile_policy
from penstock.gateway.guards.reviews import Ask
from penstock.gateway.guards.scanner import Scanner
from penstock.gateway.guards.settings import NO_POLICY, GuardSettings, check_guard_settings
from penstock.gateway.prompts import GenerationRequest


class GuardedChoice:
    """One answer's way through the patterns of a policy."""

    def __init__(self, index: int, case: PolicyRun) -> None:
        self._index = index
        self._case = case
        self._stage = case.policy.output
        self._text = self._stage.scanner()
        self._reasoning = self._stage.scanner()
        self._arguments: dict[int, Scanner] = {}
        self._has_begun = False
        self.is_over = False

    def push(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the reader may see; None when there is none."""
        if self.is_over:
            return None
        is_last = delta.finish_reason is not None
        reasoning = self._reasoning.push(delta.reasoning)
        if is_last or delta.text or delta.tool_calls:  # reasoning is over once something else begins
            reasoning += self._reasoning.finish()
            self._report(self._reasoning)
            if self._reasoning.stopped is None:
                self._reasoning = self._stage.scanner()
        text = ""
        calls: tuple[ToolCallDelta, ...] = ()
        if self._reasoning.stopped is None:
            text = self._text.push(delta.text)
            calls = self._push_calls(delta.tool_calls)
            if is_last and self._text.stopped is None:
                text += self._text.finish()
                calls += self._finish_calls()
        reason = FinishReason.CONTENT_FILTER if self._report_all() else delta.finish_reason
        self.is_over = reason is not None
        is_news = bool(text or reasoning or calls or self.is_over or not self._has_begun)
        self._has_begun = True
        if not is_news:
            return None
        return msgspec.structs.replace(
            delta,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=reason,
            # Log-probabilities spell out every token, hidden ones too.
            details=() if self._stage.hides_text else delta.details,
            token_ids=() if self._stage.hides_text else delta.token_ids,
        )

    def refused(self) -> Delta:
        self.is_over = True
        return Delta(self._index, "", finish_reason=FinishReason.CONTENT_FILTER)

    def _push_calls(self, deltas: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
        shown: list[ToolCallDelta] = []
        for delta in deltas:
            if self._text.stopped is not None:
                break
            if delta.index not in self._arguments:
                shown += self._finish_calls()
                self._arguments[delta.index] = self._stage.scanner()
            scanner = self._arguments[delta.index]
            arguments = scanner.push(delta.arguments, is_json=True)
            if arguments or delta.name is not None or delta.id is not None:
                shown.append(msgspec.structs.replace(delta, arguments=arguments))
        return tuple(shown)

    def _finish_calls(self) -> tuple[ToolCallDelta, ...]:
        rests = [
            (index, scanner.finish(is_json=True))
            for index, scanner in self._arguments.items()
            if scanner.stopped is None
        ]
        return tuple(ToolCallDelta(index, rest) for index, rest in rests if rest)

    def _report_all(self) -> bool:
        """Report what was found; True when something ends the answer."""
        scanners = (self._reasoning, self._text, *self._arguments.values())
        for scanner in scanners:
            self._report(scanner)
        return any(scanner.stopped is not None for scanner in scanners)

    def _report(self, scanner: Scanner) -> None:
        for span in scanner.spans:
            rule = self._stage.rule_of[id(span.detector)]
            self._case.found(rule, "output", span.detector.label, f"holds {span.detector.label}")
        scanner.spans.clear()


class GuardedAnswer(WrappedAnswer):
    """An answer whose reader sees what the policy allows. `run_later` takes reviews whose result delays no reader.
    `on_decided` is called, perhaps more than once, when no review can delay the reader any more."""

    def __init__(
        self, answer: AnswerStream, case: PolicyRun, run_later: RunLater, on_decided: Callable[[], None]
    ) -> None:
        super().__init__(answer)
        self._case = case
        self._run_later = run_later
        self._on_decided = on_decided
        self._choices = [GuardedChoice(index, case) for index in range(answer.num_choices)]
        self._seen: list[list[Delta]] = [[] for _ in self._choices]  # for reviews
        reviews = case.policy.output.reviews
        self._deciding = tuple(rule for rule in reviews if rule.decides)
        self._watching = tuple(rule for rule in reviews if not rule.decides)
        self._has_begun = False
        self._has_reviewed = False
        case.begins("output")
        if not self._deciding:
            on_decided()

    async def __anext__(self) -> list[Delta]:
        if self._deciding and not self._has_reviewed:
            with self._deciding_ends():
                if not self._has_begun:
                    return await self._first_sign()
                return await self._decided(await self._read_all())
        while True:
            if self._is_over:
                self._finish()
                raise StopAsyncIteration
            if deltas := self._push(await anext(self._answer)):
                return deltas

    async def collect(self) -> list[Delta]:
        with self._deciding_ends():
            deltas = self._push(await self._answer.collect())
            if self._deciding:
                deltas = await self._decided(deltas)
        self._finish()
        return deltas

    def cancel(self) -> None:
        self._on_decided()
        super().cancel()

    @contextmanager
    def _deciding_ends(self) -> Iterator[None]:
        """Reviews are over when they have decided, and when the answer or a review fails."""
        try:
            yield
        except BaseException:
            self._on_decided()
            raise
        if self._has_reviewed:
            self._on_decided()

    @property
    def _is_over(self) -> bool:
        return all(choice.is_over for choice in self._choices)

    def _push(self, deltas: list[Delta]) -> list[Delta]:
        shown = [seen for delta in deltas if (seen := self._choices[delta.index].push(delta)) is not None]
        if self._deciding or self._watching:
            for delta in shown:
                self._seen[delta.index].append(delta)
        if self._is_over:
            self._answer.cancel()  # frees the engine's resources of an answer that was cut short
        return shown

    async def _first_sign(self) -> list[Delta]:
        """Return empty deltas, so that the reader knows that answers have begun and does not give up."""
        self._has_begun = True
        deltas = await anext(self._answer)
        self._push(deltas)
        return [Delta(delta.index, "") for delta in deltas]

    async def _read_all(self) -> list[Delta]:
        while not self._is_over:
            self._push(await anext(self._answer))
        return [merge_deltas(deltas) for deltas in self._seen]

    async def _decided(self, deltas: list[Delta]) -> list[Delta]:
        """Whole answers, less those that a review refuses."""
        self._has_reviewed = True
        shown = []
        for delta in deltas:
            is_refused = False
            for rule in self._deciding:
                is_refused = await reviewed(self._case, rule, _subject(delta), "output") is not None
                if is_refused:
                    break
            shown.append(self._choices[delta.index].refused() if is_refused else delta)
        return shown

    def _finish(self) -> None:
        watching, self._watching = self._watching, ()
        if watching:
            subjects = [_subject(merge_deltas(deltas)) for deltas in self._seen if deltas]
            self._run_later(watch(self._case, watching, subjects, "output"))


def _subject(delta: Delta) -> Subject:
    arguments = (call.arguments for call in delta.tool_calls)
    text = "\n\n".join(filter(None, (delta.reasoning, delta.text, *arguments)))
    return Subject(text=text, untrusted=text)


class GuardPolicies:
    def __init__(self, ask: Ask) -> None:
        """`ask` is how judges put their questions to a model."""
        self._ask = ask
        self._settings = GuardSettings()
        self._policies: dict[str, Policy] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.metrics = GuardMetrics()

    def apply(self, settings: GuardSettings) -> None:
        """Use new settings from now on. Raises ConfigError, and changes nothing, when the settings cannot be used."""
        check_guard_settings(settings)
        policies = {
            name: compile_policy(name, policy, self._ask) for name, policy in settings.policies.items()
        }
        self._settings, self._policies = settings, policies

    def policy_for(self, principal: Principal) -> Policy | None:
        if not self._policies:
            return None
        name = self._settings.workspaces.get(principal.workspace_id, self._settings.default_policy)
        return None if name is None or name == NO_POLICY else self._policies[name]

    def case(self, policy: Policy, request_id: str, principal: Principal, tier: Tier) -> PolicyRun:
        return PolicyRun(policy, self.metrics, request_id, principal, tier)

    async def check(self, case: PolicyRun, request: GenerationRequest, decode: Decode) -> GenerationRequest:
        return await check_input(case, request, decode, self._run_later)

    def wrap(self, case: PolicyRun, answer: AnswerStream, on_decided: Callable[[], None]) -> AnswerStream:
        return GuardedAnswer(answer, case, self._run_later, on_decided)

    def _run_later(self, review: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(review)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
