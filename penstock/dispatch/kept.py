"""The prefixes that clients have asked a fleet to keep (cache breakpoints), whichever replica keeps them.

A request whose prefix one replica keeps may go to another, which computes the prefix and keeps it as well. The client
has paid for this prefix already, so the event that reports the write is corrected: tokens that the fleet was keeping
elsewhere count as read, not as written. A replica's report of its own entries is not changed. Each dispatcher knows
the requests that it has sent itself. With their KV events, replicas tell of prefixes that they keep for requests of
other dispatchers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.messages import KeptEntry
from penstock.core.plan import TokenEvent
from penstock.core.request import Request

_MAX_ENTRIES = 100_000


@dataclass(slots=True)
class _Entry:
    num_tokens: int  # of the prefix, cut to whole blocks
    ttl_s: float
    expires_s: float
    holders: set[str] = field(default_factory=set)  # replicas that have reported to keep it


@dataclass(frozen=True, slots=True)
class _Told:
    """A replica has said that it keeps a prefix."""

    num_blocks: int
    since_s: float
    expires_s: float


class KeptPrefixes:
    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        # By model and hash, as above, and by replica.
        self._told: OrderedDict[tuple[str, bytes], dict[str, _Told]] = OrderedDict()

    def told(self, model: str, replica_id: str, entries: Sequence[KeptEntry], now: float) -> None:
        """Record prefixes that a replica of a model keeps."""
        for entry in entries:
            key = model, entry.block_hash
            by_replica = self._told.setdefault(key, {})
            self._told.move_to_end(key)
            for name in [name for name, told in by_replica.items() if now >= told.expires_s]:
                del by_replica[name]
            since_s = by_replica[replica_id].since_s if replica_id in by_replica else now
            by_replica[replica_id] = _Told(entry.num_blocks, since_s, now + entry.left_s)
        while len(self._told) > self._max_entries:
            self._told.popitem(last=False)

    def settled(
        self,
        request: Request,
        replica_id: str,
        event: TokenEvent,
        arrived_s: float,
        *,
        model: str = "",
        block_size: int = 16,
    ) -> TokenEvent:
        """Record the cache reads and writes of a replica for a request that arrived at `arrived_s`, and return the
        event for the client. `model` and `block_size` are those of the replica."""
        use = event.cache_use
        if use is None or not request.cache_breakpoints:
            return event
        digests = _digests(request)
        found = [entry for digest in digests.values() if (entry := self._find(digest, arrived_s)) is not None]
        elsewhere = [entry.num_tokens for entry in found if replica_id not in entry.holders]
        corrected = use.reading(max(elsewhere, default=0))
        if self._told and any(corrected.written_tokens):
            num_told = self._told_elsewhere(request, replica_id, arrived_s, model, block_size)
            corrected = use.reading(max(num_told, *elsewhere, 0))
        for entry in found:  # a read prolongs the entry and the shorter ones that it passes
            if entry.num_tokens <= corrected.read_tokens:
                entry.expires_s = max(entry.expires_s, arrived_s + entry.ttl_s)
        end = use.read_tokens
        for breakpoint, num_written in zip(request.cache_breakpoints, use.written_tokens, strict=True):
            end += num_written
            kept = min(end, breakpoint.num_tokens)
            if kept:
                self._note(digests[breakpoint.num_tokens], kept, breakpoint.ttl_s, arrived_s, replica_id)
        if corrected == use:
            return event
        num_cached = max(event.num_cached_tokens or 0, corrected.read_tokens)
        return replace(event, cache_use=corrected, num_cached_tokens=num_cached)

    def _told_elsewhere(
        self, request: Request, replica_id: str, arrived_s: float, model: str, block_size: int
    ) -> int:
        """Return how many leading tokens of a request other replicas told to keep. Entries that this replica kept
        before do not count: the replica had to give them up."""
        ends = {length // block_size for length in _lengths(request)} - {0}
        if not ends:
            return 0
        tokens = request.key_token_ids[: max(ends) * block_size]
        hashes = chain_hashes(root_hash(request.prefix_salt), tokens, block_size)
        most = 0
        for end in ends:
            by_replica = self._told.get((model, hashes[end - 1]), {})
            own = by_replica.get(replica_id)
            if own is not None and own.since_s < arrived_s < own.expires_s:
                continue
            for teller, told in by_replica.items():
                if teller != replica_id and arrived_s < told.expires_s:
                    most = max(most, min(told.num_blocks, end) * block_size)
        return most

    def _find(self, digest: bytes, now: float) -> _Entry | None:
        entry = self._entries.get(digest)
        if entry is not None and now >= entry.expires_s:
            del self._entries[digest]
            return None
        return entry

    def _note(self, digest: bytes, num_tokens: int, ttl_s: float, arrived_s: float, replica_id: str) -> None:
        entry = self._entries.setdefault(digest, _Entry(num_tokens, ttl_s, arrived_s + ttl_s))
        self._entries.move_to_end(digest)
        entry.num_tokens = max(entry.num_tokens, num_tokens)
        entry.ttl_s = max(entry.ttl_s, ttl_s)
        entry.expires_s = max(entry.expires_s, arrived_s + ttl_s)
        entry.holders.add(replica_id)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


def _digests(request: Request) -> dict[int, bytes]:
    """Return a digest of the prompt up to each place where a kept prefix may end, by its number of tokens."""
    running = hashlib.blake2b(f"{request.model}\0{request.prefix_salt}".encode(), digest_size=24)
    digests: dict[int, bytes] = {}
    token_ids, start = request.key_token_ids, 0
    for length in sorted(_lengths(request)):
        piece = token_ids[start:length]
        # The values that stand for images do not fit into machine words.
        running.update(repr(piece).encode() if request.images else array("q", piece).tobytes())
        digests[length] = running.copy().digest()
        start = length
    return digests


def _lengths(request: Request) -> set[int]:
    """Return the numbers of tokens in front of each place where a kept prefix may end."""
    return {
        length
        for breakpoint in request.cache_breakpoints
        for length in (breakpoint.num_tokens, *breakpoint.earlier)
    }
