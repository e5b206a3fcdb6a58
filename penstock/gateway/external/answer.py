"""The answers of external servers to one request, read like those of our own engines.

A task per answer reads what a server sends; the rest is `gateway.stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.cluster.external.call import ExternalCall
from penstock.cluster.external.pool import ExternalPool
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, PenstockError
from penstock.core.request import FinishReason
from penstock.gateway.accounts import Account
from penstock.gateway.answers.stream import MeteredAnswer, StreamContext
from penstock.gateway.external.choice import ExternalChoice
from penstock.gateway.prompts import Usage

logger = logging.getLogger(__name__)


class ExternalAnswer(MeteredAnswer[ExternalChoice]):
    """`start` it once."""

    def __init__(
        self,
        account: Account,
        calls: Sequence[ExternalCall],
        n: int,
        context: StreamContext,
        on_end: Callable[[MeteredAnswer[ExternalChoice]], None],
    ) -> None:
        choices = [ExternalChoice(index, call.estimated_tokens) for index, call in enumerate(calls)]
        super().__init__(account, choices, n, context, on_end)
        self._calls = calls
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, pool: ExternalPool, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        for choice, call in zip(self._choices, self._calls, strict=True):
            timed = msgspec.structs.replace(call, timeout_s=timeout_s)
            self._tasks.append(asyncio.create_task(self._follow(pool, timed, choice)))

    @property
    def usage(self) -> Usage:
        """The usage as servers report it, or as it is estimated. A prompt counts once, however many answers share
        it."""
        leaders = self._choices[:: self._n]
        return Usage(
            prompt_tokens=sum(leader.num_prompt_tokens for leader in leaders),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(leader.cached_tokens for leader in leaders),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def _abandon(self, choices: Sequence[ExternalChoice]) -> None:
        """Closes the connections, by which the servers learn of it."""
        self._stop_reading()

    async def _follow(self, pool: ExternalPool, call: ExternalCall, choice: ExternalChoice) -> None:
        try:
            async with contextlib.aclosing(pool.stream(call)) as chunks:
                async for chunk in chunks:
                    if choice.push(chunk):
                        self._time_token(choice)
                        self._pass_on(choice)
            if choice.ending is None:
                raise EngineUnavailable("The server of this model broke off its answer.", hint="Try again.")
        except PenstockError as error:
            self.fail(error)
        except Exception:
            logger.exception("request %s failed at an external server", call.id)
            self.fail(PenstockError("The server met an error that it did not foresee."))
        else:
            self._finish(choice, choice.ending)

    def _time_token(self, choice: ExternalChoice) -> None:
        now = self._context.clock.now()
        if choice.first_token_at is None:
            choice.first_token_at = now
            self._metrics.first_token_s.observe(now - self._arrived_at)
        else:
            self._metrics.inter_token_s.observe(now - choice.last_token_at)
        choice.last_token_at = now

    def _pass_on(self, choice: ExternalChoice) -> None:
        if self._error is not None:
            return
        if self._is_far_behind(choice):
            self._give_up_on_reader()
        else:
            self._tell(choice)

    def _finish(self, choice: ExternalChoice, reason: FinishReason) -> None:
        choice.finish_reason = reason
        self._close(choice, reason)
        self._pass_on(choice)

    def _close(self, choice: ExternalChoice, reason: FinishReason) -> None:
        # Only now is it known how many there were.
        self._metrics.generation_tokens += choice.num_tokens
        if choice.first_token_at is not None:
            self._metrics.prompt_tokens += choice.num_prompt_tokens
        super()._close(choice, reason)

    def _time_out(self) -> None:
        """An answer that has begun ends where it is; without any there is only the error."""
        open_choices = [choice for choice in self._choices if choice.finish_reason is None]
        if any(choice.first_token_at is None for choice in open_choices):
            self.fail(DeadlineExceeded("The request's deadline passed before its first token."))
            return
        self._stop_reading()
        for choice in open_choices:
            self._finish(choice, choice.ending or FinishReason.DEADLINE)

    def _stop_reading(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
