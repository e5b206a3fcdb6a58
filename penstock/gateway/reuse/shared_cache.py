"""Caches that all gateways share through Redis: entries outlive a gateway, end by themselves, are bounded in bytes.

Each kind of cache has a bound of its own, of which the least recently used entries are dropped first. Names of
entries are digests that hold the workspace and the version of Penstock, so that no other workspace finds an entry and
no other release reads it. A Redis that is away is a cache without entries: it costs one short wait, and is then left
alone for a while. Knows nothing of what an entry holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.core.figures import CountOrZero, Positive
from penstock.core.machine import install_command
from penstock.gateway.metrics.table import Figures

if TYPE_CHECKING:  # the package is an extra
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.25
PAUSE_S = 2.0  # after a failure
_ENTRY_BYTES = 256  # what Redis needs for an entry besides its value, roughly
_MAX_WRITES = 64  # on their way; more are not begun, because a cache may forget
_NAMES_AT_ONCE = 256


_encode = msgspec.msgpack.Encoder().encode


def bytes_of(content: Any) -> bytes:
    """Return bytes for a digest of what a client sent. Clients may send integers that MessagePack has no room for."""
    try:
        return _encode(content)
    except OverflowError:
        return msgspec.json.encode(content)


def entry_name(*content: Any) -> str:
    """Return the name of an entry. `content` is everything that it depends on, the workspace first."""
    return hashlib.blake2b(bytes_of((__version__, content)), digest_size=24).hexdigest()


class EmbeddingCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[embedding_cache]`: vectors in Redis. Those in memory are bounded by --embedding-cache-memory."""

    shared: bool = False  # for all gateways, where there is a Redis
    ttl_s: Positive = 7 * 86_400.0
    shared_max_bytes: CountOrZero = 256 << 20


@dataclass(frozen=True, slots=True)
class SharedEntry:
    value: bytes
    age_s: float


class SharedCaches:
    """All caches of one gateway that are in Redis. Belongs to one event loop; also a collector of metrics."""

    def __init__(self, client: Redis) -> None:
        from redis.exceptions import RedisError

        # RuntimeError is uvloop's, for a connection that was just closed.
        self._outages = (RedisError, OSError, TimeoutError, RuntimeError)
        self._client = client
        folder = resources.files("penstock.gateway.reuse") / "lua"
        common = (folder / "common.lua").read_text("utf-8")
        self._scripts = {
            name: client.register_script(common + (folder / f"{name}.lua").read_text("utf-8"))
            for name in ("put", "get")
        }
        self._paused_until = 0.0  # on the monotonic clock
        self._writes: set[asyncio.Task[None]] = set()
        self._counts: dict[tuple[str, str], int] = {}

    @classmethod
    def at(cls, url: str) -> SharedCaches:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise ConfigError(
                "Caches shared through Redis need the redis package.", hint=f"Run: {install_command('redis')}"
            ) from error
        try:
            return cls(Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S))
        except ValueError:  # not shown: it may quote a password
            raise ConfigError(
                "The Redis URL cannot be read.", hint="It looks like redis://HOST:6379/0."
            ) from None

    async def close(self) -> None:
        """Let writes that have begun finish."""
        if self._writes:
            await asyncio.wait(tuple(self._writes), timeout=TIMEOUT_S)
        await self._client.aclose()

    async def get(self, kind: str, name: str) -> SharedEntry | None:
        return (await self.get_many(kind, [name]))[0]

    async def get_many(self, kind: str, names: Sequence[str]) -> list[SharedEntry | None]:
        """Return the entries of these names; None for those that are not there, or cannot be read now."""
        found: list[SharedEntry | None] = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            chunk = names[start : start + _NAMES_AT_ONCE]
            answer = await self._run("get", kind, chunk)
            if answer is None:
                found += [None] * len(chunk)
                continue
            entries = [_entry(value, answer[0]) for value in answer[1:]]
            self._count(kind, "hit", sum(entry is not None for entry in entries))
            self._count(kind, "miss", sum(entry is None for entry in entries))
            found += entries
        return found

    def put(self, kind: str, name: str, value: bytes, ttl_s: float, max_bytes: int) -> None:
        """Write an entry in the background. It is dropped if Redis is away or too many writes are on their way."""
        if len(self._writes) >= _MAX_WRITES or self._is_paused:
            self._count(kind, "dropped", 1)
            return
        task = asyncio.create_task(self._put(kind, name, value, ttl_s, max_bytes))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _put(self, kind: str, name: str, value: bytes, ttl_s: float, max_bytes: int) -> None:
        life_ms = max(1, int(ttl_s * 1000))
        await self._run("put", kind, [name, value, life_ms, max_bytes, _ENTRY_BYTES])

    async def _run(self, script: str, kind: str, arguments: Sequence[Any]) -> Any:
        if self._is_paused:
            return None
        # In braces, so that a Redis cluster keeps all keys of a kind in one place, where a script can reach them.
        stem = f"{{penstock:cache:{kind}}}"
        keys = [f"{stem}:{part}" for part in ("sizes", "uses", "ends", "bytes")]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._scripts[script](keys=keys, args=[f"{stem}:entry:", *arguments])
        except self._outages as error:
            self._paused_until = time.monotonic() + PAUSE_S
            self._count(kind, "failed", 1)
            logger.warning("the shared cache is not used for %.0f s: %s", PAUSE_S, _cause(error))
            return None

    def _count(self, kind: str, outcome: str, number: int) -> None:
        self._counts[kind, outcome] = self._counts.get((kind, outcome), 0) + number

    def figures(self) -> Figures:
        return {"shared_cache_requests": self._counts}


def _entry(value: bytes | None, now_ms: int) -> SharedEntry | None:
    if value is None:
        return None
    stored_ms, _, content = value.partition(b":")
    return SharedEntry(content, max(0.0, (now_ms - int(stored_ms)) / 1000))


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
