"""Writes down the requests of a fleet so that the simulator can repeat them: when each came, how long it and its
answer were, and which prefixes it shared. Never text, tokens or names.

A line is one request that was answered, in the format of Mooncake's traces (`timestamp` in milliseconds,
`input_length`, `output_length`, `hash_ids`) with three more keys: `block_tokens`, the size of the blocks that
`hash_ids` stand for; `tenant`; and `tier`. Hashes are keyed with a secret that is forgotten when the process ends:
they tell which requests of one file begin alike, and nobody can guess a prompt or a tenant and check the guess.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.hashing import chain_hashes
from penstock.core.request import Request
from penstock.dispatch.actions import Attempt

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
MAX_BLOCKS = 4096  # of one prompt
MAX_RUNNING = 50_000  # requests that have not ended; beyond, the oldest are not recorded
_ID_BYTES = 6  # as a number, exact in every JSON reader


class _Running:
    __slots__ = ("at_s", "num_output_tokens")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.num_output_tokens = 0  # of attempts that failed; their tokens are part of the answer


class RequestRecorder:
    """Implements `cluster.fleet.FleetObserver`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"Cannot record requests in {path}: {error.strerror}.") from error
        self._clock = clock
        self._began_s = clock()
        self._secret = secrets.token_bytes(16)
        self._running: dict[str, _Running] = {}
        self._is_broken = False

    def close(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            os.close(self._file)

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        if len(self._running) >= MAX_RUNNING:
            del self._running[next(iter(self._running))]
        self._running[request.id] = _Running(self._clock())

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        pass

    def ended(self, attempt: Attempt) -> None:
        running = self._running.get(attempt.request.id)
        if running is None or self._is_broken:
            return
        running.num_output_tokens += len(attempt.output_token_ids)
        if attempt.finish_reason is None:
            return  # tried again elsewhere, or never answered
        del self._running[attempt.request.id]
        line = self._line(attempt.request, running)
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            logger.warning("requests are no longer recorded: %s", error.strerror)
            self.close()

    def _line(self, request: Request, running: _Running) -> dict[str, object]:
        tokens = request.key_token_ids
        root = self._keyed(request.prefix_salt)
        hashes = chain_hashes(root, tokens[: BLOCK_TOKENS * MAX_BLOCKS], BLOCK_TOKENS)
        return {
            "timestamp": round((running.at_s - self._began_s) * 1e3, 3),
            "input_length": len(tokens),
            "output_length": running.num_output_tokens,
            "hash_ids": [int.from_bytes(each[:_ID_BYTES], "little") for each in hashes],
            "block_tokens": BLOCK_TOKENS,
            "tenant": self._keyed(request.tenant)[:_ID_BYTES].hex(),
            "tier": request.tier.value,
        }

    def _keyed(self, text: str) -> bytes:
        return blake2b(text.encode(), digest_size=16, key=self._secret).digest()
