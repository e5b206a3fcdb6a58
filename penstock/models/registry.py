"""Which architecture a checkpoint asks for. To add one: write its file, and put its class in ARCHITECTURES."""

from __future__ import annotations

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.gemma3 import Gemma3
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import Decoder
from penstock.models.llama import Llama, Mistral
from penstock.models.mixtures import Mixtral, Qwen2MoE, Qwen3MoE
from penstock.models.qwen2 import Qwen2
from penstock.models.qwen3 import Qwen3

ARCHITECTURES: tuple[type[Decoder], ...] = (
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen2MoE,
    Qwen3,
    Qwen3MoE,
    Gemma3,
)


def architecture_for_huggingface(fields: Fields) -> type[Decoder]:
    """By the class that `architectures` names, else by `model_type`."""
    named = fields.raw("architectures")
    asked = [str(name) for name in named] if isinstance(named, list) else []
    if not asked and fields.has("model_type"):
        asked = [fields.text("model_type")]
    for architecture in ARCHITECTURES:
        if any(name in architecture.huggingface_names for name in asked):
            return architecture
    if not asked:
        raise ModelLoadError(f"{fields.where} names neither architectures nor a model_type.")
    known = ", ".join(architecture.huggingface_names[0] for architecture in ARCHITECTURES)
    raise ModelLoadError(f"The architecture {asked[0]} is not known; known are {known}.")


def architecture_for_gguf(file: GGUFFile) -> type[Decoder]:
    asked = file.architecture
    for architecture in ARCHITECTURES:
        if asked in architecture.gguf_names:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.gguf_names)
    raise ModelLoadError(f"The architecture {asked!r} of {file.path.name} is not known; known are {known}.")
