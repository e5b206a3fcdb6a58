"""Computes memory and step times of a model on a layout of devices, from first principles."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.planner.hardware import Format, Hardware
from penstock.planner.shapes import ModelShape
from penstock.simulator.cost import StepWork

# Reading weights and multiplying overlap in part: 1 would add both times, a large number take the longer one.
_OVERLAP = 1.8
_ACTIVATION_SHARE = 0.1  # of a device's memory: activations, graphs, the allocator's gaps
# Attention over prompts reaches less of the peak than matrix products do.
_ATTENTION_EFFICIENCY = 0.8
_EXPERT_LAYER = 1.8  # least times of a layer that experts add: choosing, sorting, grouped products


@dataclass(frozen=True, slots=True)
class Layout:
    """One replica: a model in a format on devices of one kind. Each of `pipeline_parallel` stages has a part of the
    layers, sharded over `tensor_parallel` devices."""

    model: ModelShape
    hardware: Hardware
    weights: Format
    kv: Format
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def name(self) -> str:
        stages = f"{self.pipeline_parallel}×" if self.pipeline_parallel > 1 else ""
        return f"{stages}{self.tensor_parallel}×{self.hardware.name}"

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights in the whole replica. Embeddings keep 16 bits if weights have fewer."""
        table = self.model.embedding_parameters * (1 if self.model.tied else 2)
        others = self.model.num_parameters - table
        return others * self.weights.bytes_per_number + table * max(2.0, self.weights.bytes_per_number)

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the bytes of KV in the whole replica for one token that no window has left behind."""
        return self.context_bytes(1) - self.model.state_bytes

    def context_bytes(self, num_tokens: int) -> float:
        """Return the bytes of KV and states of one context. With fewer KV heads than devices, several devices keep
        the same head."""
        copies = max(1.0, self.tensor_parallel / self.model.num_kv_heads)
        return self.model.kv_bytes(num_tokens, self.kv.bytes_per_number) * copies + self.model.state_bytes

    @property
    def kv_memory_bytes(self) -> float:
        """Return the memory that is left for KV in the whole replica; not positive if the weights do not fit."""
        usable = self.hardware.memory_bytes * (1 - _ACTIVATION_SHARE) * self.num_devices
        return usable - self.weight_bytes

    def kv_tokens(self, context: int) -> int:
        """Return the tokens that fit in contexts of this length. With windows or states, a longer context has
        more."""
        return max(0, int(self.kv_memory_bytes / self.context_bytes(context) * context))

    def contexts(self, num_tokens: int) -> int:
        """Return the most contexts of this many tokens that fit at once."""
        return max(0, int(self.kv_memory_bytes / self.context_bytes(num_tokens)))

    @property
    def dollars_per_hour(self) -> float:
        return self.hardware.dollars_per_hour * self.num_devices


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The parts of a step, in seconds."""

    weights_s: float
    products_s: float
    kv_s: float
    attention_s: float
    exchange_s: float
    fixed_s: float
    least_s: float = 0.0  # the least time of the products
    launches_s: float = 0.0  # the least time of the whole step: the host cannot start kernels faster

    @property
    def linear_s(self) -> float:
        parts = self.weights_s**_OVERLAP + self.products_s**_OVERLAP + self.least_s**_OVERLAP
        return float(parts ** (1 / _OVERLAP))

    @property
    def total_s(self) -> float:
        work_s = self.linear_s + max(self.kv_s, self.attention_s) + self.exchange_s + self.fixed_s
        return max(work_s, self.launches_s)

    @property
    def binds(self) -> str:
        """Return the bottleneck of the step."""
        parts = {
            "weight bandwidth": self.weights_s,
            "compute": self.products_s,
            "KV bandwidth": self.kv_s,
            "attention": self.attention_s,
            "links": self.exchange_s,
            "launches": max(self.fixed_s + self.least_s, self.launches_s),
        }
        return max(parts, key=lambda name: parts[name])


class _Rates(NamedTuple):
    """The rates of a layout: bytes and operations per second, and those of each token and sequence. All steps share
    them."""

    bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    attention_flops: float  # for each pair of tokens
    kv_bytes: float  # of a token
    state_bytes: float  # of a sequence, read and written


class _DecodeTimes(NamedTuple):
    """The parts of a step that depend on the number of decodes, and not on their contexts."""

    linear_s: float
    exchange_s: float
    fixed_s: float
    launches_s: float


@dataclass(frozen=True)
class RooflineCost:
    """Predicts the seconds of a step, for the planner and as the cost model of a simulated replica. A replica that
    `serves` also sends its tokens to clients, which an engine alone does not."""

    layout: Layout
    serves: bool = False

    def step_s(self, work: StepWork) -> float:
        if not work.tokens == work.sequences == work.samples or self.layout.pipeline_parallel > 1:
            return self.times(work).total_s
        # Nearly all steps of a simulation are decodes of some hundred sequences at most.
        rest = self._decodes.get(work.sequences)
        if rest is None:
            times = self.times(work)
            rest = _DecodeTimes(times.linear_s, times.exchange_s, times.fixed_s, times.launches_s)
            self._decodes[work.sequences] = rest
        work_s = rest.linear_s + max(self._context_s(work)) + rest.exchange_s + rest.fixed_s
        return max(work_s, rest.launches_s)

    @cached_property
    def _decodes(self) -> dict[int, _DecodeTimes]:
        """By number of sequences."""
        return {}

    @cached_property
    def _rates(self) -> _Rates:
        layout, device, model = self.layout, self.layout.hardware, self.layout.model
        ranks = layout.tensor_parallel
        efficiency = device.compute_efficiency * ranks
        flops_per_s = device.flops_per_s * efficiency
        if layout.weights.computes_in_fp8 and device.fp8_flops_per_s is not None:
            flops_per_s = device.fp8_flops_per_s * efficiency * layout.weights.compute_share
        return _Rates(
            bytes_per_s=device.bytes_per_s * device.memory_efficiency * ranks,
            flops_per_s=flops_per_s,
            attention_flops_per_s=device.flops_per_s * efficiency * _ATTENTION_EFFICIENCY,
            attention_flops=4.0 * model.num_attention_layers * model.num_heads * model.head_size,
            kv_bytes=layout.kv_bytes_per_token,
            state_bytes=2.0 * model.state_bytes,
        )

    def times(self, work: StepWork) -> StepTimes:
        layout, device, model, rates = self.layout, self.layout.hardware, self.layout.model, self._rates
        stages = layout.pipeline_parallel
        if stages > 1:
            # Each stage works on a part of the requests. The time until every part has passed all stages is the time
            # of a step with one part and all layers on one stage.
            work = StepWork(*(-(-each // stages) for each in astuple(work)))
        # Logits are computed for the sampled rows alone.
        head = model.embedding_parameters
        flops = 2.0 * ((model.multiplied_parameters - head) * work.tokens + head * work.samples)
        kv_s, attention_s = self._context_s(work)
        layers = model.num_layers + _EXPERT_LAYER * model.num_expert_layers
        told = device.stream_s * stages * work.sequences if self.serves else 0.0
        read = model.read_parameters(work.tokens)
        return StepTimes(
            weights_s=read * layout.weights.bytes_per_number / rates.bytes_per_s,
            products_s=flops / rates.flops_per_s,
            kv_s=kv_s,
            attention_s=attention_s,
            exchange_s=self._exchange_s(work),
            fixed_s=device.step_s + device.sequence_s * work.sequences + told,
            least_s=device.layer_s * layers * layout.weights.layer_factor,
            launches_s=device.launch_s * model.num_layers if work.tokens > work.sequences else 0.0,
        )

    def _context_s(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds for reading KV and states, and for attention."""
        rates, (seen, pairs) = self._rates, self._seen(work)
        read_bytes = seen * rates.kv_bytes + rates.state_bytes * work.sequences
        attention_s = pairs * rates.attention_flops / rates.attention_flops_per_s
        return read_bytes / rates.bytes_per_s, attention_s

    def _seen(self, work: StepWork) -> tuple[float, float]:
        """Return the tokens of KV that a layer reads on average, and the pairs of tokens in attention."""
        model, seen = self.layout.model, float(work.context_tokens)
        if model.window is not None and work.sequences and model.num_attention_layers:
            mean = work.context_tokens / work.sequences
            share = model.num_window_layers / model.num_attention_layers
            seen *= 1 - share + share * min(1.0, model.window / max(1.0, mean))
        # Attention multiplies a token with all earlier tokens: of the same chunk, with half of the tokens on average.
        pairs = seen / max(1, work.sequences) * work.tokens
        if work.tokens > work.sequences:
            pairs -= work.tokens * (work.tokens / max(1, work.sequences)) / 2
        return seen, max(0.0, pairs)

    def _exchange_s(self, work: StepWork) -> float:
        layout, device, model = self.layout, self.layout.hardware, self.layout.model
        ranks, hops = layout.tensor_parallel, layout.pipeline_parallel - 1
        row_bytes = work.tokens * model.hidden_size * 2.0
        exchanged = hops * (device.exchange_s + row_bytes / device.link_bytes_per_s)
        if ranks > 1:
            moved = 2.0 * (ranks - 1) / ranks * row_bytes
            exchanged += 2 * model.num_layers * (device.exchange_s + moved / device.link_bytes_per_s)
        return exchanged

    def decode_s(self, batch: int, context: int) -> float:
        return self.step_s(StepWork.decodes(batch, batch * context))

    def prefill_s(self, num_tokens: int) -> float:
        return self.step_s(StepWork.prompt(num_tokens))
