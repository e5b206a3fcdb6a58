"""An engine client without an engine: a test scripts what it answers, or answers by hand.

Its model writes bytes: token ids 0 to 255 are the bytes themselves, followed by `<|user|>`-like special tokens and
a few longer words.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.core.errors import PenstockError
from penstock.core.messages import EngineReady, EngineStats, ModelCard
from penstock.core.plan import PromptLogprobs, TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request

EOS_ID = 256
BOS_ID = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, in the byte-level alphabet, ordered by byte value."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + rank) for rank, byte in enumerate(hidden)})
    vocab = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|system|>"])
    tokenizer.add_tokens([AddedToken("hello"), AddedToken("naïve→")])
    return tokenizer


def model_card(**changes: object) -> ModelCard:
    tokenizer = changes.pop("tokenizer", None) or byte_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    fields: dict[str, object] = {
        "name": "bytes",
        "architecture": "fake",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_model_len": 256,
        "tokenizer_json": tokenizer.to_str().encode(),
        "chat_template": CHAT_TEMPLATE,
        "special_tokens": {"eos_token": "<|end|>", "bos_token": "<|begin|>"},
        "bos_token_id": BOS_ID,
        "add_bos_token": False,
        "eos_token_ids": (EOS_ID,),
        "weight_bytes": 0,
        "num_parameters": 0,
        "dtype": "float32",
        "quantization": None,
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


def engine_ready(card: ModelCard | None = None, max_output_tokens: int = 128) -> EngineReady:
    return EngineReady(
        model=card or model_card(),
        num_kv_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_output_tokens=max_output_tokens,
    )


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds, and fail when it does not within a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def let_begin(begun: Sequence[str], name: str, may_end: threading.Semaphore) -> None:
    """End one piece of work in threads after the other, until the work of that name has begun. While one thread is
    free at a time, work begins in the order of its turns."""
    count = len(begun)
    while name not in begun:
        may_end.release()
        count += 1
        async with asyncio.timeout(60):
            while len(begun) < count:
                await asyncio.sleep(0.001)


@dataclass
class FakeStream:
    request: Request
    timeout_s: float | None
    on_event: Callable[[TokenEvent], None]
    on_error: Callable[[PenstockError], None]


Script = Callable[[Request], Sequence[TokenEvent | PenstockError]]


def script_text(text: str, *, num_cached_tokens: int = 0) -> Script:
    """Answers every request with the bytes of `text`, one event each, then the end-of-sequence token."""

    def script(request: Request) -> list[TokenEvent]:
        ids = [*text.encode(), EOS_ID]
        reason = FinishReason.STOP
        if len(ids) > request.sampling.max_tokens:
            ids = ids[: request.sampling.max_tokens]
            reason = FinishReason.LENGTH
        events = prompt_scores(request)
        if not ids:
            events.append(TokenEvent(request.id, finish_reason=reason, num_cached_tokens=0, queue_s=0.0))
        for position, token_id in enumerate(ids):
            events.append(
                TokenEvent(
                    request.id,
                    (token_id,),
                    logprobs=_logprobs(token_id, request.sampling.logprobs),
                    finish_reason=reason if position == len(ids) - 1 else None,
                    num_cached_tokens=num_cached_tokens if position == 0 else None,
                    queue_s=0.0 if position == 0 else None,
                )
            )
        return events

    return script


def prompt_scores(request: Request, piece: int = 3) -> list[TokenEvent]:
    """Events with the scores of a prompt, a few tokens at a time. The token at position p has the log-probability
    -p / 4 and rank 2; the most likely token is the next byte value, and the token itself comes second."""
    num_top = request.sampling.prompt_logprobs
    events = []
    prompt = request.prompt_token_ids
    for start in range(1, len(prompt), piece) if num_top is not None else ():
        values, ids = array("f"), array("i")
        for position in range(start, min(start + piece, len(prompt))):
            own = -position / 4
            values.extend([own, *([0.0, own, *([-99.0] * 18)][:num_top])])
            ids.extend([2, *([(prompt[position] + 1) % 256, prompt[position], *range(18)][:num_top])])
        count = min(piece, len(prompt) - start)
        scores = PromptLogprobs(start, count, num_top or 0, values.tobytes(), ids.tobytes())
        events.append(TokenEvent(request.id, prompt_logprobs=scores))
    return events


def _logprobs(token_id: int, num_alternatives: int | None) -> tuple[TokenLogprobs, ...]:
    if num_alternatives is None:
        return ()
    top_ids = tuple((token_id + step) % 256 for step in range(num_alternatives))
    return (TokenLogprobs(-0.25, top_ids, tuple(-0.25 - rank for rank in range(num_alternatives))),)


class FakeEngine:
    """Implements EngineClient. Each scripted event comes in its own turn of the event loop; without a script a test
    calls `emit` itself."""

    def __init__(self, script: Script | None = None, ready: EngineReady | None = None) -> None:
        self.ready: EngineReady | None = ready or engine_ready()
        self.more: list[EngineReady] = []  # that are served beside it
        self.stats = EngineStats()
        self.script = script
        self.num_engines = 1
        self.streams: dict[str, FakeStream] = {}
        self.added: list[Request] = []
        self.aborted: list[str] = []

    @property
    def models(self) -> dict[str, EngineReady]:
        served = [self.ready, *self.more] if self.ready else self.more
        return {ready.model.name: ready for ready in served}

    def stats_of(self, model: str) -> EngineStats:
        return self.stats

    def num_engines_of(self, model: str) -> int:
        return self.num_engines

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        self.added.append(request)
        self.streams[request.id] = FakeStream(request, timeout_s, on_event, on_error)
        if self.script is not None:
            self._play(request.id, list(self.script(request)))

    def abort(self, request_id: str) -> None:
        if self.streams.pop(request_id, None):
            self.aborted.append(request_id)

    def emit(self, request_id: str, *token_ids: int, finish_reason: FinishReason | None = None) -> None:
        stream = self.streams[request_id]
        if finish_reason is not None:
            del self.streams[request_id]
        stream.on_event(TokenEvent(request_id, token_ids, finish_reason=finish_reason))

    def _play(self, request_id: str, news: list[TokenEvent | PenstockError]) -> None:
        if news:
            asyncio.get_running_loop().call_soon(self._play_next, request_id, news)

    def _play_next(self, request_id: str, news: list[TokenEvent | PenstockError]) -> None:
        stream = self.streams.get(request_id)
        if stream is None:
            return
        item, rest = news[0], news[1:]
        if isinstance(item, PenstockError):
            del self.streams[request_id]
            stream.on_error(item)
            return
        if item.finish_reason is not None:
            del self.streams[request_id]
        stream.on_event(item)
        self._play(request_id, rest)
