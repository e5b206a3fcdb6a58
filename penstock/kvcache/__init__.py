"""Which KV block holds what. Integer ids and hashes only: this room knows no tensor, clock or request."""

from penstock.core.hashing import BlockHash, chain_hash, chain_hashes, root_hash
from penstock.kvcache.block import Block, BlockState, IntegrityError
from penstock.kvcache.cache import KVCache
from penstock.kvcache.metrics import SlotUse
from penstock.kvcache.tails import TailHalves

__all__ = [
    "Block",
    "BlockHash",
    "BlockState",
    "IntegrityError",
    "KVCache",
    "SlotUse",
    "TailHalves",
    "chain_hash",
    "chain_hashes",
    "root_hash",
]
