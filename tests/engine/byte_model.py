"""A tiny random model that writes bytes, so that its answers are text which a grammar can hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.plan import TokenEvent
from penstock.core.request import Grammar, Request, SamplingParams
from penstock.engine.build import Engine
from penstock.engine.echo import NUM_BYTES, byte_tokenizer_json

from .tiny import write_tiny_model

END = NUM_BYTES
# Tokens that models begin a tool call with: a special one, and one that is only added to the vocabulary.
CALL_TOKENS = {"[CALL]": END + 1, "<tool_call>": END + 2}


def write_byte_model(folder: Path, vocab_size: int = END + 8, **changes: Any) -> Path:
    write_tiny_model(folder, **changes)
    config = json.loads((folder / "config.json").read_text())
    # A little larger than the tokenizer's vocabulary, as real models are.
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size, "eos_token_id": END}))
    tokenizer = json.loads(byte_tokenizer_json())
    tokenizer["added_tokens"] += [
        tokenizer["added_tokens"][0] | {"id": token_id, "content": text, "special": text == "[CALL]"}
        for text, token_id in CALL_TOKENS.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def text_of(events: list[TokenEvent]) -> str:
    return bytes(token for event in events for token in event.token_ids if token < NUM_BYTES).decode()


def constrained(
    request_id: str, grammar: Grammar | None, max_tokens: int = 300, **sampling: object
) -> Request:
    settings: dict[str, object] = {"temperature": 1.0, "seed": 11, **sampling}
    return Request(
        id=request_id,
        prompt_token_ids=tuple(f"prompt of {request_id}".encode()),
        sampling=SamplingParams(max_tokens=max_tokens, grammar=grammar, **settings),  # type: ignore[arg-type]
    )


def until(engine: Engine, condition: Callable[[], bool]) -> list[TokenEvent]:
    """Step until something is true; gives up long before a test's timeout."""
    events: list[TokenEvent] = []
    gives_up = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < gives_up, "the condition never came true"
        events += engine.loop.step()
    return events
