"""The KV cache: which block holds which tokens. Knows integer ids and hashes; no tensor, clock or request."""

from penstock.core.hashing import BlockHash, chain_hash, chain_hashes, root_hash
from penstock.kvcache.block import Block, BlockState, IntegrityError
from penstock.kvcache.cache import KVCache
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import BlockTable

__all__ = [
    "Block",
    "BlockHash",
    "BlockState",
    "BlockTable",
    "IntegrityError",
    "KVCache",
    "Retention",
    "chain_hash",
    "chain_hashes",
    "root_hash",
]
