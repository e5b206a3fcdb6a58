"""Says whether token ids mean the same to two engines. A gateway tokenizes a request before an engine is chosen."""

from __future__ import annotations

from typing import Any

import msgspec


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[Any, ...]]  # ids by token, or in order: a token and its score


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


_decode = msgspec.json.Decoder(_Tokenizer).decode


def are_alike(tokenizer_json: bytes, other_json: bytes) -> bool:
    """Compare vocabularies, not bytes: versions of Penstock may write the same tokenizer differently. Of a file that
    cannot be read, only an exact copy is alike."""
    if tokenizer_json == other_json:
        return True
    try:
        return _ids(tokenizer_json) == _ids(other_json)
    except (msgspec.MsgspecError, IndexError):
        return False


def _ids(tokenizer_json: bytes) -> dict[str, int]:
    tokenizer = _decode(tokenizer_json)
    vocabulary = tokenizer.model.vocab
    if not isinstance(vocabulary, dict):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return vocabulary | {added.content: added.id for added in tokenizer.added_tokens}
