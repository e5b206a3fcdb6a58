"""Blocks filled or read from outside of any plan: KV on its way between engines. Knows no peer and no bytes.

A landing is room for KV that another engine has: blocks that nobody reads until they are filled, and that can then be
found like any other cached prefix. A loan keeps blocks as they are while another engine reads them, whatever happens
to the request that they were computed for. Both end by a call, so whoever begins one must end it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.request import Request
from penstock.kvcache.cache import KVCache
from penstock.scheduler.headroom import Headroom


@dataclass(frozen=True, slots=True)
class Landing:
    """The leading full blocks of a request: those that were here, and after them those to be filled."""

    number: int
    parent: BlockHash  # of the first block to be filled
    hashes: tuple[BlockHash, ...]  # of the blocks to be filled
    found_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]  # to be filled


@dataclass(frozen=True, slots=True)
class Loan:
    number: int
    block_ids: tuple[int, ...]


class BlockExchange:
    def __init__(self, cache: KVCache, headroom: Headroom, on_room: Callable[[], None]) -> None:
        """`on_room` is called when blocks may have come free."""
        self._cache = cache
        self._headroom = headroom
        self._on_room = on_room
        self._landings: dict[int, Landing] = {}
        self._loans: dict[int, Loan] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        """Landings and loans that have not ended."""
        return len(self._landings) + len(self._loans)

    def num_missing(self, request: Request) -> int:
        """Leading full blocks of a request, without that of its last token, that are not here."""
        hashes = self._hashes(request)
        return len(hashes) - self._num_on_device(hashes)

    def reserve(self, request: Request) -> Landing | None:
        """Room for what is missing of a request; None when running requests need it more, or nothing is missing."""
        cache = self._cache
        hashes = self._hashes(request)
        num_found = self._num_on_device(hashes)
        # Taking what was found first keeps the allocation from evicting it.
        found = cache.acquire(hashes[:num_found])
        num_new = len(hashes) - num_found
        has_room = num_new and num_new <= cache.num_available - self._headroom.needed()
        new = cache.allocate(num_new) if has_room else None
        if new is not None and cache.has_copies:
            # Their former contents leave with the next plan, and nobody may write to them before.
            cache.release(new)
            new = None
        if new is None:
            cache.release(found)
            return None
        parent = hashes[num_found - 1] if num_found else root_hash(request.prefix_salt)
        landing = Landing(self._next(), parent, tuple(hashes[num_found:]), tuple(found), tuple(new))
        self._landings[landing.number] = landing
        return landing

    def land(self, number: int, num_filled: int) -> None:
        """The first `num_filled` blocks of a landing are filled, and nobody writes to any of them any more."""
        landing = self._landings.pop(number)
        parent = landing.parent
        for block_id, block_hash in zip(
            landing.block_ids[:num_filled], landing.hashes[:num_filled], strict=True
        ):
            self._cache.publish(block_id, block_hash, parent)
            parent = block_hash
        self._cache.release((*landing.found_block_ids, *landing.block_ids))
        self._on_room()

    def lend(self, block_ids: tuple[int, ...]) -> Loan:
        """Keep these blocks, which a running request holds."""
        self._cache.hold(block_ids)
        return self._begin_loan(block_ids)

    def lend_prefix(self, request: Request) -> Loan:
        """Keep what is here of a request's leading full blocks, which may be nothing."""
        hashes = self._hashes(request)
        return self._begin_loan(tuple(self._cache.acquire(hashes[: self._num_on_device(hashes)])))

    def take_back(self, number: int) -> None:
        """Nobody reads the blocks of a loan any more."""
        self._cache.release(self._loans.pop(number).block_ids)
        self._on_room()

    def tables(self) -> Iterator[tuple[int, ...]]:
        """The references that are held here, for `KVCache.check_integrity`."""
        for landing in self._landings.values():
            yield (*landing.found_block_ids, *landing.block_ids)
        for loan in self._loans.values():
            yield loan.block_ids

    def _begin_loan(self, block_ids: tuple[int, ...]) -> Loan:
        loan = Loan(self._next(), block_ids)
        self._loans[loan.number] = loan
        return loan

    def _hashes(self, request: Request) -> list[BlockHash]:
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        return chain_hashes(root_hash(request.prefix_salt), tokens[:-1], self._cache.block_size)

    def _num_on_device(self, hashes: list[BlockHash]) -> int:
        num_found = self._cache.match(hashes)
        in_host_memory = set(self._cache.in_host_memory(hashes[:num_found]))
        for position, block_hash in enumerate(hashes[:num_found]):
            if block_hash in in_host_memory:
                return position
        return num_found

    def _next(self) -> int:
        self._num_begun += 1
        return self._num_begun
