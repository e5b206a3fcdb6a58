"""Models that external servers serve, and requests to them in OpenAI's words.

The catalogue knows these models by name, without a tokenizer or a template. Fields that every server knows go by
OpenAI's names. Fields that only some know go by vLLM's, and only where a client asked for them, so that strict
servers do not refuse the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ServerLoad
from penstock.cluster.external.wire import ExternalCall, estimated_tokens
from penstock.core.cluster_view import ReplicaView
from penstock.core.errors import InvalidRequest
from penstock.core.grammar_text import is_lenient, without_options
from penstock.core.request import Grammar, SamplingDefaults, Tier
from penstock.dispatch.health import Circuit
from penstock.gateway.checks import check_request
from penstock.gateway.metrics.table import Figures
from penstock.gateway.prompts import (
    CacheMark,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    ImagePart,
    Prompt,
    SamplingOptions,
    TextPart,
    TextPrompt,
    Tool,
    ToolCall,
)
from penstock.gateway.text.caching import has_cache_marks
from penstock.router import ReplicaState

_SHORT_TTL_S = 300.0  # of a mark without a time
UNKNOWN_VOCAB_SIZE = 1 << 31  # more than any vocabulary has


@dataclass(frozen=True, slots=True)
class ExternalModel:
    name: str
    max_model_len: int | None  # None where no server tells

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_model_len

    @property
    def fingerprint(self) -> bytes:
        """Return the identity of the model, which is its name only, because servers do not report a change of
        weights."""
        return hashlib.blake2b(f"external\0{self.name}".encode(), digest_size=32).digest()

    def check(self, request: GenerationRequest) -> None:
        """Everything that can be checked cheaply and without the server's tokenizer. Raises InvalidRequest."""
        check_request(request, UNKNOWN_VOCAB_SIZE)
        if request.is_plain:  # which has none of these
            return
        if request.text.lists_token_ids:
            raise InvalidRequest(
                f"The model {self.name!r} runs on another server, whose token ids are not known.",
                param="return_token_ids",
            )
        if request.beams is not None:
            raise InvalidRequest(
                f"The model {self.name!r} runs on another server, which is not asked for beam search.",
                param="use_beam_search",
            )
        if any(isinstance(prompt, ChatPrompt) and prompt.template_name for prompt in request.prompts):
            # Such a server may run a template instead of looking for a name: no guard could read its prompts.
            raise InvalidRequest(
                f"The model {self.name!r} runs on another server, which is not asked for another chat template.",
                param="chat_template",
            )
        if request.sampling.prompt_logprobs is not None or request.sampling.max_tokens == 0:
            raise InvalidRequest(
                f"The model {self.name!r} runs on another server, which is not asked to score prompts.",
                param=request.max_tokens_param
                if request.sampling.prompt_logprobs is None
                else "prompt_logprobs",
                hint="Leave out prompt_logprobs, echo with logprobs, and max_tokens of 0.",
            )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Refuse a prompt of token ids under a guard: guards read text, and only the external server has the
        tokenizer."""
        raise InvalidRequest(
            f"A safety policy must read the prompt, and {self.name!r} has no tokenizer here.",
            param="prompt",
            hint="Send the prompt as text.",
        )

    def refuse(self) -> InvalidRequest:
        """Return the error for operations that need more than the model's name."""
        return InvalidRequest(
            f"The model {self.name!r} runs on another server, which is only asked for answers.", param="model"
        )


class ExternalModels:
    """The models of all external servers. Also a collector of metrics about the servers and the requests to them."""

    def __init__(self, pool: ExternalPool) -> None:
        self.pool = pool
        self._found: dict[str, ExternalModel] = {}  # by name, of those models:
        self._found_in: Mapping[str, int | None] = {}

    @property
    def is_ready(self) -> bool:
        return self.pool.is_ready

    def find(self, name: str) -> ExternalModel | None:
        models = self.pool.models
        if models is not self._found_in:
            self._found = {each: ExternalModel(each, length) for each, length in models.items()}
            self._found_in = models
        return self._found.get(name)

    def first(self) -> ExternalModel | None:
        return next(iter(self.all()), None)

    def all(self) -> list[ExternalModel]:
        return [ExternalModel(name, length) for name, length in self.pool.models.items()]

    def replica_views(self) -> list[ReplicaView]:
        """Return the servers in the form in which replicas are shown. The load counts all clients of a server that
        reports it."""
        views = []
        for server in self.pool.views():
            load = server.load or ServerLoad(server.num_running, 0)
            views.append(
                ReplicaView(
                    id=server.name,
                    model=", ".join(server.models),
                    revision="",
                    state=server.state if server.circuit is Circuit.CLOSED else ReplicaState.UNHEALTHY,
                    role="external",
                    region=server.region,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    kv_usage=load.kv_usage or 0.0,
                )
            )
        return views

    def figures(self) -> Figures:
        views = {view.name: view for view in self.pool.views()}
        loads = {name: view.load for name, view in views.items() if view.load is not None}
        running = {(name, "running"): load.num_running for name, load in loads.items()}
        waiting = {(name, "waiting"): load.num_waiting for name, load in loads.items()}
        attempts = {
            (name, outcome): count for name, view in views.items() for outcome, count in view.outcomes.items()
        }
        return {
            "external_up": {name: view.state is ReplicaState.READY for name, view in views.items()},
            "external_circuit_open": {
                name: view.circuit is not Circuit.CLOSED for name, view in views.items()
            },
            "external_requests_running": {name: view.num_running for name, view in views.items()},
            "external_load": running | waiting,
            "external_attempts": attempts,
            "external_retries": self.pool.num_retries,
            "external_continued": self.pool.num_continued,
            "external_waiting": self.pool.num_waiting,
        }


_DEFAULTS = SamplingOptions()
_NOTHING_STATED = SamplingDefaults()
# Sampling options that are sent as they are called here, unless they are the defaults.
_PLAIN_OPTIONS = (
    "temperature",
    "top_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "top_n_sigma",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def calls_for(
    request_id: str,
    request: GenerationRequest,
    *,
    model: str,
    max_tokens: int | None,
    context: int | None,
    region: str,
    spill_over_s: float | None = None,
    tier: Tier = Tier.DEFAULT,
    is_whole: bool = False,
) -> list[ExternalCall]:
    """One call for each answer: the n answers of a prompt follow each other, with consecutive seeds. `context` is the
    length of the model's context where `max_tokens` is to be cut to it."""
    calls: list[ExternalCall] = []
    for prompt in request.prompts:
        is_chat, has_marks = isinstance(prompt, ChatPrompt), False
        if request.is_plain and isinstance(prompt, ChatPrompt):
            body = _plain_fields(prompt, request.sampling)
        else:
            body = {**_prompt_fields(prompt), **_sampling_fields(request.sampling, is_chat=is_chat)}
            body |= _text_fields(request)
            has_marks = isinstance(prompt, ChatPrompt) and has_cache_marks(prompt)
        text = _text_of(prompt)
        num_tokens = estimated_tokens(text)
        if max_tokens is not None:
            room = None if context is None else context - num_tokens
            body["max_tokens"] = max_tokens if room is None or room < 1 else min(max_tokens, room)
        for sibling in range(request.n):
            seed = request.sampling.seed
            calls.append(
                ExternalCall(
                    id=f"{request_id}-{len(calls)}",
                    model=model,
                    api="chat/completions" if is_chat else "completions",
                    body=body if seed is None else {**body, "seed": seed + sibling},
                    text=text,
                    tenant=request.principal.workspace_id,
                    region=region,
                    spill_over_s=spill_over_s,
                    tier=tier,
                    affinity_key=request.prompt_cache_key or "",
                    is_whole=is_whole,
                    has_cache_marks=has_marks,
                    estimated_tokens=num_tokens,
                )
            )
    return calls


def _plain_fields(prompt: ChatPrompt, options: SamplingOptions) -> dict[str, Any]:
    """Return the fields of a plain request; its seed and `max_tokens` are added by the caller."""
    fields: dict[str, Any] = {
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages]
    }
    if options.temperature is not None or options.top_p is not None or options.stop:
        fields |= _sampling_fields(options, is_chat=True)
    return fields


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, TextPrompt):
        special = {} if prompt.add_special_tokens else {"add_special_tokens": False}
        return {"prompt": prompt.text, **({"suffix": prompt.suffix} if prompt.suffix else {}), **special}
    if not isinstance(prompt, ChatPrompt):
        return {"prompt": list(prompt.token_ids)}
    fields: dict[str, Any] = {"messages": [_message(message) for message in prompt.messages]}
    if prompt.tools:
        fields["tools"] = [_tool(tool) for tool in prompt.tools]
        fields |= _tool_choice(prompt)
    options = dict(prompt.template_options)
    if prompt.thinks is not None:
        options["enable_thinking"] = prompt.thinks
    if options:
        fields["chat_template_kwargs"] = options
    if not prompt.add_generation_prompt:
        fields["add_generation_prompt"] = False
    if prompt.max_thinking_tokens is not None:
        fields["thinking_token_budget"] = prompt.max_thinking_tokens
    if prompt.continues_last:
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return fields


def _message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        fields["content"] = fields["content"] or None
    return fields


def _marked(part: dict[str, Any], mark: CacheMark | None) -> dict[str, Any]:
    if mark is None:
        return part
    ttl = {} if mark.ttl_s <= _SHORT_TTL_S else {"ttl": "1h"}
    return part | {"cache_control": {"type": "ephemeral", **ttl}}


def _content(message: ChatMessage) -> str | list[dict[str, Any]]:
    """Return the content as one text, because not every server takes parts; as parts if there are images or marks of
    prompt caching."""
    content, mark = message.content, message.cache
    if isinstance(content, str):
        is_plain = mark is None or not content
        return content if is_plain else [_marked({"type": "text", "text": content}, mark)]
    if mark is None and not any(isinstance(part, ImagePart) or part.cache is not None for part in content):
        return "\n".join(part.text for part in content)
    parts = [
        _marked(
            {"type": "image_url", "image_url": {"url": part.url}}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text},
            part.cache,
        )
        for part in content
    ]
    if parts and "cache_control" not in parts[-1]:
        parts[-1] = _marked(parts[-1], mark)
    return parts


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return _marked({"type": "function", "function": function}, tool.cache)


def _tool_choice(prompt: ChatPrompt) -> dict[str, Any]:
    choice = prompt.tool_choice
    fields: dict[str, Any] = {}
    if choice.mode == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    if not choice.parallel:
        fields["parallel_tool_calls"] = False
    return fields


def _sampling_fields(options: SamplingOptions, *, is_chat: bool) -> dict[str, Any]:
    if msgspec.structs.replace(options, max_tokens=None, seed=None) == _DEFAULTS:
        return {}  # nothing was asked for
    # Options that a client leaves out are left to the other server, which knows the recommended values of its model.
    options = options.with_defaults(_NOTHING_STATED)
    fields: dict[str, Any] = {}
    for name in _PLAIN_OPTIONS:
        if (value := getattr(options, name)) != getattr(_DEFAULTS, name):
            fields[name] = value
    if options.stop:
        fields["stop"] = list(options.stop)
    if options.stop_token_ids:
        fields["stop_token_ids"] = list(options.stop_token_ids)
    if options.allowed_token_ids:
        fields["allowed_token_ids"] = list(options.allowed_token_ids)
    if options.bad_words:
        fields["bad_words"] = list(options.bad_words)
    if options.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in options.logit_bias.items()}
    if options.logprobs is not None:
        fields |= (
            {"logprobs": True, "top_logprobs": options.logprobs}
            if is_chat
            else {"logprobs": options.logprobs}
        )
    if options.grammar is not None:
        fields |= _grammar(options.grammar)
    return fields


def _text_fields(request: GenerationRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.text.shows_special_tokens:
        fields["skip_special_tokens"] = False
    if request.text.includes_stop:
        fields["include_stop_str_in_output"] = True
    if request.truncates_to is not None:
        fields["truncate_prompt_tokens"] = request.truncates_to
    return fields


def _grammar(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = msgspec.json.decode(grammar.text)
            named = {"name": "answer", "schema": without_options(schema), "strict": not is_lenient(schema)}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case "regex":
            return {"structured_outputs": {"regex": grammar.text}}
        case "choice":
            return {"structured_outputs": {"choice": msgspec.json.decode(grammar.text)}}
        case "ebnf":
            return {"structured_outputs": {"grammar": grammar.text}}
    raise InvalidRequest(
        "Structural tags cannot be passed on to the server of this model.", param="response_format"
    )


def _text_of(prompt: Prompt) -> str:
    """Return the text of a prompt in the order in which a model reads it: tools before messages."""
    if not isinstance(prompt, ChatPrompt):
        return prompt.text if isinstance(prompt, TextPrompt) else " ".join(map(str, prompt.token_ids))
    texts = _texts_of(prompt.messages)
    if not prompt.tools:
        return "\n".join(texts)
    tools = [msgspec.json.encode(tool.parameters).decode() for tool in prompt.tools]
    names = [f"{tool.name} {tool.description or ''}" for tool in prompt.tools]
    return "\n".join([*names, *tools, *texts])


def _texts_of(messages: Sequence[ChatMessage]) -> list[str]:
    texts = []
    for message in messages:
        if isinstance(message.content, str) and not message.tool_calls:
            texts.append(f"{message.role}\n{message.content}")
            continue
        calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
        parts = [message.content] if isinstance(message.content, str) else map(_told, message.content)
        texts.append("\n".join([message.role, *parts, *calls]))
    return texts


def _told(part: TextPart) -> str:
    """Return the text of a part; for an image, a text that stands for it."""
    if not isinstance(part, ImagePart):
        return part.text
    return f"<image {hashlib.blake2b(part.url.encode(), digest_size=16).hexdigest()}>"
