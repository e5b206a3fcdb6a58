"""A tiny random Llama on disk, and engines on it, so that engine tests run in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.hashing import adapter_digest
from penstock.core.plan import TokenEvent
from penstock.core.request import Adapter, CacheBreakpoint, Request, SamplingParams
from penstock.engine.build import Engine, build_engine

VOCAB_SIZE = 300
CONTEXT = 512


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,  # a tied random model only repeats its last token
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder


def write_tiny_adapter(
    folder: Path, seed: int, rank: int = 4, parts: tuple[str, ...] = ("self_attn", "mlp")
) -> Adapter:
    """A LoRA adapter of all matrices of the tiny model, or of those in some parts of a layer."""
    torch.manual_seed(seed)
    shapes = {
        **{f"self_attn.{name}_proj": (64 if name == "q" else 32, 64) for name in "qkv"},
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    shapes = {name: size for name, size in shapes.items() if name.startswith(parts)}
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(
        {
            f"base_model.model.model.layers.{layer}.{name}.lora_{letter}.weight": torch.randn(size) * 0.2
            for layer in range(2)
            for name, (height, width) in shapes.items()
            for letter, size in (("A", (rank, width)), ("B", (height, rank)))
        },
        folder / "adapter_model.safetensors",
    )
    return Adapter(name=folder.name, path=str(folder), digest=adapter_digest(folder))


def tiny_engine(model: Path, *, num_kv_blocks: int | None = 256, **settings: Any) -> Engine:
    """`settings` go to the scheduler, except those of the engine, the cache and the model themselves.
    Nothing is drafted unless a test asks for it, because the number of steps would depend on measured times."""
    engine = {"speculate": "off"} | {
        name: settings.pop(name)
        for name in ("steps_in_flight", "record_plans", "parallel", "kv_transfer", "speculate")
        if name in settings
    }
    cache = {
        name: settings.pop(name)
        for name in (
            "enable_prefix_caching",
            "max_pinned_fraction",
            "kv_host_memory",
            "kv_disk_cache",
            "kv_disk_cache_size",
            "kv_cache_memory",
            "kv_cache_dtype",
            "block_size",
        )
        if name in settings
    }
    config = EngineConfig(
        model=ModelConfig(
            model=str(model), device="cpu", dtype=settings.pop("dtype", "float32"), load_format="random"
        ),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks, **cache),
        scheduler=SchedulerConfig(**{"itl_target_ms": None, **settings}),
        num_threads=1,
        **engine,
    )
    return build_engine(config, model)


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 12,
    breakpoints: tuple[CacheBreakpoint, ...] = (),
    **sampling: Any,
) -> Request:
    settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(
        id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **settings),
        cache_breakpoints=breakpoints,
    )


def run(engine: Engine, requests: list[Request]) -> dict[str, list[TokenEvent]]:
    """Run to the end, checking every record after every step."""
    events: dict[str, list[TokenEvent]] = {}
    for each in requests:
        engine.loop.add(each)
    while engine.loop.has_work:
        for event in engine.loop.step():
            events.setdefault(event.request_id, []).append(event)
        engine.loop.scheduler.check_integrity()
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def unpacked(events: list[TokenEvent]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The log-probabilities of a prompt, and its ranks and ids. Their pieces must follow each other."""
    values, ids, position = [], [], 1
    for piece in (event.prompt_logprobs for event in events if event.prompt_logprobs is not None):
        assert piece.start == position
        position += piece.num_tokens
        shape = (piece.num_tokens, 1 + piece.num_top)
        values.append(np.frombuffer(piece.values, "<f4").reshape(shape))
        ids.append(np.frombuffer(piece.ids, "<i4").reshape(shape))
    if not values:
        return np.zeros((0, 4)), np.zeros((0, 4))
    return np.concatenate(values), np.concatenate(ids)


def teach_short_answers(engine: Engine) -> None:
    """Let the engine expect answers of one token, so that it admits more than its cache can hold to the end."""
    run(engine, [request(f"short-{n}", [3 + n, 4, 5], 1) for n in range(16)])
