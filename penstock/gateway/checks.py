"""Checks on the options of a request. Every refusal is an InvalidRequest that names the parameter and the bound."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from penstock.cluster.replica import EngineClient
from penstock.core.errors import ContextLengthExceeded, InvalidRequest, Overflow, quoted
from penstock.core.messages import EngineReady
from penstock.gateway.prompts import (
    BeamOptions,
    ChatPrompt,
    GenerationRequest,
    RequestWarning,
    SamplingOptions,
    Tool,
    image_parts,
)

MAX_N = 128
MAX_CHOICES = 2048  # prompts times n, in one request
MAX_BEAM_WIDTH = 64
MAX_BEAM_TOKENS = 4096  # of one beam: each token is a step that all beams wait for
LENGTH_PENALTIES = (-10, 10)
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of each; that much of an answer may be held back
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BREAKERS = 64
MAX_LAST_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
# Numbers in one answer: for each token of all prompts, its own and the alternatives'.
MAX_PROMPT_LOGPROBS = 1 << 20
MAX_TOP_K = 2**31 - 1  # engines use 32-bit integers
REPETITION_PENALTIES = (0.01, 100)  # beyond them logits overflow
MAX_LOGIT_BIASES = 1024
MAX_MAX_TOKENS = 2**63 - 1  # some clients send it for "as many as fit"
MAX_TOOLS = 1024
MAX_NAME_CHARS = 4096  # of names for users and prompts; the last requests are remembered with them
MAX_TOOL_SCHEMA_DEPTH = 64
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_request(request: GenerationRequest, vocab_size: int) -> None:
    """Check everything that can be checked before the prompt is tokenized."""
    if request.is_plain:
        _check_max_tokens(request.sampling, request.max_tokens_param, 1)
        _check_plain_sampling(request.sampling, vocab_size)
        return
    if not request.prompts:
        raise InvalidRequest("There must be at least one prompt.", param="prompt")
    _check_range("n", request.n, 1, MAX_N)
    check_num_choices(len(request.prompts), request.n)
    # A completion without a token still echoes its prompt, and a scored prompt is an answer of its own.
    needs_tokens = request.endpoint != "completions" and request.sampling.prompt_logprobs is None
    _check_max_tokens(request.sampling, request.max_tokens_param, int(needs_tokens))
    _check_sampling(request.sampling, vocab_size)
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt) and prompt.tools:
            _check_tools(prompt.tools)
    if request.beams is not None:
        _check_beams(request, request.beams, vocab_size)


def check_fits_queues(request: GenerationRequest, engine: EngineReady, fleet: EngineClient) -> None:
    """Refuse more answers than all engines of the model can run and keep waiting. Such a request would be refused
    for a full queue, however often the client tries."""
    count = len(request.prompts) * request.num_sequences
    if not engine.max_requests or count <= engine.max_requests:
        return
    most = engine.max_requests * max(1, fleet.num_engines_of(engine.model.name))
    if count <= most:
        return
    raise InvalidRequest(
        f"{len(request.prompts)} prompts with n={request.num_sequences} ask for {count} answers, and the engines of "
        f"this model run and keep waiting at most {most} at a time.",
        param="prompt" if len(request.prompts) > 1 else "n",
        hint="Send fewer at a time. The operator can raise the limit with --max-queue-requests.",
    )


def check_tokens_fit_queues(
    request: GenerationRequest, num_prompt_tokens: int, engine: EngineReady, fleet: EngineClient
) -> None:
    """Refuse more prompt tokens than the queues of all engines of the model take. Such a request would fit or not,
    depending on how much of it an engine has begun before the rest arrives. One answer always fits an empty queue."""
    count = len(request.prompts) * request.num_sequences
    num_tokens = num_prompt_tokens * request.num_sequences
    if count == 1 or engine.max_queue_tokens is None:
        return
    most = engine.max_queue_tokens * max(1, fleet.num_engines_of(engine.model.name))
    if num_tokens <= most:
        return
    raise InvalidRequest(
        f"{count} answers have prompts of {num_tokens:,} tokens in all, and the engines of this model keep at most "
        f"{most:,} waiting.",
        param="prompt" if len(request.prompts) > 1 else "n",
        hint="Send fewer at a time. The operator can raise the limit with --max-queue-tokens.",
    )


def check_num_choices(num_prompts: int, n: int = 1) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n} are more than the {MAX_CHOICES} answers that one request may ask for.",
            param="n",
        )


def check_names(user: str | None, prompt_cache_key: str | None = None) -> None:
    """Refuse overlong names that a client chooses."""
    for param, name in (("user", user), ("prompt_cache_key", prompt_cache_key)):
        if name is not None and len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(f"{param} may have at most {MAX_NAME_CHARS} characters.", param=param)


def check_token_ids(token_ids: Collection[int], vocab_size: int, *, param: str) -> None:
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():  # millions may be given
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is not in the model's vocabulary of {vocab_size} tokens.", param=param
            )


def too_long(
    context: int, num_prompt_tokens: int, param: str, *, is_lower_bound: bool = False
) -> ContextLengthExceeded:
    """Return the error for a prompt that leaves no room for an answer. The sentence is OpenAI's, because clients
    parse it. With `is_lower_bound` the prompt was not tokenized, and may have more tokens."""
    part = "messages" if param == "messages" else "prompt"
    if num_prompt_tokens == context and not is_lower_bound:
        return _too_long_together(Overflow(context, num_prompt_tokens), part, param)
    more = " or more" if is_lower_bound else ""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, your {part} resulted in "
        f"{num_prompt_tokens} tokens{more}. Please reduce the length of the {part}.",
        param=param,
        overflow=Overflow(context, num_prompt_tokens),
    )


def _too_long_together(overflow: Overflow, part: str, param: str) -> ContextLengthExceeded:
    prompt, answer = overflow.prompt, overflow.answer or 1
    return ContextLengthExceeded(
        f"This model's maximum context length is {overflow.context} tokens. However, you requested {prompt + answer} "
        f"tokens ({prompt} in the {part}, {answer} in the completion). Please reduce the length of the {part} or "
        "completion.",
        param=param,
        overflow=overflow,
    )


def resolve_max_tokens(
    asked: int | None,
    default: int | None,
    num_prompt_tokens: int,
    engine: EngineReady,
    *,
    prompt_param: str,
    param: str = "max_tokens",
    refuses_long_outputs: bool = False,
) -> int:
    """Return the number of tokens an answer may have: the requested number, or the default, reduced to fit the
    context and the server's cap. With `refuses_long_outputs`, a `max_tokens` of the client that is too large is
    refused, never reduced. `param` is the client's name for that number."""
    context = engine.model.max_model_len
    if num_prompt_tokens < 1:
        raise InvalidRequest("The prompt is empty: it must have at least one token.", param=prompt_param)
    room = context - num_prompt_tokens
    if room < (1 if asked is None else min(1, asked)):
        raise too_long(context, num_prompt_tokens, prompt_param)
    if asked is not None and refuses_long_outputs:
        if asked > room:
            raise _too_long_together(Overflow(context, num_prompt_tokens, asked), prompt_param, param)
        if asked > engine.max_output_tokens:
            raise InvalidRequest(
                f"{param} is too large: {asked}. This model supports at most {engine.max_output_tokens} "
                f"completion tokens, whereas you provided {asked}.",
                param=param,
            )
    return min(room, engine.max_output_tokens, default or room if asked is None else asked)


def max_tokens_lowered(asked: int, given: int | None, param: str) -> RequestWarning:
    """`given` is None where only another server knows."""
    most = "fewer" if given is None else f"at most {given}"
    return RequestWarning(
        "max_tokens_lowered",
        f"The answer may have {most} tokens, not the {asked} asked for: no more fit the model's context and the "
        "server's limit.",
        param=param,
    )


def check_num_prompt_logprobs(options: SamplingOptions, prompt_lengths: Sequence[int]) -> None:
    if options.prompt_logprobs is None:
        return
    count = sum(prompt_lengths) * (1 + options.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{count} log-probabilities of prompt tokens are asked for, and one request may have at most "
            f"{MAX_PROMPT_LOGPROBS}.",
            param="prompt_logprobs",
            hint="Send fewer prompts at a time, or ask for fewer alternatives.",
        )


def _check_max_tokens(options: SamplingOptions, param: str, least: int) -> None:
    most = options.max_tokens
    if options.min_tokens < 0:
        raise InvalidRequest(f"min_tokens must be at least 0, not {options.min_tokens}.", param="min_tokens")
    if most is None:
        return
    if most < least:
        raise InvalidRequest(f"{param} must be at least {least}, not {most}.", param=param)
    if most > MAX_MAX_TOKENS:
        raise InvalidRequest(f"{param} must be at most {MAX_MAX_TOKENS}.", param=param)
    if options.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens is {options.min_tokens}, more than {param}, which is {most}.", param="min_tokens"
        )


# The bounds of options that are numbers. 0 stands for no limit where an option is one.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, MAX_TOP_K),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": REPETITION_PENALTIES,
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "top_n_sigma": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (1, MAX_LAST_TOKENS),
    "dry_penalty_last_n": (-1, MAX_LAST_TOKENS),
    "repeat_last_n": (-1, MAX_LAST_TOKENS),
    "seed": (-(2**63), 2**63 - 1),
}


def _check_sampling(options: SamplingOptions, vocab_size: int) -> None:
    if options == SamplingOptions(max_tokens=options.max_tokens):
        return  # nothing was asked for
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            _check_range(name, value, low, high)
    check_top_logprobs(options.logprobs, param="logprobs")
    check_top_logprobs(options.prompt_logprobs, param="prompt_logprobs")
    if options.stop:
        _check_texts(options.stop, "stop", "stop strings", MAX_STOP_STRINGS)
    if options.bad_words:
        _check_texts(options.bad_words, "bad_words", "bad words", MAX_BAD_WORDS)
    if options.dry_multiplier and options.dry_sequence_breakers:
        _check_texts(options.dry_sequence_breakers, "dry_sequence_breakers", "breakers", MAX_BREAKERS)
    if options.stop_token_ids:
        _check_listed_ids(options.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size)
    if options.allowed_token_ids:
        _check_listed_ids(options.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, vocab_size)
    if options.logit_bias:
        _check_logit_bias(options.logit_bias, vocab_size)


# Options of sampling that change probabilities, which beam search takes as the model gives them, and the values that
# change nothing. None is the same as absent.
_NEUTRAL_FOR_BEAMS: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "typical_p": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "xtc_probability": 0,
    "top_n_sigma": 0,
    "dry_multiplier": 0,
    "logit_bias": {},
    "allowed_token_ids": (),
    "bad_words": (),
    "prompt_logprobs": None,
}


def _check_beams(request: GenerationRequest, beams: BeamOptions, vocab_size: int) -> None:
    options = request.sampling
    most = min(MAX_BEAM_WIDTH, max(1, (vocab_size - len(options.stop_token_ids)) // 2))
    if not 1 <= beams.width <= most:
        raise InvalidRequest(
            f"n, or best_of, must be between 1 and {most} for beam search, not {beams.width}.", param="n"
        )
    if len(request.prompts) * beams.width > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(request.prompts)} prompts with {beams.width} beams are more than the {MAX_CHOICES} beams that one "
            "request may have.",
            param="n",
        )
    _check_range("length_penalty", beams.length_penalty, *LENGTH_PENALTIES)
    if options.max_tokens is not None:
        _check_range(request.max_tokens_param, options.max_tokens, 1, MAX_BEAM_TOKENS)
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(options, name)
        if value is not None and value != neutral:
            raise InvalidRequest(
                f"{name} cannot be combined with beam search, which ranks answers by the model's own probabilities.",
                param=name,
                hint=f"Leave {name} out.",
            )
    if options.grammar is not None:
        raise grammar_with_beams("response_format")
    if any(map(image_parts, request.prompts)):
        raise InvalidRequest(
            "Images cannot be combined with beam search: every step would send them to the engine again.",
            param="messages",
        )


def grammar_with_beams(param: str) -> InvalidRequest:
    return InvalidRequest(
        "Beam search cannot be combined with structured output, strict or forced tools, or a bound on thinking.",
        param=param,
    )


def _check_listed_ids(token_ids: tuple[int, ...], param: str, most: int, vocab_size: int) -> None:
    if len(token_ids) > most:
        raise InvalidRequest(f"There may be at most {most} {param}, not {len(token_ids)}.", param=param)
    check_token_ids(token_ids, vocab_size, param=param)


def check_top_logprobs(count: int | None, *, param: str = "top_logprobs") -> None:
    if count is not None:
        _check_range(param, count, 0, MAX_TOP_LOGPROBS)


def _check_texts(texts: tuple[str, ...], param: str, what: str, most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest(f"There may be at most {most} {what}, not {len(texts)}.", param=param)
    if not all(text.strip() if param == "bad_words" else text for text in texts):
        raise InvalidRequest(f"None of the {what} may be empty.", param=param)
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise InvalidRequest(f"Each of the {what} may have at most {MAX_STOP_CHARS} characters.", param=param)


def check_num_tools(number: int, param: str = "tools") -> None:
    """Refuse more tools, or names of tools, than are read on the event loop."""
    if number > MAX_TOOLS:
        raise InvalidRequest(f"There may be at most {MAX_TOOLS} tools, not {number}.", param=param)


def _check_tools(tools: Sequence[Tool]) -> None:
    check_num_tools(len(tools))
    names = set()
    for tool in tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"The tool name {tool.name[:128]!r} must have 1 to 128 letters, digits, '_', '-' or '.'.",
                param="tools",
            )
        if tool.name in names:
            raise InvalidRequest(f"There are two tools with the name {quoted(tool.name)}.", param="tools")
        names.add(tool.name)
        if _is_deeper_than(MAX_TOOL_SCHEMA_DEPTH, tool.parameters):
            raise InvalidRequest(
                f"The parameters of the tool {quoted(tool.name)} are nested more than {MAX_TOOL_SCHEMA_DEPTH} levels "
                "deep.",
                param="tools",
            )


def _is_deeper_than(limit: int, value: Any) -> bool:
    """Return whether a value is nested more deeply. Without recursion, because the value is a client's, and with
    exact types, because it may be large."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for each in level:
            if type(each) is dict:
                inner += each.values()
            elif type(each) is list:
                inner += each
        if not inner:
            return False
        level = inner
    return True


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias may name at most {MAX_LOGIT_BIASES} tokens, not {len(logit_bias)}.",
            param="logit_bias",
        )
    check_token_ids(logit_bias, vocab_size, param="logit_bias")
    for token_id, bias in logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"The logit_bias of token {token_id} must be between -100 and 100, not {bias}.",
                param="logit_bias",
            )


def _check_plain_sampling(options: SamplingOptions, vocab_size: int) -> None:
    if (options.temperature, options.top_p, options.seed, options.stop) != _NO_PLAIN_OPTIONS:
        _check_sampling(options, vocab_size)


_NO_PLAIN_OPTIONS = (None, None, None, ())


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}.", param=name)
