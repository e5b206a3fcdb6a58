"""Decides which part of a model a rank holds. Pure arithmetic: knows no tensor, no process and no file.

A replica of `tensor_size × num_stages` ranks cuts each layer over the ranks of a stage, and its layers over the
stages. Shares need not be equal: nine heads go to two ranks as six and three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.models.config import ArchitectureConfig

# Quantized weights share a scale between this many inputs of a row. A cut between two such groups needs no new
# scales.
_GROUPS = (256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A rank's query heads, and the key-value heads that they read."""

    queries: range
    keys: range


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one rank has. The default is the whole model."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1
    # Ranks that each have all heads, for requests of their own, and share the experts alone.
    data_rank: int = 0
    data_size: int = 1
    places_experts: bool = False  # whole experts go to ranks, instead of a slice of every expert
    balances_experts: bool = False  # the experts of a rank may become others
    redundant_experts: int = 0  # how many more experts than there are the ranks hold together

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def expert_rank(self) -> int:
        """Return this rank's number among those that share the experts of its layers."""
        return self.data_rank * self.tensor_size + self.tensor_rank

    @property
    def expert_size(self) -> int:
        return self.data_size * self.tensor_size

    def layers(self, num_layers: int) -> range:
        return balanced(num_layers, self.num_stages)[self.stage]

    def vocabulary(self, vocab_size: int) -> range:
        return balanced(vocab_size, self.tensor_size)[self.tensor_rank]

    def experts(self, count: int) -> Sequence[int]:
        """Return the experts that this rank holds at first, whole or sliced."""
        if not self.places_experts:
            return range(count)
        slots = balanced(count + self.redundant_experts, self.expert_size)[self.expert_rank]
        return first_slots(count, slots)

    def expert_inner(self, intermediate_size: int) -> range:
        return range(intermediate_size) if self.places_experts else self.inner(intermediate_size)

    def own(self, count: int, what: str) -> range:
        """Return this rank's part of `count` heads, of which each rank needs one. `what` names them in the error."""
        if count < self.tensor_size:
            raise ModelLoadError(
                f"The {count} {what} cannot be sharded over {self.tensor_size} ranks.",
                hint="Lower --tensor-parallel-size.",
            )
        return balanced(count, self.tensor_size)[self.tensor_rank]

    def inner(self, intermediate_size: int) -> range:
        """Return this rank's range of an MLP's intermediate dimension, cut between groups of quantized weights."""
        size = self.tensor_size
        even = (group for group in _GROUPS if intermediate_size % (group * size) == 0)
        uneven = (
            group
            for group in _GROUPS
            if intermediate_size % group == 0 and intermediate_size // group >= size
        )
        group = next(even, None) or next(uneven, 1)
        return scaled(balanced(intermediate_size // group, size)[self.tensor_rank], group)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadPart:
        """Return this rank's heads. Key-value heads go with the query heads that read them. With fewer key-value
        heads than ranks, some ranks hold the same one, and share its query heads."""
        per_kv_head = num_heads // num_kv_heads
        if num_kv_heads >= self.tensor_size:
            keys = balanced(num_kv_heads, self.tensor_size)[self.tensor_rank]
            return HeadPart(scaled(keys, per_kv_head), keys)
        sharers = balanced(self.tensor_size, num_kv_heads)
        kv_head = next(head for head, ranks in enumerate(sharers) if self.tensor_rank in ranks)
        ranks = sharers[kv_head]
        queries = balanced(per_kv_head, len(ranks))[self.tensor_rank - ranks.start]
        first = kv_head * per_kv_head
        return HeadPart(range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1))

    def check(self, config: ArchitectureConfig) -> None:
        """Raise ConfigError when a rank of such a replica would hold nothing of some part of the model."""
        per_kv_head = config.num_heads // config.num_kv_heads
        sharers = -(-self.tensor_size // config.num_kv_heads)
        if sharers > per_kv_head:
            raise ConfigError(
                f"The model's {config.num_heads} attention heads with {config.num_kv_heads} key-value heads "
                f"cannot be sharded over {self.tensor_size} ranks.",
                hint="Lower --tensor-parallel-size.",
            )
        if self.num_stages > 1 and config.recurrent is not None:
            raise ConfigError(
                "A model whose layers keep a fixed state cannot be cut into stages.",
                hint="Use --tensor-parallel-size.",
            )
        if self.num_stages > config.num_layers:
            raise ConfigError(
                f"The model's {config.num_layers} layers do not fill {self.num_stages} stages.",
                hint="Lower --pipeline-parallel-size.",
            )
        self._check_experts(config)

    def _check_experts(self, config: ArchitectureConfig) -> None:
        if self.balances_experts and not self.places_experts:
            raise ConfigError(
                "--enable-eplb balances experts that are placed whole on ranks.",
                hint="Add --enable-expert-parallel.",
            )
        if self.redundant_experts and not self.balances_experts:
            raise ConfigError(
                "--num-redundant-experts needs --enable-eplb, which decides which experts have copies.",
                hint="Add --enable-eplb.",
            )
        if not self.places_experts:
            return
        if config.experts is None:
            raise ConfigError(
                f"--enable-expert-parallel needs a mixture of experts; {config.architecture} has none.",
                hint="Leave the flag out.",
            )
        if config.experts.count < self.expert_size:
            raise ConfigError(
                f"The model's {config.experts.count} experts cannot be placed on {self.expert_size} ranks.",
                hint="Lower --data-parallel-size." if self.data_size > 1 else "Lower --tensor-parallel-size.",
            )
        if self.balances_experts:
            self._check_slots(config.experts.count)

    def _check_slots(self, count: int) -> None:
        """Raise ConfigError where ranks would have different numbers of experts, or one expert twice."""
        if self.num_stages > 1:
            raise ConfigError(
                "--enable-eplb does not balance the experts of several pipeline stages.",
                hint="Leave either --enable-eplb or --pipeline-parallel-size out.",
            )
        num_slots, size = count + self.redundant_experts, self.expert_size
        if num_slots % size:
            more = self.redundant_experts + size - num_slots % size
            raise ConfigError(
                f"{num_slots} experts, {self.redundant_experts} of them redundant, cannot be shared out evenly over "
                f"{size} ranks.",
                hint=f"Set --num-redundant-experts to {more}.",
            )
        if num_slots > count * size:
            raise ConfigError(
                f"{self.redundant_experts} redundant experts are more than a copy of each of {count} on each of "
                f"{size} ranks.",
                hint=f"Lower --num-redundant-experts to {count * (size - 1)} at most.",
            )


WHOLE = Shard()


def balanced(total: int, parts: int) -> tuple[range, ...]:
    """Split `total` neighbours into this many ranges; the first ranges are longer by one if the split is uneven."""
    size, longer = divmod(total, parts)
    starts = [index * size + min(index, longer) for index in range(parts + 1)]
    return tuple(range(starts[index], starts[index + 1]) for index in range(parts))


def first_slots(num_experts: int, slots: range) -> tuple[int, ...]:
    """Return the experts that neighbouring slots hold before loads are measured: all in order, then again from the
    first."""
    return tuple(slot % num_experts for slot in slots)


def scaled(span: range, factor: int) -> range:
    return range(span.start * factor, span.stop * factor)
