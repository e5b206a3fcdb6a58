"""Experts that are placed whole on the ranks of a stage: tokens travel to the rank of their expert, and experts move
between ranks when others are busy.

The ranks have as many slots as there are experts, or a few more. Without balancing, slot n holds expert n. With
balancing, tables on the device say which slots hold an expert. Tables and weights are changed in place, between two
steps, because captured graphs read them at fixed addresses. Copies of an expert are equal to the bit, and every rank
computes the same slot for the same token. Answers depend on the placement only by the order in which ranks are added
up.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.messages import EngineStats
from penstock.engine.collaborator import Collaborator
from penstock.engine.parallel.mesh import Mesh, TensorGroup
from penstock.engine.parallel.placement import (
    Copy,
    Placement,
    copies_between,
    first_placement,
    imbalance,
    placed,
)
from penstock.engine.parallel.processes import ExpertsPlaced
from penstock.kernels.blocks import route
from penstock.kernels.interface import Activation, ExpertWeights, Ops, PackedExperts, Routing
from penstock.models.sharding import balanced

FEW_TOKENS = 32
# As a router's logit, this value gives all other experts a weight of exactly 0.
_CERTAIN = 1e4


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """The experts of this rank, among all experts."""

    ops: Ops
    packed: PackedExperts
    span: range
    activation: Activation

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Run each row of [n, hidden] through one expert, given by its number among all."""
        if not rows.shape[0]:
            return rows
        logits = torch.zeros(rows.shape[0], len(self.span), dtype=torch.float32, device=rows.device)
        logits.scatter_(1, (chosen - self.span.start).unsqueeze(1), _CERTAIN)
        routing = Routing(len(self.span), 1, normalizes=True)
        return self.ops.moe(rows, logits, self.packed, routing, self.activation)


def places_of(chosen: Tensor, experts: PackedExperts) -> Tensor:
    """Count the tokens of each expert where experts are balanced, and return the slots of the chosen experts."""
    if not isinstance(experts, BalancedExperts):
        return chosen
    experts.count(chosen)
    return experts.slots_of(chosen)


def held(
    ops: Ops, experts: PackedExperts, num_experts: int, activation: Activation, group: TensorGroup
) -> tuple[OwnExperts, tuple[range, ...]]:
    """Return what this rank holds of the experts of a layer, and which slots each rank holds."""
    num_slots = num_experts
    if isinstance(experts, BalancedExperts):
        num_slots, experts = experts.num_slots, experts.packed
    placement = balanced(num_slots, group.size)
    return OwnExperts(ops, experts, placement[group.rank], activation), placement


class PlacedExperts:
    """The experts of tensor-parallel ranks, which all have the same tokens."""

    def __init__(self, ops: Ops, group: TensorGroup) -> None:
        self._ops = ops
        self._group = group

    def run(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """Compute `Ops.moe` of `x` and `logits`, which are the same on all ranks, with this rank's `experts`."""
        weights, chosen = route(logits, routing)
        chosen = places_of(chosen, experts)
        own, placement = held(self._ops, experts, routing.num_experts, activation, self._group)
        into = None
        if routing.weighs_input:  # of each pair, instead of its output
            into, weights = weights.flatten().unsqueeze(1), torch.ones_like(weights)
        if x.shape[0] <= FEW_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._add_up(x, into, weights, chosen, own)
        return self._exchange(x, into, weights, chosen, own, placement)

    def _add_up(
        self, x: Tensor, into: Tensor | None, weights: Tensor, chosen: Tensor, own: OwnExperts
    ) -> Tensor:
        top_k = chosen.shape[1]
        is_own = (chosen >= own.span.start) & (chosen < own.span.stop)
        if x.is_cuda:
            # No size may depend on values: pairs of other ranks are computed too, by an expert of this rank, and not
            # used.
            chosen = torch.where(is_own, chosen, own.span.start)
            pairs = torch.arange(chosen.numel(), device=x.device)
        else:
            pairs = is_own.flatten().nonzero().squeeze(1)
        of_pairs = x.new_zeros(chosen.numel(), x.shape[1])
        rows = x[pairs // top_k]
        if into is not None:
            rows = (rows * into[pairs]).to(x.dtype)
        of_pairs[pairs] = own.run(rows, chosen.flatten()[pairs])
        of_pairs = of_pairs.view(-1, top_k, x.shape[1]).masked_fill_(~is_own.unsqueeze(2), 0)
        return self._group.add_up(_weighted(of_pairs, weights))

    def _exchange(
        self,
        x: Tensor,
        into: Tensor | None,
        weights: Tensor,
        chosen: Tensor,
        own: OwnExperts,
        placement: tuple[range, ...],
    ) -> Tensor:
        group = self._group
        shares = balanced(x.shape[0], group.size)
        share = slice(shares[group.rank].start, shares[group.rank].stop)
        if into is not None:
            into = into.view(chosen.shape)[share].reshape(-1, 1)
        total = through_experts(x[share], into, weights[share], chosen[share], own, placement, group)
        return group.join_rows(total, [len(span) for span in shares])


def through_experts(
    x: Tensor,
    into: Tensor | None,
    weights: Tensor,
    chosen: Tensor,
    own: OwnExperts,
    placement: tuple[range, ...],
    group: TensorGroup,
) -> Tensor:
    """Send the tokens of this rank to the ranks of their experts, and add up what comes back. All ranks call this
    together, each with tokens of its own, or without any. `placement` has the experts of each rank, and `into` the
    weights of inputs, where inputs are weighed instead of outputs."""
    top_k, num_own = chosen.shape[1], len(own.span)
    wanted = chosen.flatten()
    order = torch.argsort(wanted, stable=True)  # the experts of a rank are neighbours
    counts = torch.bincount(wanted, minlength=placement[-1].stop)
    widths = [len(span) for span in placement]
    arriving = group.exchange(counts, widths, [num_own] * group.size).view(group.size, num_own)
    leaving = torch.stack([part.sum() for part in counts.split(widths)])
    sent, received = torch.stack([leaving, arriving.sum(dim=1)]).tolist()
    rows = x[order // top_k]
    if into is not None:
        rows = (rows * into[order]).to(x.dtype)
    arrived = group.exchange(rows, sent, received)
    experts = torch.arange(own.span.start, own.span.stop, device=x.device).repeat(group.size)
    made = own.run(arrived, experts.repeat_interleave(arriving.flatten(), output_size=sum(received)))
    returned = group.exchange(made, received, sent)
    of_pairs = torch.empty_like(returned)
    of_pairs[order] = returned
    return _weighted(of_pairs.view(-1, top_k, x.shape[1]), weights)


def _weighted(of_pairs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of [T, K, hidden] with [T, K] as [T, hidden]."""
    return (of_pairs.float() * weights.unsqueeze(2)).sum(dim=1).to(of_pairs.dtype)


class BalancedExperts:
    """The slots of this rank in one layer, and where all experts are. Made by `ExpertBalance.add`."""

    def __init__(self, packed: PackedExperts, num_own: int, balance: ExpertBalance) -> None:
        group = balance.group
        self.packed = packed
        self.num_slots = num_own * group.size
        self.num_experts = self.num_slots - balance.num_redundant
        self.placement: Placement = ()
        device = balance.num_rows.device
        self.loads = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        # Ranks with the same tokens would all count the same.
        self._counts = balance.adds_up or group.rank == 0
        self._num_rows = balance.num_rows
        self._num_copies = torch.ones(self.num_experts, dtype=torch.int64, device=device)
        self._slots = torch.zeros(self.num_experts, group.size, dtype=torch.int64, device=device)
        self.place(first_placement(self.num_experts, self.num_slots))

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    def memory(self, index: int) -> Sequence[tuple[str, Tensor]]:
        return self.packed.memory(index)

    def count(self, chosen: Tensor) -> None:
        """Add the tokens of a step to the loads of their experts. Rows behind the step's own are padding."""
        if self._counts:
            is_real = torch.arange(chosen.shape[0], device=chosen.device) < self._num_rows
            ones = is_real.to(torch.int64).unsqueeze(1).expand_as(chosen)
            self.loads.scatter_add_(0, chosen.flatten(), ones.flatten())

    def slots_of(self, chosen: Tensor) -> Tensor:
        """Return a slot for each token's experts, int64 [T, K]. Copies of an expert take turns."""
        rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
        turn = (rows + chosen) % self._num_copies[chosen]
        return self._slots[chosen, turn]

    def place(self, placement: Placement) -> None:
        """Say which expert each slot of all ranks holds from now on."""
        self.placement = placement
        holders: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(placement):
            holders[expert].append(slot)
        width = self._slots.shape[1]
        self._num_copies.copy_(torch.tensor([len(slots) for slots in holders]))
        self._slots.copy_(torch.tensor([slots + [0] * (width - len(slots)) for slots in holders]))


class ExpertBalance:
    """All layers whose experts can move, on one rank."""

    def __init__(
        self, group: TensorGroup, num_redundant: int, device: torch.device, *, adds_up: bool = False
    ) -> None:
        """`adds_up`: each rank has tokens of its own, and the counts of all ranks are added up."""
        self.adds_up = adds_up
        self.group = group
        self.num_redundant = num_redundant
        self.layers: list[BalancedExperts] = []  # in the order in which they are loaded
        # Rows of this step. A captured graph has more.
        self.num_rows = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, packed: PackedExperts, num_own: int) -> BalancedExperts:
        """Add a layer, with `num_own` experts on this rank."""
        self.layers.append(BalancedExperts(packed, num_own, self))
        return self.layers[-1]

    def check(self, mesh: Mesh) -> None:
        """Raise ConfigError on all ranks where the experts of a layer are not interchangeable."""
        digest, is_uniform = hashlib.sha256(), True
        for layer in self.layers:
            kinds = [
                [kind for kind, _ in layer.memory(index)]
                for index in range(layer.num_slots // self.group.size)
            ]
            is_uniform = is_uniform and all(each == kinds[0] for each in kinds)
            digest.update(repr(kinds[0]).encode())
        number = int.from_bytes(digest.digest()[:7], "little")
        if not mesh.smallest(is_uniform) or mesh.smallest(number) != -mesh.smallest(-number):
            raise ConfigError(
                "The experts of a layer are stored in several forms, so they cannot change places.",
                hint="Leave --enable-eplb out.",
            )

    def begin_step(self, num_rows: int) -> None:
        self.num_rows.fill_(num_rows)

    def take_loads(self) -> list[list[int]]:
        """Return the tokens of each layer's experts since the last call. Waits for the device. With `adds_up`, all
        ranks call this together."""
        counted = torch.stack([layer.loads for layer in self.layers])
        if self.adds_up:
            counted = self.group.add_up(counted)
        loads: list[list[int]] = counted.tolist()
        for layer in self.layers:
            layer.loads.zero_()
        return loads

    def move(self, index: int, placement: Placement) -> None:
        """Bring a layer's experts to their new slots. All ranks call this between the same two steps."""
        layer, group = self.layers[index], self.group
        copies = copies_between(layer.placement, placement, group.size)
        size = layer.num_slots // group.size
        of_ranks = [[copy for copy in copies if copy.to_slot // size == rank] for rank in range(group.size)]
        # A slot is overwritten when all ranks have what it held. Until then, what has come waits in host memory: on a
        # device, all memory is taken.
        arrived = [
            self._exchange(layer, [copies[turn] if turn < len(copies) else None for copies in of_ranks])
            for turn in range(max(map(len, of_ranks)))
        ]
        for copy, expert in zip(of_ranks[group.rank], arrived, strict=False):
            at = 0
            for _, held in layer.memory(copy.to_slot % size):
                held.copy_(expert[at : at + held.shape[0]])
                at += held.shape[0]
        layer.place(placement)

    def _exchange(self, layer: BalancedExperts, wanted: Sequence[Copy | None]) -> Tensor:
        """Send each rank the expert that it wants. Returns the bytes of the expert that came, on the host."""
        group, size = self.group, layer.num_slots // self.group.size

        def is_from(rank: int, copy: Copy | None) -> bool:
            return copy is not None and copy.from_slot // size == rank

        rows = [
            torch.cat([held for _, held in layer.memory(copy.from_slot % size)])
            for copy in wanted
            if copy is not None and is_from(group.rank, copy)
        ]
        sent = [int(is_from(group.rank, copy)) for copy in wanted]
        own = wanted[group.rank]
        received = [int(is_from(rank, own)) for rank in range(group.size)]
        num_bytes = sum(held.shape[0] for _, held in layer.memory(0))
        device = self.num_rows.device
        sending = torch.stack(rows) if rows else torch.empty(0, num_bytes, dtype=torch.uint8, device=device)
        return group.exchange(sending, sent, received).cpu().flatten()


def pack_balanced(ops: Ops, experts: Iterable[ExpertWeights], balance: ExpertBalance) -> BalancedExperts:
    """Pack this rank's experts of a layer, so that they can move."""
    num_own = 0

    def counted() -> Iterator[ExpertWeights]:
        nonlocal num_own
        for expert in experts:
            num_own += 1
            yield expert

    packed = ops.pack_experts(counted())
    return balance.add(packed, num_own)


logger = logging.getLogger(__name__)

SMALLEST_GAIN = 0.02  # of the busiest rank's load, relative to the mean: less is not worth a move


class ExpertBalancer(Collaborator):
    """Decides, on the first rank, when which layer's experts move. Starts no exchange: it returns messages for all
    ranks.

    The tokens of experts are counted on the device in every step and read after every `interval` steps. Then one
    layer at a time gets a better placement, one in each step, so that a step is late by the move of one layer at
    most.
    """

    def __init__(self, balance: ExpertBalance, interval: int) -> None:
        """Move experts after every `interval` steps."""
        self._balance = balance
        self._interval = interval
        self._num_steps = 0
        self._loads: list[list[int]] = []  # of each layer, as last read
        self._waiting: deque[int] = deque()  # layers that may get a better placement
        self._imbalance = self._imbalance_placed = 0.0
        self._num_moved = 0

    @property
    def counts_next(self) -> bool:
        """Return whether the next call of `next_move` reads the counts, for which all ranks may be needed."""
        return self._num_steps == self._interval

    def next_move(self) -> ExpertsPlaced | None:
        """Return the move that comes before the next step. Called once before every step."""
        if self.counts_next:
            self._num_steps = 0
            self._measure()
        self._num_steps += 1
        move = None
        if self._waiting:
            move = self._improved(self._waiting.popleft())
            if not self._waiting:
                self._note_placed(move)
        return move

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(
            stats,
            expert_imbalance=self._imbalance,
            expert_imbalance_placed=self._imbalance_placed,
            num_experts_moved=self._num_moved,
        )

    def _measure(self) -> None:
        self._loads = self._balance.take_loads()
        self._waiting = deque(range(len(self._loads)))
        self._imbalance = self._mean_imbalance([layer.placement for layer in self._balance.layers])

    def _improved(self, index: int) -> ExpertsPlaced | None:
        layer, loads = self._balance.layers[index], self._loads[index]
        num_ranks = self._balance.group.size
        found = placed(loads, layer.placement, num_ranks)
        gain = imbalance(loads, layer.placement, num_ranks) - imbalance(loads, found, num_ranks)
        if gain < SMALLEST_GAIN:
            return None
        self._num_moved += sum(old != new for old, new in zip(layer.placement, found, strict=True))
        return ExpertsPlaced(index, found)

    def _note_placed(self, last: ExpertsPlaced | None) -> None:
        """Note what the counted tokens would have done to the new placements. `last` is not carried out yet."""
        placements = [layer.placement for layer in self._balance.layers]
        if last is not None:
            placements[last.layer] = last.experts
        self._imbalance_placed = self._mean_imbalance(placements)
        logger.info(
            "the busiest rank had %.2f times the mean of tokens for its experts; with the experts placed anew, "
            "%.2f times",
            self._imbalance,
            self._imbalance_placed,
        )

    def _mean_imbalance(self, placements: Sequence[tuple[int, ...]]) -> float:
        num_ranks = self._balance.group.size
        found = [
            imbalance(loads, placement, num_ranks)
            for loads, placement in zip(self._loads, placements, strict=True)
        ]
        return sum(found) / len(found)
