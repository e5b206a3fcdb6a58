"""One request's blocks on their way from another engine: what is ready there, what is read here. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.kv_transfer import BlocksOffered, BlocksReady, KVLayout
from penstock.engine.transfer.nixl_memory import NixlAgent, Read, TransferError
from penstock.engine.transfer.port import Fetch


class Fetching:
    """Blocks are counted from the first one to be fetched; the sender counts from the start of the request."""

    def __init__(self, order: Fetch, num_layers: int) -> None:
        self.order = order
        self.trouble: str | None = None  # why there will be no more
        self.num_cached_tokens = 0
        self.is_cancelled = False
        self.is_reported_read = False
        self._num_layers = num_layers
        self._their_block_ids: tuple[int, ...] | None = None
        self._layers_begun: list[int] = []  # of each block that was offered
        self._num_whole_begun = 0  # leading blocks of which every layer is begun
        self._reads: list[Read] = []

    @property
    def num_whole_begun(self) -> int:
        return self._num_whole_begun

    @property
    def has_reads(self) -> bool:
        return bool(self._reads)

    @property
    def is_read(self) -> bool:
        """All that was offered is here."""
        return (
            self._their_block_ids is not None
            and self._num_whole_begun == len(self._their_block_ids)
            and not self._reads
        )

    def offered(self, message: BlocksOffered) -> None:
        first = self.order.first_block
        self._their_block_ids = message.block_ids[first : first + len(self.order.block_ids)]
        self._layers_begun = [0] * len(self._their_block_ids)
        self.num_cached_tokens = message.num_cached_tokens

    def ready(self, message: BlocksReady, agent: NixlAgent, peer: KVLayout) -> None:
        """Begin to read what has become ready. Raises TransferError."""
        if self._their_block_ids is None:
            raise TransferError("blocks were ready that had not been offered")
        for start, stop, layers in self._newly_ready(message):
            self._reads.append(
                agent.read(peer, layers, self._their_block_ids[start:stop], self.order.block_ids[start:stop])
            )
            self._layers_begun[start:stop] = [layers.stop] * (stop - start)
        begun = self._layers_begun
        while self._num_whole_begun < len(begun) and begun[self._num_whole_begun] == self._num_layers:
            self._num_whole_begun += 1

    def collect(self) -> None:
        """Drop the reads that are done. Raises TransferError."""
        unfinished = []
        failure: TransferError | None = None
        for read in self._reads:
            try:
                if not read.is_done() or not read.stop():
                    unfinished.append(read)
            except TransferError as error:
                failure = error
                if not read.stop():
                    unfinished.append(read)
        self._reads = unfinished
        if failure is not None:
            raise failure

    def stop_reads(self) -> bool:
        """Whether nothing is being written here any more."""
        self._reads = [read for read in self._reads if not read.stop()]
        return not self._reads

    def _newly_ready(self, message: BlocksReady) -> Iterator[tuple[int, int, range]]:
        """Runs of blocks, with the layers to be read of them."""
        begun = self._layers_begun
        first = self.order.first_block
        num_whole = min(max(0, message.num_whole_blocks - first), len(begun))
        num_begun = min(max(0, message.num_begun_blocks - first), len(begun))
        start = self._num_whole_begun
        while start < num_begun:
            target = self._num_layers if start < num_whole else message.num_layers
            limit = num_whole if start < num_whole else num_begun
            stop = start + 1
            while stop < limit and begun[stop] == begun[start]:
                stop += 1
            if begun[start] < target:
                yield start, stop, range(begun[start], target)
            start = stop
