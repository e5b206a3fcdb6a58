"""Hashes of prompts, by which the prefix index knows them. The only module here that sees tokens or text.

For our own replicas these are the hashes of their KV blocks, computed by the same function. External
engines report no hashes: for them, chunks of the text are hashed, which is enough to remember what was sent where.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from penstock.core.hashing import BlockHash, chain_hashes, root_hash

_TEXT_CHUNK_BYTES = 64  # about 16 tokens of English: chunks and blocks are of one size
_DIGEST_BYTES = 16


def hash_tokens(salt: str, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes that a replica gives to the blocks of this prompt. The last token never counts: a replica always
    computes it. `salt` is the tenant, as in the replica."""
    return chain_hashes(root_hash(salt), token_ids[: max(0, len(token_ids) - 1)], block_size)


def hash_text(salt: str, text: str, chunk_bytes: int = _TEXT_CHUNK_BYTES) -> list[BlockHash]:
    """The hashes of text whose tokens are unknown; an unfilled last chunk has no hash."""
    data = text.encode()
    parent = root_hash(salt)
    hashes = []
    for start in range(0, len(data) - chunk_bytes + 1, chunk_bytes):
        chunk = data[start : start + chunk_bytes]
        parent = blake2b(parent + chunk, digest_size=_DIGEST_BYTES, person=b"text chunk").digest()
        hashes.append(parent)
    return hashes
