"""Finds out at load whether a model of the transformers library can be served with paged attention.

A first pass records how the model calls attention. Then two short texts run over a small KV store, in one batch and
in chunks, and must give the hidden states and logits that the model gives each text alone with its own attention. A
model whose layers carry anything else from token to token (states, convolutions, biases by distance) gives others
and is refused, whatever its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError, ModelLoadError, PenstockError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.transformers_model import (
    PAGED,
    RUNTIME,
    AttentionCall,
    NeedsWeight,
    PackedModule,
    TransformersModel,
    attention_call,
)

RECORDING = "penstock-recording"  # our attention's name while calls are recorded
_BLOCK_SIZE = 16
_NUM_TOKENS = 21  # of the longer text: more than a block
# Steps over both texts: this many tokens of each. Single tokens show states that are lost between steps.
_STEPS = ((6, 5), (1, 7), (1, 0), (12, 1), (1, 1))


@dataclass(slots=True)
class Recording:
    """A model's calls of attention, and the products that get all tokens of a step."""

    num_positions: int
    calls: list[AttentionCall] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)  # by the memory of a mask
    masks: list[Tensor] = field(default_factory=list)  # kept, so that their memory stays their own
    whole_products: set[str] = field(default_factory=set)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *_: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        window = options.get("sliding_window")
        if isinstance(mask, Tensor):
            # The model computed a mask that lies in other memory. The hidden positions may depend on the text.
            if _memory(mask) not in self.windows:
                raise ModelLoadError(f"{type(module).__name__} attends with a mask of its own making.")
            window = self.windows[_memory(mask)]
        self.calls.append(attention_call(module, query, key, value, window, options))
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return torch.zeros(shape, dtype=value.dtype, device=value.device), None

    def mask(self, mask_function: Callable[..., Tensor], num_tokens: int, device: torch.device) -> Tensor:
        mask = torch.ones((1, 1, num_tokens, num_tokens), dtype=torch.bool, device=device).tril_()
        self.masks.append(mask)
        self.windows[_memory(mask)] = _window(mask_function, self.num_positions)
        return mask


def _memory(mask: Tensor) -> int:
    """Return a key that views of the same mask share."""
    return mask.untyped_storage().data_ptr()


def recorded_mask(
    *_: Any, q_length: int = 0, mask_function: Callable[..., Tensor], device: Any = "cpu", **__: Any
) -> Tensor | None:
    """The mask function that transformers calls while calls are recorded."""
    recording = RUNTIME.attention
    return (
        recording.mask(mask_function, q_length, torch.device(device))
        if isinstance(recording, Recording)
        else None
    )


def _window(allowed: Callable[..., Tensor], num_positions: int) -> int | None:
    """Return how many tokens a token attends to, itself among them; None for all. Raises ModelLoadError for a pattern
    that is neither causal nor a window."""
    zero = torch.tensor(0)
    windows = []
    for position in {num_positions - 1, max(0, num_positions - 2), num_positions // 2}:
        keys = torch.arange(num_positions)
        try:
            seen = allowed(zero, zero, torch.tensor(position), keys).expand(num_positions).bool()
        except IndexError as error:  # the rule looks at the tokens of the pass, and not at positions alone
            raise ModelLoadError(
                "its masks hold for the tokens of one text, not for all positions."
            ) from error
        count = int(seen.sum())
        if not torch.equal(seen, (keys <= position) & (keys > position - count)):
            raise ModelLoadError("a token does not see a run of tokens that ends with itself")
        windows.append(None if count == position + 1 else count)
    widest = {window for window in windows if window is not None}
    if len(widest) > 1:
        raise ModelLoadError(
            "its attention is cut in chunks, which work only if --max-model-len is at most one chunk."
        )
    window = next(iter(widest), None)
    if window is not None and any(each is None for each in windows) and window <= num_positions // 2:
        raise ModelLoadError("some tokens see all tokens before them, and others a window")
    return window


def check_rope(config: Any, max_model_len: int) -> None:
    """Refuse angles that depend on the longest text of a step: one request would change the others' answers."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    for each in kinds:
        if each.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = each.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", text.max_position_embeddings
        )
        if max_model_len > limit:
            raise ConfigError(
                f"With {each['rope_type']} angles, transformers' code serves at most {limit} tokens: beyond, one "
                "text would change the angles of all texts in its batch.",
                hint=f"Set --max-model-len {limit}.",
            )


def probe(model: TransformersModel, ops: Ops) -> Recording:
    """Record the model's calls, bind the model to them and check its answers. Raises ModelLoadError if it cannot be
    served, and NeedsWeight if a packed module must be unpacked first."""
    name = type(model.network).__name__
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
        for length in (_NUM_TOKENS, 14)
    ]
    try:
        with torch.inference_mode():
            recording = _record(model, ops, texts[0])
            expected = [_alone(model, ops, text) for text in texts]
            model.bind(recording.calls)
            model.decoder.set_attn_implementation(PAGED)
            _check(model, ops, texts, expected)
            if ops.device.type == "cuda":
                model.records_graphs = _never_waits(model, ops, texts)
    except (PenstockError, NeedsWeight) as error:
        if not isinstance(error, ModelLoadError):
            raise
        raise _refusal(name, error.message) from error
    except Exception as error:  # a model's code may fail in any way on paged attention, which has no mask
        said = " ".join(str(error).split()).rstrip(".")
        raise _refusal(
            name, f"its code fails in a step without an attention mask ({type(error).__name__}: {said})."
        ) from error
    return recording


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"Transformers' code for {name} cannot be served with paged attention: {reason}")


def _record(model: TransformersModel, ops: Ops, text: list[int]) -> Recording:
    """Run the model once with attention that returns zeros."""
    recording = Recording(model.max_model_len)
    model.decoder.set_attn_implementation(RECORDING)
    RUNTIME.attention = recording
    _run(model.network, ops, text)
    if not recording.calls:
        raise ModelLoadError("The model never calls the attention that it is given.")
    recording.whole_products = {
        module.name
        for module in model.decoder.modules()
        if isinstance(module, PackedModule) and module.num_rows == len(text)
    }
    return recording


@dataclass(frozen=True, slots=True)
class _Answer:
    hidden: Tensor  # [T, hidden]
    logits: Tensor  # [T, V]
    single: tuple[int, ...] = ()  # rows that were computed in steps of one token


def _alone(model: TransformersModel, ops: Ops, text: list[int]) -> _Answer:
    """Run a text with the model's own attention."""
    model.decoder.set_attn_implementation("eager")
    hidden = _run(model.decoder, ops, text).last_hidden_state[0]
    return _Answer(hidden, _run(model.network, ops, text).logits[0].float())


def _run(network: Any, ops: Ops, text: list[int]) -> Any:
    ids = torch.tensor([text], device=ops.device)
    positions = torch.arange(len(text), device=ops.device).unsqueeze(0)
    RUNTIME.ops = ops
    try:
        return network(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)
    except (PenstockError, NeedsWeight):
        raise
    except Exception as error:  # whatever a model's code runs into
        raise ModelLoadError(f"{type(error).__name__}: {error}.") from error


def _check(model: TransformersModel, ops: Ops, texts: list[list[int]], expected: list[_Answer]) -> None:
    """Raise ModelLoadError unless paged attention gives the model's own results, and chunks and batches change
    nothing. The second comparison is stricter on a CPU, which rounds the same way on both sides."""
    is_rounded = ops.kv_dtype.itemsize == 1
    tolerance = 0.2 if is_rounded else 5e-3 if ops.dtype == torch.float32 else 0.08
    alone = [_paged(model, ops, [text], [(len(text),)])[0] for text in texts]
    error = _largest_error(expected, alone)
    if not error <= tolerance:
        raise ModelLoadError(
            f"paged attention gives other results (off by {error:.2g}) than the model's own."
        )
    error = _largest_error(alone, _paged(model, ops, texts, _STEPS))
    if not error <= _rounding(model, ops):
        raise ModelLoadError(
            f"a text in chunks, in a batch, gives other results (off by {error:.2g}) than alone. "
            "Its layers carry more from token to token than keys and values, or ignore positions."
        )


def _rounding(model: TransformersModel, ops: Ops) -> float:
    """Return how far the results of chunks may be from those of a whole text. A GPU multiplies few rows and many rows
    by other kernels, which round in other ways, and many rows of narrow weights may round their inputs to eight bits.
    Tokens that are mixed up change results by their own size."""
    if ops.dtype == torch.float32:
        return 5e-3
    if ops.device.type == "cpu":
        return 0.02
    return 0.1 if model.weight_bytes > 1.5 * model.num_parameters else 0.3


def _largest_error(expected: list[_Answer], got: list[_Answer]) -> float:
    """Return the largest of the medians over rows. A few rows may differ: near a tie, a router sends a token to
    another expert."""
    largest = 0.0
    for want, have in zip(expected, got, strict=True):
        for one, other in ((want.hidden, have.hidden), (want.logits, have.logits)):
            errors = (one.float() - other.float()).norm(dim=1) / one.float().norm(dim=1).clamp_min(1e-12)
            single = errors[list(have.single)] if have.single else errors
            for part in (errors, single):
                median = part.median().item()
                largest = max(largest, median if median == median else float("inf"))
    return largest


def _paged(
    model: TransformersModel, ops: Ops, texts: list[list[int]], steps: Sequence[Sequence[int]]
) -> list[_Answer]:
    """Run the texts over a small KV store. A step computes this many tokens of each."""
    kv = ops.allocate_kv(model.num_layers, 4, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    tables = [[1, 3], [2, 0]]
    done = [0] * len(texts)
    states: list[list[Tensor]] = [[] for _ in texts]
    single: list[list[int]] = [[] for _ in texts]
    for counts in steps:
        chunks = [(index, done[index], count) for index, count in enumerate(counts) if count]
        ids = [token for index, start, count in chunks for token in texts[index][start : start + count]]
        made = model.forward(_int32(ids, ops), _batch(chunks, tables, ops), kv)
        parts = made.split([count for *_, count in chunks])
        for (index, start, count), part in zip(chunks, parts, strict=True):
            states[index].append(part)
            done[index] = start + count
            single[index] += [start] if count == 1 else []
    hidden = [torch.cat(parts) for parts in states]
    return [_Answer(rows, model.logits(rows), tuple(at)) for rows, at in zip(hidden, single, strict=True)]


def _batch(chunks: list[tuple[int, int, int]], tables: list[list[int]], ops: Ops) -> AttentionBatch:
    """`chunks` are (text, first position, number of tokens)."""
    positions = [position for _, start, count in chunks for position in range(start, start + count)]
    slots = [
        tables[index][position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        for index, start, count in chunks
        for position in range(start, start + count)
    ]
    ends = list(itertools.accumulate((count for *_, count in chunks), initial=0))
    lengths = [start + count for _, start, count in chunks]
    return AttentionBatch(
        positions=_int32(positions, ops),
        slots=_int32(slots, ops),
        query_starts=_int32(ends, ops),
        context_lens=_int32(lengths, ops),
        block_tables=_int32([tables[index] for index, *_ in chunks], ops),
        num_requests=len(chunks),
        max_query_len=max(count for *_, count in chunks),
        max_context_len=max(lengths),
        num_decodes=next((at for at, (*_, count) in enumerate(chunks) if count > 1), len(chunks)),
    )


def _int32(values: Any, ops: Ops) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=ops.device)


def _never_waits(model: TransformersModel, ops: Ops, texts: list[list[int]]) -> bool:
    """Return whether a step leaves the host free, as CUDA graphs need."""
    before = torch.cuda.get_sync_debug_mode()
    kv = ops.allocate_kv(model.num_layers, 4, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    batch, ids = _batch([(0, 0, 1), (1, 0, 1)], [[1], [2]], ops), _int32([text[0] for text in texts], ops)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        model.logits(model.forward(ids, batch, kv))
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return len({layer.num_heads for layer in model.paged.layers}) == 1  # recorded steps share one buffer
