"""LoRA adapters with random weights, written by PEFT itself, and the models they make when merged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import Reference

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYTHING = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    reference: Reference,
    folder: Path,
    *,
    seed: int,
    targets: str | Sequence[str] = EVERYTHING,
    **settings: Any,
) -> Reference:
    """An adapter for the model of `reference`; returns the merged model, with the adapter's folder."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and few tests need it

    torch.manual_seed(seed)
    chosen = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": chosen, **settings})
    adapted = get_peft_model(copy.deepcopy(reference.model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.15)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return Reference(f"{reference.name}-{seed}", folder, adapted.merge_and_unload().eval())
