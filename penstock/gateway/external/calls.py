"""Translates a request into OpenAI's API, for external servers. Knows neither servers nor answers.

What every such server knows goes by OpenAI's names. What only some know goes by vLLM's, and only where a client asked
for it, so that strict servers are not bothered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.cluster.external.wire import ExternalCall, estimated_tokens
from penstock.core.errors import InvalidRequest
from penstock.core.grammar_text import is_lenient, without_options
from penstock.core.request import Grammar
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    Tool,
    ToolCall,
)

_DEFAULTS = SamplingOptions()
# Sampling options that are sent as they are called here, unless they are the defaults.
_PLAIN_OPTIONS = (
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
) -> list[ExternalCall]:
    """One call for each answer: the n answers of a prompt follow each other, with consecutive seeds. `context` is the
    length of the model's context where `max_tokens` is to be cut to it."""
    calls: list[ExternalCall] = []
    for prompt in request.prompts:
        is_chat = isinstance(prompt, ChatPrompt)
        body = {**_prompt_fields(prompt), **_sampling_fields(request.sampling, is_chat=is_chat)}
        text = _text_of(prompt)
        if max_tokens is not None:
            room = None if context is None else context - estimated_tokens(text)
            body["max_tokens"] = max_tokens if room is None or room < 1 else min(max_tokens, room)
        body["stream_options"] = {"include_usage": True}
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
                    affinity_key=request.prompt_cache_key or "",
                )
            )
    return calls


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, TextPrompt):
        return {"prompt": prompt.text}
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


def _content(message: ChatMessage) -> str:
    """The content as one text, because not every server takes parts."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


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
    # These fields are always sent, because the defaults of servers differ.
    fields: dict[str, Any] = dict(zip(("temperature", "top_p"), options.temperature_and_top_p, strict=True))
    for name in _PLAIN_OPTIONS:
        if (value := getattr(options, name)) != getattr(_DEFAULTS, name):
            fields[name] = value
    if options.stop:
        fields["stop"] = list(options.stop)
    if options.stop_token_ids:
        fields["stop_token_ids"] = list(options.stop_token_ids)
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
    """The text of a prompt in the order in which a model reads it: tools before messages."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if not isinstance(prompt, ChatPrompt):
        return " ".join(map(str, prompt.token_ids))
    tools = [msgspec.json.encode(tool.parameters).decode() for tool in prompt.tools]
    names = [f"{tool.name} {tool.description or ''}" for tool in prompt.tools]
    return "\n".join([*names, *tools, *_texts_of(prompt.messages)])


def _texts_of(messages: Sequence[ChatMessage]) -> list[str]:
    texts = []
    for message in messages:
        calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
        texts.append("\n".join([message.role, _content(message), *calls]))
    return texts
