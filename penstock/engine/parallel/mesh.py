"""Connects the ranks of one replica: their process groups, and the few collectives that are used on them.

A rank's number is `stage × tensor_size + tensor_rank`. The ranks of a stage cut its layers up between them; ranks
with the same place in neighbouring stages hand activations on. With data-parallel attention there is one stage, and a
rank shares nothing but experts with the others. NCCL carries CUDA tensors, gloo the rest. Knows no model.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from penstock.core.engine_config import ParallelConfig
from penstock.core.errors import ConfigError
from penstock.engine.parallel.rendezvous import RemoteTable, StoreAccess, StoreAnswer, StoreCall, StoreTable
from penstock.models.sharding import Shard

# All ranks learn of a step before any rank computes it, so no rank waits much longer than a step takes.
_TIMEOUT = timedelta(minutes=5)
_SENDS_IN_FLIGHT = 8
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # where gloo looks for the network to use
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of ioctl(2) on Linux: the IPv4 address of an interface


def shard_of(rank: int, parallel: ParallelConfig) -> Shard:
    stage, rank_of_stage = divmod(rank, parallel.ranks_per_stage)
    data_rank, tensor_rank = divmod(rank_of_stage, parallel.tensor_parallel_size)
    return Shard(
        tensor_rank=tensor_rank,
        tensor_size=parallel.tensor_parallel_size,
        stage=stage,
        num_stages=parallel.pipeline_parallel_size,
        data_rank=data_rank,
        data_size=parallel.data_parallel_size,
        places_experts=parallel.enable_expert_parallel,
        balances_experts=parallel.enable_eplb,
        redundant_experts=parallel.num_redundant_experts,
    )


class TensorGroup:
    """The ranks of one stage. Every method is called by all of them, in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, first: int) -> None:
        """`first` is the number of the group's first rank among all."""
        self.rank = rank
        self.size = size
        self._group = group
        self._first = first

    def add_up(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def share(self, x: Tensor) -> None:
        """Copy the first rank's values to all ranks, in place."""
        if self.size > 1:
            dist.broadcast(x, self._first, group=self._group)

    def join_columns(self, own: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Join all ranks' columns side by side, on the first rank alone."""
        if self.size == 1:
            return own
        widest = max(widths)
        padded = own if own.shape[1] == widest else torch.nn.functional.pad(own, (0, widest - own.shape[1]))
        if self.rank:
            dist.gather(padded.contiguous(), None, self._first, group=self._group)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded.contiguous(), parts, self._first, group=self._group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def join_rows(self, own: Tensor, heights: Sequence[int]) -> Tensor:
        """Join all ranks' rows one below the other, on all ranks."""
        tallest = max(heights)
        padded = own.new_zeros(tallest, own.shape[1])
        padded[: own.shape[0]] = own
        joined = own.new_empty(self.size * tallest, own.shape[1])
        dist.all_gather_into_tensor(joined, padded, group=self._group)
        return torch.cat(
            [joined[rank * tallest : rank * tallest + height] for rank, height in enumerate(heights)]
        )

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send this many rows to each rank, in order. Returns the received rows, in the order of the ranks. A row may
        be a single value."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self._group)
        return arrived


class StageLink:
    """Connects a rank to the same place in the stages before and after. Sending does not wait for the receiver."""

    def __init__(self, rank: int, tensor_size: int) -> None:
        self._before = rank - tensor_size
        self._after = rank + tensor_size
        # The tensors must not change before they have left.
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        while len(self._sending) >= _SENDS_IN_FLIGHT:
            work, _ = self._sending.popleft()
            work.wait()
        self._sending.append((dist.isend(x, self._after), x))

    def flush(self) -> None:
        """Wait until all sent tensors have left."""
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()

    def receive_into(self, x: Tensor) -> Tensor:
        dist.recv(x, self._before)
        return x


class _NetworkStore(Store):
    """The store of ranks on several nodes, as `torch.distributed` calls it, from any thread."""

    def __init__(self, table: StoreTable | RemoteTable) -> None:
        super().__init__()
        self._table = table

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(StoreCall("set", (key,), data))

    def get(self, key: str) -> bytes:
        return self._call(StoreCall("get", (key,), timeout_s=_TIMEOUT.total_seconds())).value

    def add(self, key: str, amount: int) -> int:
        return self._call(StoreCall("add", (key,), number=amount)).number

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        self._call(StoreCall("wait", tuple(keys), timeout_s=timeout.total_seconds()))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call(StoreCall("check", tuple(keys))).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._call(StoreCall("delete", (key,))).number)

    def has_extended_api(self) -> bool:
        return False

    def _call(self, call: StoreCall) -> StoreAnswer:
        answer = self._table.call(call)
        if answer.is_late:
            raise RuntimeError(f"A rank timed out while it waited for {', '.join(call.keys)}.")
        return answer


class Mesh:
    def __init__(
        self, rank: int, parallel: ParallelConfig, device: torch.device, store_access: Path | StoreAccess
    ) -> None:
        """Wait until all ranks have come. A `store_access` on one machine is a file in a folder that only this user
        can enter."""
        num_ranks, size = parallel.num_ranks, parallel.tensor_parallel_size
        self.shard = shard_of(rank, parallel)
        self.device = device
        store: Store
        if isinstance(store_access, StoreAccess):
            store = _NetworkStore(store_access.table)
            name = interface_with(store_access.node_host)
            os.environ.setdefault(_GLOO_INTERFACE, name)
            os.environ.setdefault(_NCCL_INTERFACE, f"={name}")  # exactly this one
        else:
            store = FileStore(str(store_access), num_ranks)
            if device.type == "cpu":
                os.environ.setdefault(_GLOO_INTERFACE, _loopback())
        self._store = store
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=_TIMEOUT,
        )
        if parallel.data_parallel_size == 1:
            self.tensor = self._tensor_group(parallel.pipeline_parallel_size, size)
            self.experts = self.tensor  # the ranks that share the experts of a layer
        else:
            self.tensor = TensorGroup(None, 0, 1, rank)
            self.experts = TensorGroup(None, rank, num_ranks, 0)
        self.stages = StageLink(rank, size)

    def smallest(self, number: int) -> int:
        """Return the smallest of the ranks' values."""
        return int(self._reduced([number], dist.ReduceOp.MIN)[0])

    def totals(self, *numbers: int) -> list[int]:
        """Return each value summed over all ranks."""
        return self._reduced(list(numbers), dist.ReduceOp.SUM)

    def exchange_of_stages(self, name: str, text: str) -> list[bytes]:
        """Tell the other stages something, and return what each of them told under the same name."""
        shard = self.shard
        if shard.tensor_rank == 0:
            self._store.set(f"{name}/{shard.stage}", text)
        others = [stage for stage in range(shard.num_stages) if stage != shard.stage]
        return [bytes(self._store.get(f"{name}/{stage}")) for stage in others]

    def close(self) -> None:
        with suppress(RuntimeError):  # the receiver may have gone
            self.stages.flush()
        dist.destroy_process_group()

    def _reduced(self, numbers: list[int], how: Any) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, how)
        return [int(number) for number in tensor.tolist()]

    def _tensor_group(self, num_stages: int, size: int) -> TensorGroup:
        shard, own = self.shard, None
        for stage in range(num_stages):  # every rank makes every group, in the same order
            group = dist.new_group(list(range(stage * size, (stage + 1) * size)))
            if stage == shard.stage:
                own = group
        return TensorGroup(own, shard.tensor_rank, size, shard.stage * size)


def _loopback() -> str:
    """Restrict gloo to the loopback interface: ranks share a machine, and no other process needs to reach them."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def interface_with(address: str) -> str:
    """Return the network interface that has the IPv4 address, so that ranks listen on no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ConfigError(
        f"No network interface of this node has the address {address}, which Ray names.",
        hint="Start Ray with --node-ip-address of an interface of the node.",
    )
