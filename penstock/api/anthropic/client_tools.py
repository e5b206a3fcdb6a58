"""The tools that Anthropic names and the client runs: clients send a type instead of a schema.

Anthropic's models know these tools by heart. Other models read a description and a schema, which stand here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.prompts import CacheMark, Tool

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
