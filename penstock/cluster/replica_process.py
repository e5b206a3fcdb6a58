"""Follows one process of one replica, from its launch to its end. Never starts another process: `supervisor` does.
Knows no gateway and no request of a client.

    starting   the process exists and loads the model
    warming    the replica answers test requests, so that no client's request is the first
    ready      the replica serves
    draining   the replica finishes its requests and gets no more; it may become ready again
    unhealthy  the process was silent for too long, and is killed
    gone       the process has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.cluster.replica import EngineClient, Launcher, Member, ReplicaSpec, RunningReplica
from penstock.cluster.transport import KeyPair, ZmqEngineClient
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineReady, EngineStats, LoadProgress
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.dispatch import Role
from penstock.router import Replica, ReplicaState

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.2  # for what a process sent before it died to arrive
STACK_DUMP_S = 0.2  # for a frozen process to write the stacks of its threads before it is killed
_MIN_TOKENS = 32  # in a step, for its time to say how long larger steps take
_LARGEST_STEPS = 3.0  # this many of the largest steps may pass in silence
_WORKING_SHARE = 0.1  # of the silence of a process that works counts
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 2  # one by a prompt's computation, one by a decode step
T = TypeVar("T")


def processor_s(pid: int | None) -> float | None:
    """Return the processor time that a process of this machine has used; None if unknown."""
    try:
        # The name of the program, in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask_for_stacks(pid: int | None) -> None:
    """Ask a worker process of this machine to write the stacks of its threads to its log."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class FreezeDetector:
    """Decides how long an engine may send nothing before it counts as frozen. Heartbeats and time are passed in.

    An engine sends no heartbeat during a step, and on a slow device the largest step may take long. The allowed
    silence therefore grows with the time of the largest step at the measured speed. A process that uses its processor
    is slow but not frozen, for example because other processes share its cores. Its silence counts one tenth, so that
    an engine in an endless loop is noticed too."""

    def __init__(self, timeout_s: float, max_step_tokens: int) -> None:
        self._timeout_s = timeout_s
        self._max_step_tokens = max_step_tokens
        self._silent_s = 0.0
        self._num_steps = 0
        self.token_s = 0.0  # seconds per prompt token in a large step

    @property
    def patience_s(self) -> float:
        return max(self._timeout_s, _LARGEST_STEPS * self.token_s * self._max_step_tokens)

    def heard(self, stats: EngineStats) -> None:
        self._silent_s = 0.0
        if stats.step_tokens >= _MIN_TOKENS and stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self.token_s = stats.step_s / stats.step_tokens

    def is_too_long(self, passed_s: float, *, is_working: bool) -> bool:
        """Call this regularly with the planned time between two calls. When the caller itself was held up, heartbeats
        wait to be read, and that time must not count."""
        self._silent_s += passed_s * _WORKING_SHARE if is_working else passed_s
        return self._silent_s > self.patience_s


class ReplicaProcess:
    def __init__(
        self,
        replica_id: str,
        spec: ReplicaSpec,
        *,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        on_progress: Callable[[LoadProgress], None] | None = None,
        client_keys: KeyPair | None = None,
    ) -> None:
        self.id = replica_id
        self._client_keys = client_keys
        self.spec = spec
        self._on_change = on_change
        self._on_progress = on_progress
        self._silence = FreezeDetector(heartbeat_timeout_s, spec.engine.scheduler.max_num_batched_tokens)
        self._state = ReplicaState.STARTING
        self._running: RunningReplica | None = None
        self._client: ZmqEngineClient | None = None
        self._watching: asyncio.Task[str] | None = None
        self.heartbeats = 0  # received so far

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def ready(self) -> EngineReady | None:
        return None if self._client is None else self._client.ready

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self._client is None else self._client.stats

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.pid

    def member(self) -> Member:
        ready = self.ready
        return Member(
            replica=Replica(
                id=self.id,
                models=frozenset((self.spec.model,)),
                state=self._state,
                revision=self.spec.revision,
                region=self.spec.region,
                block_size=self.spec.engine.cache.block_size,
                num_kv_blocks=None if ready is None else ready.num_kv_blocks,
                max_step_tokens=self.spec.engine.scheduler.max_num_batched_tokens,
            ),
            spec=self.spec,
            endpoint="" if self._running is None else self._running.endpoint,
        )

    async def begin(self, launcher: Launcher) -> None:
        """Wait until the replica is ready. Raises the error of a failed start."""
        self._running = await launcher.launch(self.spec, self.id)
        self._client = ZmqEngineClient(
            self._running.endpoint,
            on_progress=self._on_progress,
            on_stats=self._on_stats,
            client_keys=self._client_keys,
        )
        self._client.start()
        self._watching = asyncio.create_task(self._watch(self._running, self._client))
        ready = await self._unless_over(self._client.wait_ready())
        self._become(ReplicaState.WARMING)
        self._silence.token_s = await self._unless_over(warm_up(self._client, ready))
        self._become(ReplicaState.READY)

    async def over(self) -> str:
        """Wait until the process has ended. Returns the rest of a sentence that says how."""
        assert self._watching is not None, "begin() comes first"
        return await asyncio.shield(self._watching)

    def drain(self) -> None:
        if self._state is ReplicaState.READY:
            self._become(ReplicaState.DRAINING)

    def resume(self) -> bool:
        """Take a replica out of draining. Returns whether the replica serves again."""
        if self._state is ReplicaState.DRAINING:
            self._become(ReplicaState.READY)
        return self._state is ReplicaState.READY

    def convert(self, role: Role) -> None:
        self.spec = replace(self.spec, role=role)
        self._on_change()

    async def end(self, *, at_once: bool = False) -> None:
        """Ask the process to leave and wait until it has. With `at_once`, or while it loads, the process is
        killed."""
        was_listening = self._client is not None and self._client.ready is not None
        self._become(ReplicaState.GONE)
        try:
            if self._running is not None:
                if at_once or not was_listening:
                    self._running.kill()
                elif self._client is not None:
                    self._client.shut_down_engine()
                await self._running.stop()
            if self._watching is not None:
                await self._watching
        finally:  # also when the caller is cancelled: an open socket would keep this process from leaving
            if self._client is not None:
                self._client.close()

    def _become(self, state: ReplicaState) -> None:
        if state is not self._state and self._state is not ReplicaState.GONE:
            self._state = state
            self._on_change()

    def _on_stats(self, stats: EngineStats) -> None:
        self.heartbeats += 1
        self._silence.heard(stats)

    async def _watch(self, running: RunningReplica, client: ZmqEngineClient) -> str:
        exited = asyncio.ensure_future(running.wait())
        how = ""
        worked_s = None
        while not (await asyncio.wait((exited,), timeout=HEARTBEAT_INTERVAL_S))[0]:
            if client.ready is None or how:  # an engine sends nothing while it loads its model
                continue
            worked_before_s, worked_s = worked_s, processor_s(running.pid)
            is_working = worked_s != worked_before_s
            if self._silence.is_too_long(HEARTBEAT_INTERVAL_S, is_working=is_working):
                how = f"was silent for {self._silence.patience_s:.1f} s and was killed"
                self._become(ReplicaState.UNHEALTHY)
                ask_for_stacks(running.pid)
                await asyncio.wait((exited,), timeout=STACK_DUMP_S)
                running.kill()
        code = exited.result()
        how = how or (f"ended with exit code {code}" if code >= 0 else ended_by(-code))
        return how if client.failure is None else f"{how} ({client.failure.message})"

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._watching is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait((task,), timeout=LAST_WORDS_S)
            if task.done():
                return task.result()
            raise EngineUnavailable(f"The engine process {self._watching.result()}.", retry_after_s=5.0)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, PenstockError):
                await task


async def warm_up(client: EngineClient, ready: EngineReady) -> float:
    """Make the first requests of a replica, so that no client waits for one-time work. Returns the seconds that
    each prompt token took in the second request."""
    token_s = 0.0
    for number in range(2):
        token_s = await _answer_once(client, ready, f"warm-up-{number}")
    return token_s


async def _answer_once(client: EngineClient, ready: EngineReady, request_id: str) -> float:
    card = ready.model
    num_tokens = max(1, min(_PROMPT_TOKENS, card.max_model_len - _OUTPUT_TOKENS))
    token_id = card.bos_token_id or 0
    request = Request(
        id=request_id,
        prompt_token_ids=(token_id,) * num_tokens,
        sampling=SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
        cache_salt=request_id,  # the cached prefix of this request matches no other
        pooling=None if card.generates else card.pooling,
    )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    started_s = loop.time()
    first_token_s = 0.0

    def on_event(event: TokenEvent) -> None:
        nonlocal first_token_s
        first_token_s = first_token_s or loop.time() - started_s
        if event.finish_reason is FinishReason.ERROR:
            on_error(EngineUnavailable(f"The engine failed its first request: {event.error}"))
        elif event.finish_reason is not None and not ended.done():
            ended.set_result(None)

    def on_error(error: PenstockError) -> None:
        if not ended.done():
            ended.set_exception(error)

    client.add(request, timeout_s=None, on_event=on_event, on_error=on_error)
    await ended
    return first_token_s / num_tokens


def ended_by(number: int) -> str:
    if number == signal.SIGKILL:
        return "was ended by signal 9, as Linux does when memory runs out"
    return f"was ended by signal {number}"
