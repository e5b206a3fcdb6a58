"""Keeps vectors of texts that were computed before: exact matches only, bounded in bytes, for each workspace
separately. The workspace's name is a part of every key, so no other workspace can read or time its entries. Keys are
digests: no text is kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.metrics.table import metric

SHARED_KIND = "embeddings"  # of the entries in Redis
_ENTRY_BYTES = 200  # Python's overhead for an entry besides its vector


class CachedVector(msgspec.Struct, frozen=True):
    vector: bytes
    num_tokens: int  # of the text, which need not be tokenized again to be counted


encode_vector = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(CachedVector)


def decode_vector(data: bytes) -> CachedVector | None:
    """None for an entry that is damaged."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None


class EmbeddingCache(Collector):
    """Least recently used entries are dropped first. `begin` tells models, and versions of one model, apart."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, CachedVector] = OrderedDict()  # least recently used first
        self._models: dict[str, tuple[object, int]] = {}
        self._num_generations = 0
        self.num_hits = 0
        self.num_misses = 0

    def begin(self, name: str, model: object) -> int:
        """A number for the keys of a model's vectors. `model` is any object that identifies the model; another
        object, such as after a restart, means other weights."""
        known, generation = self._models.get(name, (None, 0))
        if known is not model:
            generation = self._num_generations = self._num_generations + 1
            self._models[name] = model, generation
        return generation

    def get(self, key: bytes) -> CachedVector | None:
        found = self._entries.get(key)
        if found is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, entry: CachedVector) -> None:
        size = _size(entry)
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = entry
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _size(dropped)

    def collect(self) -> Iterator[Metric]:
        yield metric("embedding_cache_hits", self.num_hits)
        yield metric("embedding_cache_misses", self.num_misses)
        yield metric("embedding_cache_bytes", self._num_bytes)


def cache_key(workspace_id: str, generation: int, *content: Any) -> bytes:
    """Return the key of a vector. `content` is everything that the vector depends on besides the model."""
    digest = hashlib.blake2b(digest_size=24)
    digest.update(msgspec.msgpack.encode((workspace_id, generation, content)))
    return digest.digest()


def _size(entry: CachedVector) -> int:
    return len(entry.vector) + _ENTRY_BYTES
