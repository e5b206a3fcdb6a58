"""One request to an external server, whichever of them gets it. Knows no server and no gateway."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

BYTES_PER_TOKEN = 4  # of English text, roughly: the gateway does not have the model's tokenizer


class ExternalCall(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is what the API wants, without the model, which each server may call something else."""

    id: str
    model: str
    api: Literal["chat/completions", "completions"]
    body: dict[str, Any]
    text: str  # of the prompt, by which requests with the same beginning find the same server
    tenant: str = ""
    region: str = ""
    affinity_key: str = ""
    timeout_s: float | None = None

    @property
    def estimated_tokens(self) -> int:
        """Of the prompt."""
        return len(self.text.encode()) // BYTES_PER_TOKEN + 1
