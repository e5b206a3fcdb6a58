"""Identifies a block by a hash of its tokens and of all tokens before them, and a LoRA adapter by a hash of its
files.

Blocks use BLAKE2b cut to 128 bits. Two different prefixes with the same hash would share KV, so the hash must
withstand an attacker who looks for a collision. Finding one takes 2^64 hashes and gains the attacker nothing: a chain
starts from the tenant's salt, so reaching another tenant's block is a second-preimage search of 2^128. Half the size
of SHA-256 means half the bytes in the index and in every event, at the same speed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import TypeAlias

BlockHash: TypeAlias = bytes

_DIGEST_BYTES = 16
_TOKEN_BYTES = struct.calcsize("i")
_NEW_BLOCK = blake2b(digest_size=_DIGEST_BYTES)  # copied, which is quicker than a new one
_words = lru_cache(maxsize=1024)(lambda count: Struct(f"{count}i"))  # packs faster than an array is built


def root_hash(salt: str) -> BlockHash:
    """Return the start of every chain of one tenant. The `person` parameter of BLAKE2b makes sure that no salt gives
    the hash of a block."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"chain root").digest()


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of one full block that follows `parent`."""
    try:
        data, person = _words(len(token_ids)).pack(*token_ids), b""
    except struct.error:  # no model has ids of 2^31 or more, but a client may send one
        data, person = repr(tuple(token_ids)).encode(), b"large ids"
    return blake2b(parent + data, digest_size=_DIGEST_BYTES, person=person).digest()


def chain_hashes(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of all full blocks of `token_ids` that follow `parent`. An unfilled last block has none."""
    hashes = []
    num_hashed = len(token_ids) - len(token_ids) % block_size
    if num_hashed != len(token_ids):
        token_ids = token_ids[:num_hashed]
    try:
        data = _words(num_hashed).pack(*token_ids)
    except struct.error:
        for start in range(0, num_hashed, block_size):
            parent = chain_hash(parent, token_ids[start : start + block_size])
            hashes.append(parent)
        return hashes
    step = block_size * _TOKEN_BYTES
    for start in range(0, len(data), step):
        block = _NEW_BLOCK.copy()
        block.update(parent + data[start : start + step])
        parent = block.digest()
        hashes.append(parent)
    return hashes


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def adapter_digest(folder: Path) -> str:
    """Return a digest of an adapter's settings and weights, whatever its folder. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
