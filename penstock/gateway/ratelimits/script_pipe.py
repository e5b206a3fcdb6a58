"""Runs Lua scripts in Redis for many callers over one connection, in order, and survives Redis going away.

Calls that arrive while others are on their way travel together in the next pipeline. A call is answered or fails
within the timeout; a post needs no answer and is kept until Redis has it. Knows nothing of limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.core.redis_outages import outage_of
from penstock.gateway.ratelimits.settings import LimiterMetrics

logger = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_PENDING_POSTS = 100_000
PROBE_INTERVAL_S = 0.5

Argument: TypeAlias = str | bytes | float


# Answers that say something about the server, not about the one command: treated like no answer at all.
_OUTAGES = (RedisConnectionError, ReadOnlyError, OutOfMemoryError, MasterDownError, ClusterDownError)


def _is_outage(reply: Any) -> bool:
    return isinstance(reply, RedisError) and (
        isinstance(reply, _OUTAGES) or outage_of(str(reply)) is not None
    )


class RedisGone(Exception):
    """Redis did not answer in time, or not usefully. It may nevertheless have carried out what was asked."""

    def __init__(self, *, may_have_run: bool) -> None:
        super().__init__("Redis does not answer.")
        self.may_have_run = may_have_run


@dataclass(slots=True)
class _Call:
    script: str
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Any] | None = None  # None if no caller waits for it
    is_kept: bool = False  # until Redis has it, however often it must be sent


class ScriptPipe:
    """Belongs to the event loop on which `start` was called. Up until a call fails; then a probe asks for Redis again
    and again, and posts wait. The script `probe` writes to `probe_key`: a Redis that takes no writes is no use."""

    def __init__(
        self,
        client: Redis,
        scripts: Mapping[str, str],
        timeout_s: float,
        metrics: LimiterMetrics,
        probe_key: str,
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._probe_key = probe_key
        self._hashes: dict[str, str] = {}
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._queue: deque[_Call] = deque()  # holds nothing but posts while Redis is down
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None
        self._is_up = False
        self.came_back = asyncio.Event()  # set when Redis answers again; the task that waits clears the event
        metrics.redis_is_up = False

    async def start(self) -> None:
        """Try to reach Redis once, then keep at it in the background."""
        if not await self._comes_up():
            logger.warning("Redis, which limits are shared through, cannot be used")
        self._task = asyncio.create_task(self._run(), name="limits-script-pipe")

    async def flushed(self) -> None:
        """Wait until Redis has everything that was posted."""
        await self._is_idle.wait()

    async def close(self, timeout_s: float) -> None:
        """Deliver what was posted, as far as Redis takes it in time."""
        if self._task is not None:
            if self._is_up:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.flushed(), timeout_s)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._is_up = False
        self._fail_callers(self._queue, may_have_run=False)
        self._metrics.settlements_lost += sum(call.is_kept for call in self._queue)
        await self._client.aclose()

    async def call(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Return the script's answer, or RedisGone."""
        if not self._is_up:
            raise RedisGone(may_have_run=False)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(_Call(script, keys, arguments, reply))
        return await reply

    def post(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        """Carried out at least once, after everything called or posted before it. The oldest posts are lost when an
        outage outlasts the queue."""
        if len(self._queue) >= MAX_PENDING_POSTS and not self._is_up:
            self._queue.popleft()
            self._metrics.settlements_lost += 1
        self._enqueue(_Call(script, keys, arguments, is_kept=True))

    def try_post(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        """Carried out once or, when Redis is gone, not at all."""
        if self._is_up:
            self._enqueue(_Call(script, keys, arguments))

    def _enqueue(self, call: _Call) -> None:
        self._queue.append(call)
        self._metrics.settlements_pending = len(self._queue)
        self._is_idle.clear()
        self._has_work.set()

    async def _run(self) -> None:
        while True:
            if not self._is_up:
                await asyncio.sleep(PROBE_INTERVAL_S)
                if await self._comes_up():
                    self.came_back.set()
                    logger.warning(
                        "Redis answers again: limits are shared, %d settlements follow", len(self._queue)
                    )
                continue
            await self._has_work.wait()
            await self._send_next_batch()
            if not self._queue:
                self._has_work.clear()
                self._is_idle.set()

    async def _comes_up(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._load_scripts()
                await self._client.evalsha(self._hashes["probe"], 1, self._probe_key)
        except Exception as error:
            logger.debug("Redis cannot be used: %s", error)
            return False
        self._is_up = self._metrics.redis_is_up = True
        return True

    async def _send_next_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._execute(batch)
        except Exception as error:  # of whatever kind: callers wait for this task
            await self._go_down(batch, error)
            return
        for call, reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                self._give_up(call, reply)
            elif call.reply is not None and not call.reply.done():
                call.reply.set_result(reply)
        self._metrics.settlements_pending = len(self._queue)

    async def _execute(self, batch: Sequence[_Call]) -> list[Any]:
        """Return an answer, or an error of its own, for each call. Raises when Redis cannot serve, after which any
        number of calls may have been carried out."""
        replies = await self._pipelined(batch)
        if any(isinstance(reply, NoScriptError) for reply in replies):  # Redis was restarted, or flushed
            await self._load_scripts()
            missing = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            again = await self._pipelined([batch[index] for index in missing])
            for index, reply in zip(missing, again, strict=True):
                replies[index] = reply
        for reply in replies:
            if _is_outage(reply):
                raise reply
        return replies

    async def _pipelined(self, batch: Sequence[_Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for call in batch:
            pipeline.evalsha(self._hashes[call.script], len(call.keys), *call.keys, *call.arguments)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def _load_scripts(self) -> None:
        for name, text in self._scripts.items():
            self._hashes[name] = await self._client.script_load(text)

    async def _go_down(self, batch: Sequence[_Call], error: Exception) -> None:
        cause = outage_of(str(error)) or str(error) or type(error).__name__
        logger.warning("Redis, which limits are shared through, is gone: %s", cause)
        self._is_up = self._metrics.redis_is_up = False
        self._metrics.redis_errors += 1
        self._fail_callers(batch, may_have_run=True)
        self._fail_callers(self._queue, may_have_run=False)
        self._queue = deque(call for call in (*batch, *self._queue) if call.is_kept)
        self._metrics.settlements_pending = len(self._queue)
        # A late answer on an old connection must not be taken for the answer to a new call.
        with contextlib.suppress(Exception):
            await self._client.connection_pool.disconnect()

    def _give_up(self, call: _Call, error: Exception) -> None:
        """Sending it again would end the same way."""
        logger.error("Redis refused a %s of limits: %s", call.script, error)
        self._metrics.redis_errors += 1
        if call.is_kept:
            self._metrics.settlements_lost += 1
        self._fail_callers([call], may_have_run=True)

    def _fail_callers(self, calls: Iterable[_Call], *, may_have_run: bool) -> None:
        for call in calls:
            if call.reply is not None and not call.reply.done():
                call.reply.set_exception(RedisGone(may_have_run=may_have_run))


def read_scripts() -> dict[str, str]:
    folder = resources.files("penstock.gateway.ratelimits") / "lua"
    common = (folder / "common.lua").read_text("utf-8")
    return {
        name: common + (folder / f"{name}.lua").read_text("utf-8")
        for name in ("reserve", "give_back", "settle", "renew", "peek", "probe")
    }
