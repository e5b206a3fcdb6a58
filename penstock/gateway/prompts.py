"""The input of the gateway: prompts, sampling options and the request around them.

Independent of any wire format: front ends translate OpenAI's and Anthropic's shapes into these.

`PromptScores` are log-probabilities of a prompt's tokens, on their way from engine events to the readers of its
answers. One engine request scores a prompt, and all answers to the prompt share the result. The numbers stay packed,
as they came, until an API writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.plan import PromptLogprobs
from penstock.core.request import Grammar, SamplingDefaults, Tier


class TextPrompt(msgspec.Struct, frozen=True):
    """`suffix` is the text after the gap to be filled in; None: the answer follows `text`."""

    text: str
    suffix: str | None = None
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class CacheMark(msgspec.Struct, frozen=True):
    """Keep the prompt up to and including the marked part, for `ttl_s` after each use."""

    ttl_s: float


class TextPart(msgspec.Struct, frozen=True):
    text: str
    cache: CacheMark | None = None


class LoadedImage(msgspec.Struct, frozen=True):
    """An image that can be decoded and is within the limits. The size is the size of the upright image."""

    data: bytes
    digest: bytes
    width: int
    height: int


class ImagePart(TextPart, frozen=True, kw_only=True):
    """An image between texts: a `data:` or `http(s):` URL, or an uploaded file. Its text is empty."""

    text: str = ""
    url: str = ""
    file_id: str = ""
    param: str = "messages"  # the place in the client's request, for errors
    # Text that a model without vision reads in place of the image. If empty, such a model refuses the request.
    stand_in: str = ""
    loaded: LoadedImage | None = None  # once the gateway has read the image


class FilePart(TextPart, frozen=True, kw_only=True):
    """An uploaded file of text. The gateway reads the file once it has admitted the request."""

    text: str = ""
    file_id: str
    title: str | None = None  # the file's name where there is none
    context: str | None = None
    param: str = "messages"  # the place in the client's request, for errors


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it
    cache: CacheMark | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn. Several text parts stay apart until the template joins them."""

    role: str
    content: str | tuple[TextPart, ...]
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of a `tool` turn: which call it answers
    reasoning: str | None = None
    cache: CacheMark | None = None  # at the end of the whole turn

    @property
    def parts(self) -> tuple[TextPart, ...]:
        """Return the content as parts. An empty text has none."""
        if isinstance(self.content, str):
            return (TextPart(self.content),) if self.content else ()
        return self.content


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may ask the client to run. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool = False
    cache: CacheMark | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """`name` is set with the mode "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinks: bool | None = None  # None leaves it to the model's template
    max_thinking_tokens: int | None = None
    add_generation_prompt: bool = True
    continues_last: bool = False  # the answer continues where the last message, the assistant's, ends
    template_options: dict[str, Any] = {}  # extra variables for the model's template
    template_name: str | None = None  # of several templates of the model; None: the one for such a chat


def num_characters(prompt: ChatPrompt) -> int:
    """Return the number of characters of the messages' own text, which every template writes."""
    return sum(
        len(message.content)
        if isinstance(message.content, str)
        else sum(len(part.text) for part in message.content)
        for message in prompt.messages
    )


def num_template_characters(prompt: ChatPrompt) -> int:
    """As `num_characters`, with all else that a template may write: calls, reasoning, names, tools and options."""
    num_others = sum(
        len(message.reasoning or "")
        + len(message.name or "")
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in prompt.messages
    )
    for tool in prompt.tools:
        num_others += len(tool.description or "") + _json_length(tool.parameters)
    return num_characters(prompt) + num_others + _json_length(prompt.template_options)


def _json_length(value: dict[str, Any]) -> int:
    try:
        return len(msgspec.json.encode(value)) if value else 0
    except RecursionError:
        return 1 << 30  # nested too deeply to be small


def image_parts(prompt: Prompt) -> list[ImagePart]:
    """Return the images of a prompt, in order."""
    return parts_of(prompt, ImagePart)


def are_texts(prompts: Sequence[Prompt]) -> bool:
    """Return whether no message of the prompts has parts, as most have none."""
    for prompt in prompts:
        if isinstance(prompt, ChatPrompt):
            for message in prompt.messages:
                if not isinstance(message.content, str):
                    return False
    return True


Part = TypeVar("Part")


def parts_of(prompt: Prompt, kind: type[Part]) -> list[Part]:
    """Return the parts of this kind in a prompt's messages, in order."""
    if not isinstance(prompt, ChatPrompt):
        return []
    return [
        part
        for message in prompt.messages
        if not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, kind)
    ]


def with_parts(prompt: Prompt, change: Callable[[TextPart], TextPart]) -> Prompt:
    """Return the prompt with other parts in its messages."""
    if not isinstance(prompt, ChatPrompt):
        return prompt
    messages = [
        message
        if isinstance(message.content, str)
        else msgspec.structs.replace(message, content=tuple(map(change, message.content)))
        for message in prompt.messages
    ]
    return msgspec.structs.replace(prompt, messages=tuple(messages))


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


_NOTHING_STATED = SamplingDefaults()


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`core.SamplingParams` as a client asks for them: unchecked. None leaves an option to the model's makers, and
    `fallback` holds the front end's own defaults for a model whose makers recommend nothing."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: no limit
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # -1: all tokens
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repeat_last_n: int | None = None  # -1: all tokens
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    fallback: SamplingDefaults = SamplingDefaults()

    def with_defaults(self, stated: SamplingDefaults) -> SamplingOptions:
        """Fill in what the client left out: what the makers state, if they state anything, else the fallback. A
        `top_p` of 0 leaves the most probable token alone, which is temperature 0."""
        given = self.fallback if stated == _NOTHING_STATED else stated
        options = self
        if given != _NOTHING_STATED:
            filled = {
                name: value
                for name, value in given.stated().items()
                if name != "max_new_tokens" and getattr(self, name) is None
            }
            options = msgspec.structs.replace(self, **filled)
        if options.top_p == 0:
            options = msgspec.structs.replace(options, temperature=0.0, top_p=1.0)
        return options


class BeamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Search for the most probable answers instead of sampling. The score of an answer is the sum of its tokens'
    log-probabilities, divided by its number of tokens to the power of `length_penalty`."""

    width: int  # beams that a step keeps
    length_penalty: float = 1.0
    # True: end when `width` answers are complete. False: end when no better answer is to be expected. "never": end
    # when no better answer is possible.
    early_stopping: bool | Literal["never"] = False


class AnswerText(msgspec.Struct, frozen=True):
    """The tokens that an answer shows."""

    shows_special_tokens: bool = False
    includes_stop: bool = False  # the stop string or stop token that ended the answer
    lists_token_ids: bool = False


class RequestWarning(msgspec.Struct, frozen=True):
    """Something that a client asked for and gets in another form. The answer tells the client so."""

    code: str
    message: str
    param: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`n` answers for each prompt. `default_max_tokens` fills in for an absent `max_tokens`, and is cut to the room
    that the context leaves without a warning."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingOptions
    n: int = 1
    beams: BeamOptions | None = None  # None: answers are sampled
    model: str | None = None
    model_is_given: bool = False  # by the operator: the caller's own list of models does not matter for it
    drops_oldest_turns: bool = False  # of a chat that is too long for the context
    default_max_tokens: int | None = None
    prediction: str = ""  # the answer that the client expects, which makes that answer faster
    tier: Tier = Tier.DEFAULT  # as asked for; the principal's best tier bounds it
    principal: Principal = OPEN_PRINCIPAL
    request_id: str = ""  # as in the x-request-id header; the gateway makes one when empty
    endpoint: str = "chat"  # its name in the usage ledger: chat, completions, messages, responses, …
    user: str | None = None  # the client's own name for its end user
    prompt_cache_key: str | None = None  # steers routing to where similar prompts went
    region: str = ""  # where it should be served; empty: as the caller's settings say
    idempotency_key: str | None = None
    cache_response_s: float | None = None  # for how long an identical request's answer is kept and reused
    timeout_s: float | None = None
    warnings: tuple[RequestWarning, ...] = ()  # of the front end, for the answer
    max_tokens_param: str = "max_tokens"  # what the client calls it
    text: AnswerText = AnswerText()
    truncates_to: int | None = None  # the last tokens of a longer prompt; -1: as many as fit
    cache_salt: str = ""  # must be equal, besides the workspace, for a cached prefix to be reused
    is_read_whole: bool = False  # the client sees nothing of an answer before its end
    # One chat whose messages are texts, and of the options for sampling only max_tokens, temperature, top_p, seed and
    # stop: most checks and translations have nothing to look at.
    is_plain: bool = False

    @property
    def num_sequences(self) -> int:
        """Return how many sequences are generated for each prompt."""
        return self.n if self.beams is None else self.beams.width


class Usage(msgspec.Struct, frozen=True):
    """The tokens that one request used. The cached and written tokens are part of `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # reused from the KV cache, by whatever means
    cache_read_tokens: int = 0  # of the cached: those that a cache breakpoint asked for
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion
    accepted_prediction_tokens: int = 0  # of the completion: copied from the client's prediction
    rejected_prediction_tokens: int = 0  # tried without success, and not part of the completion


class TokenScore(msgspec.Struct, frozen=True):
    """`rank` is 1 for the most likely token. `top` has the most likely tokens and their log-probabilities."""

    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


class ScoredPrompt(msgspec.Struct, frozen=True):
    """A prompt and the log-probabilities of its tokens, in pieces that follow each other from the second token on."""

    token_ids: tuple[int, ...]
    pieces: tuple[PromptLogprobs, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.token_ids) + sum(len(piece.values) + len(piece.ids) for piece in self.pieces)

    def scores(self, num_top: int) -> Iterator[tuple[int, TokenScore | None]]:
        """Return each token of the prompt with its score. Nothing predicts the first token; an engine that does not
        score prompts leaves all others without a score too."""
        unscored = (None for _ in self.token_ids)
        scored = chain.from_iterable(_scores(piece, num_top) for piece in self.pieces)
        return zip(self.token_ids, chain([None], scored, unscored), strict=False)


def _scores(piece: PromptLogprobs, num_top: int) -> Iterator[TokenScore]:
    width = 1 + piece.num_top
    shown = 1 + min(num_top, piece.num_top)
    values, ids = memoryview(piece.values).cast("f"), memoryview(piece.ids).cast("i")
    for at in range(0, piece.num_tokens * width, width):
        row_values, row_ids = values[at : at + shown].tolist(), ids[at : at + shown].tolist()
        yield TokenScore(row_values[0], row_ids[0], list(zip(row_ids[1:], row_values[1:], strict=True)))


class PromptScores:
    """Collects the scores of one prompt. They are over when the last piece has come, or will not come any more."""

    __slots__ = ("_num_tokens", "_pieces", "_scored", "_token_ids", "is_over")

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._pieces: list[PromptLogprobs] = []
        self._num_tokens = 1  # with a score, and the first token, which has none
        self._scored: ScoredPrompt | None = None
        self.is_over = len(token_ids) <= 1

    def add(self, piece: PromptLogprobs) -> None:
        """Take in the next piece. An engine that takes over a request begins with the prompt again: tokens that
        have a score are skipped."""
        num_known = self._num_tokens - piece.start
        if num_known >= piece.num_tokens:
            return
        if num_known > 0:
            skipped = num_known * (1 + piece.num_top) * 4
            piece = PromptLogprobs(
                self._num_tokens,
                piece.num_tokens - num_known,
                piece.num_top,
                piece.values[skipped:],
                piece.ids[skipped:],
            )
        self._pieces.append(piece)
        self._num_tokens += piece.num_tokens
        self.is_over = self._num_tokens >= len(self._token_ids)

    def scored(self) -> ScoredPrompt:
        if self._scored is None:
            self._scored = ScoredPrompt(self._token_ids, tuple(self._pieces))
        return self._scored
