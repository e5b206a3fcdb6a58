"""Lists the families of models. A new family is a file of this package and an entry here."""

from __future__ import annotations

from penstock.models.decoder import Decoder
from penstock.models.families.gemma import Gemma3
from penstock.models.families.llama import Llama, Mistral, Mixtral
from penstock.models.families.qwen import Qwen2, Qwen2MoE, Qwen3, Qwen3MoE

FAMILIES: tuple[type[Decoder], ...] = (
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen2MoE,
    Qwen3,
    Qwen3MoE,
    Gemma3,
)
