"""Keeps replicas alive: launches them, replaces those that die or freeze, drains and stops them. Lives in the process
that owns the replicas; gateways hear of them as `Member`s.

Every process gets an id of its own, so that nothing meant for a dead one can reach its successor. Decides nothing
about how many there should be: who calls `launch` and `stop` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.cluster.life import ReplicaLife
from penstock.cluster.replica import Launcher, Member, ReplicaSpec
from penstock.core.errors import NotFound, PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineReady, EngineStats, LoadProgress
from penstock.router import ReplicaState

log = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
# A request that a gateway sent before it heard of the drain is seen by the heartbeat after the next.
IDLE_HEARTBEATS = 3


@dataclass(slots=True)
class _Post:
    """A place that is to be filled. When its replica dies, another one takes it."""

    life: ReplicaLife
    keeper: asyncio.Task[None] | None = None
    num_restarts: int = 0
    is_leaving: bool = field(default=False)  # no successor is started any more


class Supervisor:
    def __init__(
        self,
        launchers: Mapping[str, Launcher],
        *,
        heartbeat_timeout_s: float = 5.0,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self._launchers = launchers
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_progress = on_progress
        self._posts: list[_Post] = []
        self._num_lives = 0
        self.on_change: list[Callable[[tuple[Member, ...]], None]] = []  # called with all members

    async def launch(self, spec: ReplicaSpec) -> str:
        """Returns the id of a replica that is ready. Raises the engine's own error when it cannot start; from then on
        a replica that ends is replaced, whatever the reason."""
        # Of several that load at once, one is shown.
        on_progress = self._on_progress if not self._posts else None
        post = _Post(self._new_life(spec, on_progress))
        self._posts.append(post)
        self._tell()
        try:
            await post.life.begin(self._launchers[spec.launcher])
        except BaseException:
            await self._remove(post)
            raise
        post.keeper = asyncio.create_task(self._keep(post))
        return post.life.id

    def members(self) -> tuple[Member, ...]:
        """Everyone who is not gone, in the order of their launch."""
        return tuple(post.life.member() for post in self._posts if post.life.state is not ReplicaState.GONE)

    def stats(self, replica_id: str) -> EngineStats:
        """As of its latest heartbeat."""
        return self._post(replica_id).life.stats

    def ready(self, replica_id: str) -> EngineReady | None:
        """What it serves, once it knows."""
        return self._post(replica_id).life.ready

    def pid(self, replica_id: str) -> int | None:
        """Of its process, where that is on this machine."""
        return self._post(replica_id).life.pid

    @property
    def num_restarts(self) -> int:
        """Replicas that took the place of one that died, of those that are still wanted."""
        return sum(post.num_restarts for post in self._posts)

    async def drain(self, replica_id: str, timeout_s: float) -> bool:
        """Send it nothing new and let it finish what it has. False when that took too long, or was called off. One
        that dies meanwhile is not replaced."""
        post = self._post(replica_id)
        life = post.life
        post.is_leaving = True
        life.drain()
        first_heartbeat = life.heartbeats
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while life.state is ReplicaState.DRAINING:
                    if life.stats.num_running or life.stats.num_waiting:
                        first_heartbeat = life.heartbeats
                    elif life.heartbeats >= first_heartbeat + IDLE_HEARTBEATS:
                        return True
                    await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        return life.state is ReplicaState.GONE

    def resume(self, replica_id: str) -> bool:
        """Whether it serves again after a drain."""
        post = self._post(replica_id)
        post.is_leaving = not post.life.resume()
        return not post.is_leaving

    async def stop(self, replica_id: str) -> None:
        """Take it down, with whatever it still does, and start no other in its place."""
        await self._remove(self._post(replica_id))

    async def close(self) -> None:
        await asyncio.gather(*map(self._remove, tuple(self._posts)))

    def _post(self, replica_id: str) -> _Post:
        for post in self._posts:
            if post.life.id == replica_id:
                return post
        raise NotFound(f"There is no replica {replica_id!r}.")

    def _new_life(
        self, spec: ReplicaSpec, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> ReplicaLife:
        self._num_lives += 1
        return ReplicaLife(
            f"replica-{self._num_lives}",
            spec,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            on_change=self._tell,
            on_progress=on_progress,
        )

    def _tell(self) -> None:
        members = self.members()
        for callback in tuple(self.on_change):
            callback(members)

    async def _remove(self, post: _Post) -> None:
        post.is_leaving = True
        if post.keeper is not None:
            post.keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await post.keeper
        if post in self._posts:
            self._posts.remove(post)
            await post.life.end()
            self._tell()

    async def _keep(self, post: _Post) -> None:
        """Fill a post for as long as it is wanted, with growing pauses between one life and the next."""
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RESTART_DELAY_S
        launcher = self._launchers[post.life.spec.launcher]
        how = ""
        while True:
            if not how:
                ready_s = loop.time()
                how = await post.life.over()
                if loop.time() - ready_s > LAST_RESTART_DELAY_S:
                    delay_s = FIRST_RESTART_DELAY_S
            if post.is_leaving:
                log.warning("replica %s %s while it drained", post.life.id, how)
                self._posts.remove(post)
                await post.life.end(at_once=True)
                self._tell()
                return
            successor = self._new_life(post.life.spec)
            log.error("replica %s %s; %s starts in %.1f s", post.life.id, how, successor.id, delay_s)
            predecessor, post.life = post.life, successor
            post.num_restarts += 1
            await predecessor.end(at_once=True)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
            how = ""
            try:
                await successor.begin(launcher)
            except PenstockError as error:
                how = f"did not start: {error.message}"
