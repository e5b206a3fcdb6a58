"""A registry in Redis, for fleets on several machines. Redis keeps the time: clocks of machines may differ."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from penstock.cluster import registry
from penstock.cluster.registry import RegistryError
from penstock.core.redis_outages import outage_of

KEY_PREFIX = "penstock:fleet"
TIMEOUT_S = 2.0

# A record is stored behind the end of its lease. A changed record is announced; a renewed one is not.
_PUBLISH = """
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[3])
local old = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:', ends) .. ARGV[2])
if not old or string.match(old, '^%d+:(.*)$') ~= ARGV[2] then
  redis.call('PUBLISH', KEYS[2], ARGV[1])
end
return 1
"""

_RECORDS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local longest = now + tonumber(ARGV[1])
local all = redis.call('HGETALL', KEYS[1])
local living = {}
for i = 1, #all, 2 do
  local separator = string.find(all[i + 1], ':', 1, true)
  local ends = separator and tonumber(string.sub(all[i + 1], 1, separator - 1)) or 0
  if ends > now then
    local record = string.sub(all[i + 1], separator + 1)
    if ends > longest then
      redis.call('HSET', KEYS[1], all[i], string.format('%.0f:', longest) .. record)
    end
    table.insert(living, all[i])
    table.insert(living, record)
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return living
"""

# The lease of the leader is a hash of its holder, its epoch, and its end in milliseconds.
_LEAD = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'ends')
local epoch = tonumber(found[2] or '0')
local ends, longest = tonumber(found[3] or '0'), now + tonumber(ARGV[4])
local is_held = ends > now
if is_held and found[1] ~= ARGV[1] then
  if ends > longest then
    redis.call('HSET', KEYS[1], 'ends', string.format('%.0f', longest))
  end
  return 0
end
if not is_held then
  epoch = math.max(epoch, tonumber(ARGV[3])) + 1
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', string.format('%.0f', epoch),
           'ends', string.format('%.0f', now + tonumber(ARGV[2])))
return epoch
"""

_RESIGN = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'ends', '0')
end
return 1
"""

_WRITE = """
if tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') ~= tonumber(ARGV[3]) then
  return 0
end
if ARGV[4] == '1' then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
redis.call('PUBLISH', KEYS[3], ARGV[1])
return 1
"""


class RedisRegistry:
    """Implements `registry.Registry`. `fleet` keeps several fleets in one Redis apart."""

    def __init__(self, url: str, fleet: str = "default") -> None:
        """Raises ValueError for a URL that cannot be read."""
        self._client: Redis = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._records_key = f"{KEY_PREFIX}:{fleet}:hosts"
        self._leader_key = f"{KEY_PREFIX}:{fleet}:leader"
        self._documents_key = f"{KEY_PREFIX}:{fleet}:documents"
        self._channel = f"{KEY_PREFIX}:{fleet}:changes"
        self._publish = self._client.register_script(_PUBLISH)
        self._records = self._client.register_script(_RECORDS)
        self._lead = self._client.register_script(_LEAD)
        self._resign = self._client.register_script(_RESIGN)
        self._write = self._client.register_script(_WRITE)
        self._changes: PubSub | None = None

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        with _registry_errors():
            arguments: list[str | bytes | int] = [name, record, int(lease_s * 1000)]
            await self._publish(keys=[self._records_key, self._channel], args=arguments)

    async def records(self) -> dict[str, bytes]:
        with _registry_errors():
            found = await self._records(keys=[self._records_key], args=[_longest_ms()])
        return {_text(name): record for name, record in zip(found[::2], found[1::2], strict=True)}

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        with _registry_errors():
            arguments: list[str | bytes | int] = [candidate, int(lease_s * 1000), above, _longest_ms()]
            return int(await self._lead(keys=[self._leader_key], args=arguments)) or None

    async def resign(self, candidate: str) -> None:
        with _registry_errors():
            await self._resign(keys=[self._leader_key], args=[candidate])

    async def write(self, name: str, document: bytes | None, epoch: int) -> bool:
        with _registry_errors():
            keys = [self._leader_key, self._documents_key, self._channel]
            arguments: list[str | bytes | int] = [name, document or b"", epoch, int(document is None)]
            return bool(await self._write(keys=keys, args=arguments))

    async def documents(self) -> dict[str, bytes]:
        with _registry_errors():
            found: dict[Any, Any] = await self._client.hgetall(self._documents_key)
        return {_text(name): document for name, document in found.items()}

    async def wait_for_change(self, timeout_s: float) -> None:
        started_s = time.monotonic()
        try:
            with _registry_errors():
                if self._changes is None:
                    changes = self._client.pubsub(ignore_subscribe_messages=True)
                    await changes.subscribe(self._channel)
                    self._changes = changes
                await self._changes.get_message(timeout=timeout_s)
        except RegistryError:
            await self._unsubscribe()
            # The caller must not come back at once while Redis is away.
            await asyncio.sleep(max(0.0, timeout_s - (time.monotonic() - started_s)))
            raise

    async def close(self) -> None:
        await self._unsubscribe()
        with contextlib.suppress(RedisError, OSError, RuntimeError):
            await self._client.aclose()

    async def _unsubscribe(self) -> None:
        changes, self._changes = self._changes, None
        if changes is not None:
            with contextlib.suppress(RedisError, OSError, RuntimeError):
                await changes.aclose()  # type: ignore[no-untyped-call]


def _longest_ms() -> int:
    return int(registry.LONGEST_LEASE_S * 1000)


@contextlib.contextmanager
def _registry_errors() -> Iterator[None]:
    """Raise errors of Redis as errors of a registry, and raise a cancellation that the Redis client has swallowed:
    its `asyncio.wait_for` drops a cancellation that comes as the sending ends, in Python 3.11."""
    task = asyncio.current_task()
    cancelled_before = 0 if task is None else task.cancelling()
    try:
        yield
    except (RedisError, OSError, RuntimeError) as error:  # uvloop's, for a connection that was just closed
        raise RegistryError(_plainly(error)) from error
    except (ValueError, TypeError) as error:  # values that the scripts never wrote
        raise RegistryError(f"its keys {KEY_PREFIX}:* hold something else than a fleet ({error})") from error
    if task is not None and task.cancelling() > cancelled_before:
        raise asyncio.CancelledError


def _text(name: bytes) -> str:
    return name.decode(errors="replace")  # another program may have written it, which signed nothing


def _plainly(error: Exception) -> str:
    if isinstance(error, InvalidResponse):
        return "what answers at that address is no Redis"
    said = str(error) or type(error).__name__
    if (outage := outage_of(said)) is not None:
        return f"Redis answers that {outage}"
    if isinstance(error, ResponseError) and ("WRONGTYPE" in said or "user_script" in said):
        why = said[said.find("WRONGTYPE") :] if "WRONGTYPE" in said else said.rpartition("user_script:")[2]
        return f"its keys {KEY_PREFIX}:* hold something else than a fleet ({why})"
    return said
