"""An answer as it was given, in the pieces in which it came, small enough to keep. Knows no cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.core.request import FinishReason
from penstock.gateway.answers.choice import Delta, merge_deltas
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import Usage

# A deadline is an accident of the moment; these two would come again.
_REPEATABLE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A whole answer. `usage` is what the original used; giving it again uses nothing."""

    id: str
    model: str
    num_choices: int
    usage: Usage
    batches: list[list[Delta]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordedAnswer)


def encode_answer(answer: AnswerStream, batches: list[list[Delta]]) -> bytes:
    return _encoder.encode(RecordedAnswer(answer.id, answer.model, answer.num_choices, answer.usage, batches))


def decode_answer(data: bytes) -> RecordedAnswer:
    return _decoder.decode(data)


def is_repeatable(batches: Iterable[Sequence[Delta]]) -> bool:
    """Whether every answer came to an end of its own."""
    return all(
        delta.finish_reason in _REPEATABLE
        for deltas in batches
        for delta in deltas
        if delta.finish_reason is not None
    )


def merged(batches: Iterable[Sequence[Delta]]) -> list[Delta]:
    """One delta per answer, as `collect` gives them."""
    by_index: dict[int, list[Delta]] = {}
    for deltas in batches:
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
    return [merge_deltas(by_index[index]) for index in sorted(by_index)]
