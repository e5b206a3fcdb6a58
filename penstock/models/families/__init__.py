"""Lists the families of models. A new family is a file of this package and an entry here."""

from __future__ import annotations

from penstock.models.decoder import Decoder
from penstock.models.families import cohere, gemma, glm, gpt, granite, llama, olmo, phi, qwen, relu2, stablelm

FAMILIES: tuple[type[Decoder], ...] = (
    llama.Llama,
    llama.Mistral,
    llama.Mixtral,
    llama.SmolLM3,
    llama.SeedOss,
    llama.Ernie45,
    llama.Helium,
    qwen.Qwen2,
    qwen.Qwen2MoE,
    qwen.Qwen3,
    qwen.Qwen3MoE,
    gemma.Gemma,
    gemma.Gemma2,
    gemma.Gemma3,
    phi.Phi,
    phi.Phi3,
    olmo.Olmo,
    olmo.Olmo2,
    olmo.Olmo3,
    olmo.Exaone4,
    granite.Granite,
    glm.Glm,
    glm.Glm4,
    cohere.Cohere,
    cohere.Cohere2,
    gpt.GPT2,
    gpt.GPTNeoX,
    gpt.StarCoder2,
    gpt.Falcon,
    stablelm.StableLM,
    relu2.Nemotron,
    relu2.Arcee,
    relu2.Apertus,
)
