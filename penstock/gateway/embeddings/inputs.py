"""The inputs of a request for vectors or scores, and their tokens: texts with a prompt in front, token ids, and pairs
of a query and a document. Knows no HTTP and no engine.

`EmbeddingCache` keeps vectors of texts that were computed before: exact matches only, bounded in bytes, for each
workspace separately. The workspace's name is a part of every key, so no other workspace can read or time its entries.
Keys are digests: no text is kept.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.core.lru import LruCache
from penstock.core.messages import ModelCard
from penstock.gateway.checks import check_token_ids
from penstock.gateway.metrics.table import Figures
from penstock.gateway.models.served_model import CUT_MARGIN_TOKENS, ServedModel
from penstock.gateway.prompts import ChatMessage, ChatPrompt
from penstock.gateway.reuse.shared_cache import bytes_of
from penstock.gateway.text.tokenizer import TooManyTokens

Role: TypeAlias = Literal["query", "document"]

# The order of prompts for a document follows sentence-transformers.
_PROMPTS_OF_ROLE: dict[Role, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}

# The prompt that Qwen3-Reranker was trained with. The texts of a pair go between the two parts.
_JUDGE_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGE_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_HAS_ROLES = tuple(re.compile(rf"""["']{role}["']""") for role in ("query", "document"))


class TextWithRole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A text with its role: it gets the prompt that the model has for this role."""

    text: str
    role: Role


class Pair(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Two texts that the model reads together."""

    first: str
    second: str
    instruction: str | None = None


Input: TypeAlias = str | tuple[int, ...] | TextWithRole | Pair


class Truncation(msgspec.Struct, frozen=True):
    """Settings by which inputs that are too long are truncated instead of refused."""

    max_tokens: int | None = None  # None: as many as the model reads
    side: Literal["left", "right"] = "right"  # the side at which tokens are removed
    max_document_tokens: int | None = None  # of the second text of a pair


class Reading(msgspec.Struct, frozen=True):
    """The settings by which all inputs of a request become tokens."""

    prompt_name: str | None = None  # of texts without a role; None: the model's default
    truncation: Truncation | None = None
    adds_special_tokens: bool = True


class Tokens(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    second_at: int = 0


def num_characters(given: Input) -> int:
    if isinstance(given, Pair):
        return len(given.first) + len(given.second)
    return len(given.text if isinstance(given, TextWithRole) else given)


def longest_of(card: ModelCard) -> int:
    return card.max_model_len if card.is_encoder else card.max_model_len - 1


def check_reading(reading: Reading, card: ModelCard) -> None:
    known = card.pooler.prompts
    if reading.prompt_name is not None and reading.prompt_name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(
            f"The model has no prompt {reading.prompt_name[:80]!r}; it has: {listed}.", param="prompt_name"
        )
    cut = reading.truncation
    longest = longest_of(card)
    if cut is not None and cut.max_tokens is not None and not 1 <= cut.max_tokens <= longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be between 1 and {longest}, or -1 for the model's own length.",
            param="truncate_prompt_tokens",
        )
    if cut is not None and cut.max_document_tokens is not None and cut.max_document_tokens < 1:
        raise InvalidRequest("max_tokens_per_doc must be at least 1.", param="max_tokens_per_doc")


def _room(card: ModelCard, reading: Reading) -> int:
    longest, cut = longest_of(card), reading.truncation
    return longest if cut is None else min(longest, cut.max_tokens or longest)


def within_reach(given: Input, label: str, model: ServedModel, reading: Reading) -> Input:
    """Refuse an input that cannot fit before any work is done for it, or cut off what no token is made of."""
    cut, room = reading.truncation, _room(model.card, reading)
    if isinstance(given, TextWithRole):
        text = _within_reach(given.text, label, model, cut, room)
        assert isinstance(text, str)
        return TextWithRole(text, given.role)
    return _within_reach(given, label, model, cut, room)


async def tokens_of(given: Input, label: str, model: ServedModel, reading: Reading) -> Tokens:
    """Return the tokens of one input, which `label` names in errors. Raises InvalidRequest."""
    param = label.partition("[")[0]
    card = model.card
    if not num_characters(given) or (isinstance(given, Pair) and not (given.first and given.second)):
        raise InvalidRequest(f"{label} is empty.", param=param)
    if isinstance(given, TextWithRole | str):
        given = _with_prompt(given, card, reading.prompt_name)
    longest = longest_of(card)
    cut, room = reading.truncation, _room(card, reading)
    given = _within_reach(given, label, model, cut, room)
    if isinstance(given, str | Pair) and cut is None:
        await _check_num_tokens(given, label, model, longest)
    if isinstance(given, tuple):
        check_token_ids(given, card.vocab_size, param=label)
        tokens = Tokens(_cut(given, cut, room))
    elif isinstance(given, str) and not reading.adds_special_tokens:
        if cut is not None:
            given = await model.tokenizer.shortened(given, room + CUT_MARGIN_TOKENS, cut.side)
        ids = await model.tokenizer.encode(given, add_special_tokens=False)
        tokens = Tokens(_cut(ids, cut, room))
    elif isinstance(given, Pair) and card.pooler.asks_yes_or_no:
        tokens = Tokens(await _judged(given, model, cut, room))
    else:
        first, second = (given.first, given.second) if isinstance(given, Pair) else (given, None)
        kept = Truncation() if cut is None else cut
        ids, second_at = await model.tokenizer.encode_with_template(
            first,
            second,
            max_tokens=None if cut is None else room,
            max_second=kept.max_document_tokens,
            side=kept.side,
        )
        tokens = Tokens(ids, second_at)
    if len(tokens.ids) > longest:
        raise _too_long(label, str(len(tokens.ids)), longest)
    if not tokens.ids:
        raise InvalidRequest(f"{label} has no tokens.", param=param)
    model.known(tokens.ids, label)
    return tokens


def _with_prompt(given: TextWithRole | str, card: ModelCard, prompt_name: str | None) -> str:
    prompts = card.pooler.prompts
    if isinstance(given, TextWithRole):
        text = given.text
        named = next((name for name in _PROMPTS_OF_ROLE[given.role] if name in prompts), None)
    else:
        text, named = given, prompt_name or card.pooler.default_prompt
    text = prompts.get(named or "", "") + text
    return text.lower() if card.pooler.lower_cases else text


def _within_reach(
    given: str | tuple[int, ...] | Pair, label: str, model: ServedModel, cut: Truncation | None, room: int
) -> str | tuple[int, ...] | Pair:
    """Refuse an input before it is tokenized, if it cannot fit; or truncate it. An instruction is never cut."""
    per_token = 1 if isinstance(given, tuple) else model.tokenizer.max_characters_per_token
    num_fixed = len(given.instruction or "") if isinstance(given, Pair) else 0
    at_least = (num_fixed + (num_characters(given) if cut is None else 0)) // per_token
    if at_least > room:
        raise _too_long(label, f"at least {at_least}", room)
    if cut is None:
        return given
    if isinstance(given, Pair):
        first, second = (_cut(text, cut, room * per_token) for text in (given.first, given.second))
        return Pair(first, second, given.instruction)
    if isinstance(given, str):
        return _cut(given, cut, room * per_token)
    return _cut(given, cut, room)


async def _check_num_tokens(given: str | Pair, label: str, model: ServedModel, longest: int) -> None:
    """Refuse a long text that is sure not to fit before all of it is tokenized."""
    texts = (given,) if isinstance(given, str) else (given.first, given.second, given.instruction or "")
    for text in texts:
        try:
            await model.tokenizer.check_length(text, longest)
        except TooManyTokens as error:
            raise _too_long(label, f"at least {error.at_least}", longest) from error


Cuttable = TypeVar("Cuttable", str, tuple[int, ...])


def _cut(given: Cuttable, cut: Truncation | None, room: int) -> Cuttable:
    if cut is None or len(given) <= room:
        return given
    return given[:room] if cut.side == "right" else given[len(given) - room :]


async def _judged(pair: Pair, model: ServedModel, cut: Truncation | None, room: int) -> tuple[int, ...]:
    """Return the tokens of a question whose answer, yes or no, is the score of a pair."""
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    if cut is not None and cut.max_document_tokens is not None:
        ids = await encode(pair.second, add_special_tokens=False, plain_ranges=((0, len(pair.second)),))
        pair = Pair(pair.first, decode(_cut(ids, cut, cut.max_document_tokens)), pair.instruction)
    if all(role.search(model.card.chat_template or "") for role in _HAS_ROLES):  # the template knows pairs
        return await _rendered(pair, model, cut, room)
    start = await encode(_JUDGE_START, add_special_tokens=False)
    end = await encode(_JUDGE_END, add_special_tokens=False)
    instruction = pair.instruction or _INSTRUCTION
    text = f"<Instruct>: {instruction}\n<Query>: {pair.first}\n<Document>: {pair.second}"
    middle = await encode(text, add_special_tokens=False, plain_ranges=((0, len(text)),))
    left = max(1, room - len(start) - len(end))
    return (*start, *(middle if cut is None else middle[:left]), *end)


async def _rendered(pair: Pair, model: ServedModel, cut: Truncation | None, room: int) -> tuple[int, ...]:
    system = () if pair.instruction is None else (ChatMessage("system", pair.instruction),)
    second = pair.second
    while True:
        messages = (*system, ChatMessage("query", pair.first), ChatMessage("document", second))
        prepared = await model.prepare(ChatPrompt(messages=messages))
        over = len(prepared.token_ids) - room
        if cut is None or over <= 0 or not second:
            return prepared.token_ids
        ids = await model.tokenizer.encode(second, add_special_tokens=False, plain_ranges=((0, len(second)),))
        second = model.tokenizer.decode(ids[: max(0, len(ids) - over)])


def _too_long(label: str, num_tokens: str, longest: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {longest} tokens. However, {label} has {num_tokens} tokens.",
        param=label.partition("[")[0],
        hint="Split it, or let truncate_prompt_tokens cut it.",
    )


SHARED_KIND = "embeddings"  # of the entries in Redis
_ENTRY_BYTES = 200  # Python's overhead for an entry besides its vector


class CachedVector(msgspec.Struct, frozen=True):
    vector: bytes
    num_tokens: int  # of the text, which need not be tokenized again to be counted


encode_vector = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(CachedVector)


def decode_vector(data: bytes) -> CachedVector | None:
    """None for an entry that is damaged."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None


class EmbeddingCache:
    """`begin` tells models, and versions of one model, apart."""

    def __init__(self, max_bytes: int) -> None:
        self._entries = LruCache[bytes, CachedVector](max_bytes, lambda _, it: len(it.vector) + _ENTRY_BYTES)
        self.put = self._entries.put
        self._models: dict[str, tuple[object, int]] = {}
        self._num_generations = 0
        self.num_hits = 0
        self.num_misses = 0

    def begin(self, name: str, model: object) -> int:
        """A number for the keys of a model's vectors. `model` is any object that identifies the model; another
        object, such as after a restart, means other weights."""
        known, generation = self._models.get(name, (None, 0))
        if known is not model:
            generation = self._num_generations = self._num_generations + 1
            self._models[name] = model, generation
        return generation

    def get(self, key: bytes) -> CachedVector | None:
        found = self._entries.get(key)
        self.num_hits += found is not None
        self.num_misses += found is None
        return found

    def figures(self) -> Figures:
        return {
            "embedding_cache_hits": self.num_hits,
            "embedding_cache_misses": self.num_misses,
            "embedding_cache_bytes": self._entries.used,
        }


def cache_key(workspace_id: str, generation: int, *content: Any) -> bytes:
    """Return the key of a vector. `content` is everything that the vector depends on besides the model."""
    return hashlib.blake2b(bytes_of((workspace_id, generation, content)), digest_size=24).digest()
