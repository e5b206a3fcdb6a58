"""What a front end hands to the gateway: prompts, sampling wishes and the request around them.

Independent of any wire format: the OpenAI shapes, and later others, are translated into these.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from penstock.core.request import Tier


class TextPrompt(msgspec.Struct, frozen=True):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn. Several text parts stay apart until the template joins them."""

    role: str
    content: str | tuple[str, ...]
    name: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    template_options: dict[str, Any] = {}  # extra variables for the model's template


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`core.SamplingParams` as a client may wish for it: unchecked, and `max_tokens` may be left open."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`n` answers for each prompt. `default_max_tokens` fills in for an absent `max_tokens` and, unlike it, is cut
    to the room that the context leaves."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingOptions
    n: int = 1
    model: str | None = None
    default_max_tokens: int | None = None
    tier: Tier = Tier.DEFAULT
    tenant: str = ""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt tokens
