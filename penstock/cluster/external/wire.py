"""The names and addresses of external servers, and their messages: a call, stream chunks, lists of models, errors.

Servers agree on OpenAI's shape and differ in what they add to it, so every field has a default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.core.config import ExternalServerConfig
from penstock.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overflow,
    Overloaded,
    PenstockError,
)
from penstock.core.request import Tier

BYTES_PER_TOKEN = 4  # of English text, roughly: the gateway does not have the model's tokenizer
MAX_TOLD_TOKENS = 2**31 - 1  # no request has more, and no column of the ledger overflows


class ExternalCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an external server. `body` is the body of the API, without the model, whose name differs by
    server."""

    id: str
    model: str
    api: Literal["chat/completions", "completions", "embeddings"]
    body: dict[str, Any]
    text: str  # of the prompt, by which requests with the same beginning find the same server
    tenant: str = ""
    tier: Tier = Tier.DEFAULT
    region: str = ""
    spill_over_s: float | None = None  # as in core's Request
    affinity_key: str = ""
    timeout_s: float | None = None
    is_whole: bool = False  # whether the server is asked for the answer in one piece, instead of a stream
    has_cache_marks: bool = False  # whether parts of the body have a `cache_control`
    estimated_tokens: int = 0  # of the prompt; by default, estimated from its text

    def __post_init__(self) -> None:
        if not self.estimated_tokens:  # once: the text may be long
            msgspec.structs.force_setattr(self, "estimated_tokens", estimated_tokens(self.text))

    @property
    def max_tokens(self) -> int | None:
        """Return the most tokens of the answer; None where the server decides."""
        return self.body.get("max_tokens")

    def without_cache_marks(self) -> ExternalCall:
        """For servers that do not know the marks: contents of texts are one text again, which all servers take."""
        messages = [message | {"content": _unmarked(message["content"])} for message in self.body["messages"]]
        body = self.body | {"messages": messages}
        if "tools" in body:
            body["tools"] = [
                {name: value for name, value in tool.items() if name != "cache_control"}
                for tool in body["tools"]
            ]
        return msgspec.structs.replace(self, body=body, has_cache_marks=False)

    def with_shorter_answer(self, error: ContextLengthExceeded) -> ExternalCall | None:
        """Return the call with a `max_tokens` that fits, after a server refused it with `error`. A server that does
        not say how long the prompt is decides by itself. None where no shorter answer could help."""
        if self.max_tokens is None:
            return None
        overflow = error.overflow
        body = {name: value for name, value in self.body.items() if name != "max_tokens"}
        if overflow is not None:
            room = overflow.context - overflow.prompt
            if not 0 < room < self.max_tokens:
                return None
            body["max_tokens"] = room
        return msgspec.structs.replace(self, body=body)


def _unmarked(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if any(part["type"] != "text" for part in content):
        return [{name: part[name] for name in part if name != "cache_control"} for part in content]
    return "\n".join(part["text"] for part in content)


def estimated_tokens(text: str) -> int:
    return len(text.encode()) // BYTES_PER_TOKEN + 1


_MAX_SHOWN_CHARS = 500
_TOO_LONG = ("context length", "context size", "context window", "maximum context", "too many tokens")
# In the sentences of OpenAI, vLLM and SGLang. A prompt of "at least" this many tokens was not counted by its server.
_CONTEXT = re.compile(r"maximum context length (?:is|of) (\d{1,9})")
_PROMPT = re.compile(
    r"(?<!at least )\b(\d{1,9}) (?:in the messages|in your prompt|input tokens|tokens from the input|in the prompt)"
)


class WireFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class WireToolCall(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: WireFunction = WireFunction()


class WireDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None  # as llama.cpp, SGLang and DeepSeek call it
    reasoning: str | None = None  # as vLLM does
    refusal: str | None = None
    tool_calls: list[WireToolCall] | None = None

    @property
    def says_something(self) -> bool:
        return bool(
            self.content or self.reasoning_content or self.reasoning or self.refusal or self.tool_calls
        )

    def numbered(self) -> WireDelta:
        """With indexes for the calls of tools, which a whole answer leaves out."""
        calls = [
            msgspec.structs.replace(call, index=index) for index, call in enumerate(self.tool_calls or ())
        ]
        return msgspec.structs.replace(self, tool_calls=calls)


class WireAlternative(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class WireToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[WireAlternative] | None = None


class WireLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities: `content` for a chat, parallel lists for a completion."""

    content: list[WireToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class WireChoice(msgspec.Struct, frozen=True):
    delta: WireDelta | None = None  # of a chat
    text: str | None = None  # of a completion
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # vLLM: the stop string, or the token, that ended it
    logprobs: WireLogprobs | None = None

    @property
    def says_something(self) -> bool:
        if self.text or self.finish_reason:
            return True
        delta = self.delta
        return delta is not None and bool(delta.content or delta.says_something)


class WireWholeChoice(WireChoice, frozen=True):
    """A choice of a chat that is answered whole, where the text has another name."""

    delta: WireDelta | None = msgspec.field(default=None, name="message")


class WireCached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class WireReasoned(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: WireCached | None = None
    completion_tokens_details: WireReasoned | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens

    @property
    def reasoning_tokens(self) -> int | None:
        details = self.completion_tokens_details
        return None if details is None else details.reasoning_tokens

    @property
    def can_be(self) -> bool:
        """Return whether a request can have used these tokens. No caller is charged or credited for others."""
        if not 0 <= self.prompt_tokens <= MAX_TOLD_TOKENS:
            return False
        for number in (self.completion_tokens, self.cached_tokens, self.reasoning_tokens):
            if number is not None and not 0 <= number <= MAX_TOLD_TOKENS:
                return False
        return True


class WireTimings(msgspec.Struct, frozen=True):
    """The timings that llama.cpp adds to a request."""

    cache_n: int | None = None  # prompt tokens that were in its cache


class WireEmbedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float]


class StreamChunk(msgspec.Struct, frozen=True):
    """A piece of an answer, or all of it. `data` are embeddings."""

    choices: Sequence[WireChoice] = []
    usage: WireUsage | None = None
    timings: WireTimings | None = None
    error: Any = None
    data: list[WireEmbedding] = []

    def without_nonsense(self) -> StreamChunk:
        """Leave out usage that cannot be: it is estimated, as if the server told nothing."""
        usage, timings = self.usage, self.timings
        if usage is not None and not usage.can_be:
            return msgspec.structs.replace(self, usage=None, timings=None)
        if timings is not None and not 0 <= (timings.cache_n or 0) <= MAX_TOLD_TOKENS:
            return msgspec.structs.replace(self, timings=None)
        return self

    def without_cached_tokens(self) -> StreamChunk:
        """Hide cached tokens from a client, which must not learn about the prompts of other clients."""
        usage = self.usage
        if self.timings is None and (usage is None or usage.prompt_tokens_details is None):
            return self
        usage = usage and msgspec.structs.replace(usage, prompt_tokens_details=None)
        return msgspec.structs.replace(self, usage=usage, timings=None)

    @property
    def says_something(self) -> bool:
        """Return whether a chunk holds anything for the client. The first chunk of most servers only names a role."""
        for choice in self.choices:  # noqa: SIM110 (asked for every token)
            if choice.says_something:
                return True
        return False

    def as_whole(self, estimated_prompt_tokens: int) -> StreamChunk:
        """Return a whole answer as a stream's only chunk: calls of tools are numbered, and usage that the server does
        not tell is estimated."""
        choices, usage = self.choices, self.usage
        if usage is None:
            texts = [(choice.delta and choice.delta.content) or choice.text or "" for choice in choices[:1]]
            usage = WireUsage(estimated_prompt_tokens, sum(map(estimated_tokens, texts)))
        elif not [choice for choice in choices if choice.delta is not None and choice.delta.tool_calls]:
            return self
        choices = [
            choice if choice.delta is None else msgspec.structs.replace(choice, delta=choice.delta.numbered())
            for choice in choices
        ]
        return msgspec.structs.replace(self, choices=choices, usage=usage)


class WholeAnswer(StreamChunk, frozen=True):
    """An answer in one piece."""

    choices: Sequence[WireWholeChoice] = []


class WireModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None  # vLLM and SGLang
    owned_by: str = ""  # the kind of server: "vllm", "sglang", …


class ModelPage(msgspec.Struct, frozen=True):
    data: list[WireModel]


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str = ""
    code: Any = None


class _ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error. `error` is an object for most servers, and a sentence for TGI; vLLM has had `message` on
    top."""

    error: Any = None
    message: str = ""
    detail: Any = None


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


class RequestRefused(Exception):
    """A server did not serve a request. With `elsewhere`, another server might. Without `is_reached`, the request
    never got there, so it cannot be the cause."""

    def __init__(self, error: PenstockError, *, elsewhere: bool, is_reached: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.elsewhere = elsewhere
        self.is_reached = is_reached


def refusal(server: str, status: int, body: bytes, retry_after_s: float | None = None) -> RequestRefused:
    """Return the error that stands for an answer other than 200."""
    message, code = _what_it_says(body)
    quoted = f" It says: {message}" if message else ""
    if status in (401, 403):  # the error is about our key, not the client's: its text is not shown
        return RequestRefused(
            EngineUnavailable(f"The external server {server!r} does not accept this gateway's key."),
            elsewhere=True,
        )
    if status == 404:
        return RequestRefused(
            ModelNotFound(f"The external server {server!r} does not serve this model now.", param="model"),
            elsewhere=True,
        )
    if status == 429 or status == 503:
        return RequestRefused(
            Overloaded(
                f"The external server {server!r} takes no more requests.", retry_after_s=retry_after_s
            ),
            elsewhere=True,
        )
    if status in (408, 504):
        error: PenstockError = DeadlineExceeded(f"The external server {server!r} gave up on the request.")
        return RequestRefused(error, elsewhere=True)
    if 400 <= status < 500:
        is_too_long = code == "context_length_exceeded" or any(sign in message.lower() for sign in _TOO_LONG)
        said = f"The model's server refused the request.{quoted}"
        refused = (
            ContextLengthExceeded(said, overflow=_overflow(message)) if is_too_long else InvalidRequest(said)
        )
        return RequestRefused(refused, elsewhere=False)
    return RequestRefused(
        EngineUnavailable(f"The external server {server!r} failed with status {status}."), elsewhere=True
    )


def _overflow(message: str) -> Overflow | None:
    context, prompt = _CONTEXT.search(message), _PROMPT.search(message)
    return None if context is None or prompt is None else Overflow(int(context[1]), int(prompt[1]))


def _what_it_says(body: bytes) -> tuple[str, Any]:
    try:
        decoded = _decode_error(body)
        if isinstance(decoded.error, str):
            return decoded.error[:_MAX_SHOWN_CHARS], None
        if decoded.error is None:
            return (decoded.message or str(decoded.detail or ""))[:_MAX_SHOWN_CHARS], None
        detail = msgspec.convert(decoded.error, _ErrorDetail)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return "", None
    return detail.message[:_MAX_SHOWN_CHARS], detail.code


def server_name(config: ExternalServerConfig) -> str:
    """Return the given name, or else host and port. Raises ConfigError for an invalid URL."""
    address = urlsplit(config.url)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(
            f"The external server {config.url!r} has no URL that begins with http:// or https://."
        )
    return config.name or address.netloc.rpartition("@")[2]


def server_root(config: ExternalServerConfig) -> str:
    """Return the base URL, before /v1 and /metrics."""
    return config.url.rstrip("/").removesuffix("/v1")
