"""Computes memory and step times of a model on a layout of devices, from first principles."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.hardware import Format, Hardware
from penstock.planner.shapes import ModelShape
from penstock.simulator.cost import StepWork

# Reading weights and multiplying overlap in part: 1 would add both times, a large number take the longer one.
_OVERLAP = 1.8
_ACTIVATION_SHARE = 0.1  # of a device's memory: activations, graphs, the allocator's gaps
# Attention over prompts reaches less of the peak than matrix products do.
_ATTENTION_EFFICIENCY = 0.75


@dataclass(frozen=True, slots=True)
class Layout:
    """One replica: a model in a format, cut over `tensor_parallel` devices of one kind."""

    model: ModelShape
    hardware: Hardware
    weights: Format
    kv: Format
    tensor_parallel: int = 1

    @property
    def weight_bytes(self) -> float:
        """Of the whole replica. Embeddings stay in 16 bits where weights have fewer."""
        table = self.model.embedding_parameters * (1 if self.model.tied else 2)
        others = self.model.num_parameters - table
        return others * self.weights.bytes_per_number + table * max(2.0, self.weights.bytes_per_number)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of the whole replica, for a token that all layers still see."""
        copies = max(1.0, self.tensor_parallel / self.model.num_kv_heads)
        return self.model.kv_bytes(1, self.kv.bytes_per_number) * copies

    @property
    def kv_memory_bytes(self) -> float:
        """The memory that is left for KV in the whole replica; not positive if the weights do not fit."""
        usable = self.hardware.memory_bytes * (1 - _ACTIVATION_SHARE) * self.tensor_parallel
        return usable - self.weight_bytes

    @property
    def kv_tokens(self) -> int:
        return max(0, int(self.kv_memory_bytes / self.kv_bytes_per_token))

    def contexts(self, num_tokens: int) -> int:
        """The most contexts of so many tokens that fit at once."""
        copies = max(1.0, self.tensor_parallel / self.model.num_kv_heads)
        each = self.model.kv_bytes(num_tokens, self.kv.bytes_per_number) * copies
        return max(0, int(self.kv_memory_bytes / each))

    @property
    def dollars_per_hour(self) -> float:
        return self.hardware.dollars_per_hour * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The parts of a step, in seconds."""

    weights_s: float
    products_s: float
    kv_s: float
    attention_s: float
    exchange_s: float
    fixed_s: float
    least_s: float = 0.0  # of the products, however small

    @property
    def linear_s(self) -> float:
        parts = self.weights_s**_OVERLAP + self.products_s**_OVERLAP + self.least_s**_OVERLAP
        return float(parts ** (1 / _OVERLAP))

    @property
    def total_s(self) -> float:
        return self.linear_s + max(self.kv_s, self.attention_s) + self.exchange_s + self.fixed_s

    @property
    def binds(self) -> str:
        """What takes most of the step."""
        parts = {
            "weight bandwidth": self.weights_s,
            "compute": self.products_s,
            "KV bandwidth": self.kv_s,
            "attention": self.attention_s,
            "links": self.exchange_s,
            "launches": self.fixed_s + self.least_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Predicts the seconds of a step, for the planner and as the cost model of a simulated replica."""

    layout: Layout

    def step_s(self, work: StepWork) -> float:
        return self.times(work).total_s

    def times(self, work: StepWork) -> StepTimes:
        layout, device, model = self.layout, self.layout.hardware, self.layout.model
        ranks = layout.tensor_parallel
        bytes_per_s = device.bytes_per_s * device.memory_efficiency * ranks
        flops_per_s = device.flops_per_s
        if layout.weights.computes_in_fp8 and device.fp8_flops_per_s is not None:
            flops_per_s = device.fp8_flops_per_s
        flops_per_s *= device.compute_efficiency * ranks
        read = model.read_parameters(work.tokens) * layout.weights.bytes_per_number
        # Logits are computed for the sampled rows alone.
        head = model.embedding_parameters
        flops = 2.0 * ((model.multiplied_parameters - head) * work.tokens + head * work.sequences)
        seen = work.context_tokens
        if model.window is not None and work.sequences:
            mean = work.context_tokens / work.sequences
            share = model.num_window_layers / model.num_layers
            seen = round(seen * (1 - share + share * min(1.0, model.window / max(1.0, mean))))
        # Every computed token multiplies with the KV in front of it: on average with half of a chunk of its own.
        pairs = seen / max(1, work.sequences) * work.tokens
        if work.tokens > work.sequences:
            pairs -= work.tokens * (work.tokens / max(1, work.sequences)) / 2
        heads = 4.0 * model.num_layers * model.num_heads * model.head_size
        exchanged = 0.0
        if ranks > 1:
            moved = 2.0 * (ranks - 1) / ranks * work.tokens * model.hidden_size * 2.0
            exchanged = 2 * model.num_layers * (device.exchange_s + moved / device.link_bytes_per_s)
        return StepTimes(
            weights_s=read / bytes_per_s,
            products_s=flops / flops_per_s,
            kv_s=seen * layout.kv_bytes_per_token / bytes_per_s,
            attention_s=max(0.0, pairs) * heads
            / (device.flops_per_s * device.compute_efficiency * _ATTENTION_EFFICIENCY * ranks),
            exchange_s=exchanged,
            fixed_s=device.step_s + device.sequence_s * work.sequences,
            least_s=device.layer_s * (model.num_layers + model.num_expert_layers),
        )  # fmt: skip

    def decode_s(self, batch: int, context: int) -> float:
        return self.step_s(StepWork(batch, batch, batch * context))

    def prefill_s(self, num_tokens: int) -> float:
        return self.step_s(StepWork(num_tokens, 1, num_tokens))
