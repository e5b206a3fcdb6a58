"""Requests to /v1/messages and /v1/messages/count_tokens, and their translation into the gateway's types.

Field names, defaults and refusals are Anthropic's. The gateway checks the bounds that apply to every API.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from penstock.api.anthropic.blocks import (
    CacheControl,
    HostedBlock,
    TextBlock,
    Turn,
    chat_messages,
    mark_of,
    system_message,
)
from penstock.api.extensions import EXTENSION_FIELDS, ExtensionFields
from penstock.api.http.parsing import check_num_parts
from penstock.core.errors import InvalidRequest, ThreadsUnsupported, quoted
from penstock.core.request import Grammar, Tier
from penstock.gateway.checks import check_num_tools
from penstock.gateway.prompts import (
    CacheMark,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    RequestWarning,
    SamplingOptions,
    Tool,
    ToolChoice,
)

_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_PAIR: dict[str, Any] = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_EDITS = {
    "path": _TEXT,
    "view_range": {**_PAIR, "description": "First and last line to view."},
    "file_text": {**_TEXT, "description": "The whole new file, for create."},
    "old_str": {**_TEXT, "description": "Text to replace; it must occur exactly once."},
    "new_str": _TEXT,
    "insert_line": {**_INTEGER, "description": "The line after which text is inserted; 0 is the beginning."},
    "insert_text": _TEXT,
}


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that Anthropic names and the client runs. Clients send its type instead of a schema, because Anthropic's
    models were trained with it; other models read this description and schema."""

    description: str
    properties: dict[str, Any]
    required: tuple[str, ...] = ()

    def to_tool(self, name: str, strict: bool, cache: CacheMark | None) -> Tool:
        schema = {"type": "object", "properties": self.properties, "required": list(self.required)}
        return Tool(name, self.description, schema, strict, cache)


def _command(*commands: str) -> dict[str, Any]:
    return {"command": {"type": "string", "enum": list(commands)}}


# By the type without its date: the versions of a tool differ little.
CLIENT_TOOLS = {
    "bash": ClientTool(
        "Run a command in a bash session that stays open between calls.",
        {"command": _TEXT, "restart": {"type": "boolean", "description": "Start a new session."}},
    ),
    "text_editor": ClientTool(
        "View, create and edit text files.",
        _command("view", "create", "str_replace", "insert", "undo_edit") | _EDITS,
        ("command", "path"),
    ),
    "memory": ClientTool(
        "Keep notes between conversations, as files in the folder /memories. Look there before you begin.",
        _command("view", "create", "str_replace", "insert", "delete", "rename")
        | _EDITS
        | {"old_path": _TEXT, "new_path": _TEXT},
        ("command",),
    ),
    "computer": ClientTool(
        "Use a computer by its screen, mouse and keyboard.",
        {
            "action": _TEXT,
            "coordinate": {**_PAIR, "description": "x and y on the screen, in pixels."},
            "start_coordinate": _PAIR,
            "text": _TEXT,
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _INTEGER,
            "duration": {"type": "number"},
        },
        ("action",),
    ),
}


MIN_THINKING_TOKENS = 1024
MAX_EDITS = 32
_MAX_SHOWN_CHARS = 64
_DATE = re.compile(r"_\d{8}$")  # at the end of the types of Anthropic's own tools
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_MODES: dict[str, Literal["auto", "required", "named", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


class ToolDefinition(msgspec.Struct):
    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool = False
    cache_control: CacheControl | None = None

    @property
    def client_tool(self) -> ClientTool | None:
        return CLIENT_TOOLS.get(_DATE.sub("", self.type or ""))

    @property
    def is_hosted(self) -> bool:
        """Return whether a provider's server would run the tool. This server runs none, skips the tool and says
        so."""
        return self.type not in (None, "custom") and self.client_tool is None

    def to_tool(self, place: str) -> Tool:
        if self.client_tool is not None:
            return self.client_tool.to_tool(self.name, self.strict, mark_of(self.cache_control))
        if not _TOOL_NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"{place}.name: it must have 1 to 128 letters, digits, underscores or hyphens.", param="tools"
            )
        if self.input_schema is None or self.input_schema.get("type", "object") != "object":
            raise InvalidRequest(
                f"{place}.input_schema: a JSON schema of the type 'object' is required.", param="tools"
            )
        return Tool(self.name, self.description, self.input_schema, self.strict, mark_of(self.cache_control))


class ToolChoiceParam(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def to_tool_choice(self, tools: tuple[Tool, ...], *, has_skipped: bool) -> ToolChoice:
        if not tools and self.type != "none" and not (has_skipped and self.type == "auto"):
            raise InvalidRequest("tool_choice may only be given together with tools.", param="tool_choice")
        if self.type == "tool" and self.name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                f"tool_choice.name: there is no tool {quoted(self.name)}.", param="tool_choice"
            )
        name = self.name if self.type == "tool" else None
        return ToolChoice(_MODES[self.type], name, not self.disable_parallel_tool_use)


class Thinking(msgspec.Struct):
    """The client's choice of thinking; `adaptive` lets the model decide."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None

    @property
    def thinks(self) -> bool | None:
        return None if self.type == "adaptive" else self.type == "enabled"


class JSONOutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: JSONOutputFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.format is None:
            return None
        return Grammar("json_schema", msgspec.json.encode(self.format.schema).decode())


class ContextEdit(msgspec.Struct):
    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct):
    """Edits of the conversation that a provider's server makes. This server makes none, and names each one."""

    edits: list[ContextEdit] = []

    def warnings(self) -> tuple[RequestWarning, ...]:
        """Thoughts that are all to be kept need no edit: templates get all that a client sends."""
        if len(self.edits) > MAX_EDITS:
            raise InvalidRequest(f"There may be at most {MAX_EDITS} edits.", param="context_management")
        skipped = [edit.type[:_MAX_SHOWN_CHARS] for edit in self.edits if edit.keep != "all"]
        return tuple(
            RequestWarning(
                "context_edit_skipped",
                f"The edit {quoted(name)} of context_management was skipped: the whole conversation goes to the "
                "model.",
                "context_management",
            )
            for name in dict.fromkeys(skipped)
        )


class Metadata(msgspec.Struct):
    user_id: str | None = None


class CountTokensRequest(ExtensionFields, kw_only=True):
    """The fields of the prompt. Fields that affect only the answer are accepted, and ignored by counting."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        edits = self.context_management.warnings() if self.context_management else ()
        skipped = [(tool.type or "", "tools") for tool in self.tools or () if tool.is_hosted]
        skipped += [("mcp_servers", "mcp_servers")] if self.mcp_servers else []
        blocks = [
            block for turn in self.messages for block in turn.blocks() if isinstance(block, HostedBlock)
        ]
        skipped += [(str(block.__struct_config__.tag), "messages") for block in blocks]
        return *edits, *(_skipped(name, param) for name, param in dict.fromkeys(skipped))

    def prompt(self) -> ChatPrompt:
        check_num_parts(self.messages, "messages")
        messages = (*system_message(self.system), *chat_messages(self.messages))
        if self.cache_control is not None:
            messages = (*messages[:-1], _marked_at_end(messages[-1], self.cache_control.mark()))
        asked = self.tools or []
        check_num_tools(len(asked))
        tools = tuple(
            tool.to_tool(f"tools.{index}") for index, tool in enumerate(asked) if not tool.is_hosted
        )
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("tools: the names of tools must differ.", param="tools")
        has_skipped = len(tools) < len(asked)
        choice = (
            self.tool_choice.to_tool_choice(tools, has_skipped=has_skipped)
            if self.tool_choice
            else ToolChoice()
        )
        thinks = self.thinking.thinks if self.thinking else False
        if thinks and choice.mode in ("required", "named"):
            raise InvalidRequest("Thinking cannot be combined with a forced tool_choice.", param="thinking")
        return ChatPrompt(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            thinks=thinks,
            max_thinking_tokens=self.thinking.budget_tokens if self.thinking and thinks else None,
            continues_last=self._continues_last(messages[-1], thinks=bool(thinks)),
        )

    def _continues_last(self, last: ChatMessage, *, thinks: bool) -> bool:
        """Return whether the last message is the beginning of the answer, written by the client."""
        if last.role != "assistant":
            return False
        if thinks:
            raise InvalidRequest(
                "The last message must not be the assistant's when thinking is enabled.", param="messages"
            )
        end = last.parts[-1].text if last.parts else ""
        if end != end.rstrip():
            raise InvalidRequest(
                "The last message is the assistant's, so its content must not end with white space.",
                param="messages",
            )
        return bool(end)


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: dict[str, Any] | None = None

    def to_generation(self) -> GenerationRequest:
        if self.thread is not None:
            # Ignoring the id would lose the conversation. After this error, clients send the whole conversation.
            raise ThreadsUnsupported(
                "thread: the server keeps no conversations.",
                param="thread",
                hint="Send all messages, without thread.",
            )
        self._check_thinking()
        options: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": tuple(self.stop_sequences or ()),
            "grammar": self.extended_grammar(self.output_config.grammar() if self.output_config else None),
        }
        request = GenerationRequest(
            prompts=(self.prompt(),),
            sampling=SamplingOptions(**options, **self.extended_options()),
            model=self.model,
            # "auto" takes the best tier that the key allows; without a word a request claims nothing.
            tier=Tier.PRIORITY if self.service_tier == "auto" else Tier.DEFAULT,
            endpoint="messages",
            user=self.metadata.user_id if self.metadata else None,
            warnings=self.warnings,
        )
        return self.extended_request(request, has_tier=self.service_tier is not None)

    def _check_thinking(self) -> None:
        if self.thinking is None or self.thinking.type != "enabled":
            return
        budget = self.thinking.budget_tokens
        if budget is None or budget < MIN_THINKING_TOKENS:
            raise InvalidRequest(
                f"thinking.budget_tokens: at least {MIN_THINKING_TOKENS} are required.", param="thinking"
            )
        if budget >= self.max_tokens:
            raise InvalidRequest(
                f"thinking.budget_tokens is {budget}, but must be less than max_tokens, which is "
                f"{self.max_tokens}.",
                param="thinking",
            )


def _skipped(name: str, param: str) -> RequestWarning:
    message = f"{name[:_MAX_SHOWN_CHARS]!r} was skipped, because this server runs no hosted tools."
    return RequestWarning("tool_skipped", message, param)


def _marked_at_end(message: ChatMessage, mark: CacheMark) -> ChatMessage:
    """Put the cache mark of the whole request on the last block, unless that block has a mark of its own."""
    marks = (
        message.cache,
        *(part.cache for part in message.parts[-1:]),
        *(call.cache for call in message.tool_calls[-1:]),
    )
    has_own = any(marks)
    return message if has_own else msgspec.structs.replace(message, cache=mark)


GUARDED_FIELDS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "stop_sequences",
    "temperature",
    "top_p",
    "cache_control",
    *EXTENSION_FIELDS,
)
