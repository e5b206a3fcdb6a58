"""LoRA adapters on a CUDA device: kernels, and a whole engine with its graphs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.core.hashing import adapter_digest
from penstock.core.request import Adapter
from penstock.engine.build import Engine, build_engine
from penstock.engine.executor import ModelExecutor
from penstock.kernels.select import select_ops
from tests.engine.tiny import VOCAB_SIZE, request, run, tokens, write_tiny_model
from tests.kernels.adapted_case import Case

RANKS = [(16, 16, 16), (4, 0, 20), (0, 7, 0), (96, 80, 16)]
MOST = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_a_batch_of_adapters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Case(select_ops("cuda", dtype), RANKS)
    draw = random.Random(0)
    for num_rows in (1, 5, 32, 300, 700):
        slots = [draw.randrange(-1, len(RANKS)) for _ in range(num_rows)]
        assert case.worst_error(slots) < MOST[dtype], num_rows
        assert case.worst_error([1] * num_rows) < MOST[dtype], num_rows


HIDDEN, INNER, LAYERS = 128, 192, 3
SHAPES = {
    "self_attn.q_proj": (128, HIDDEN),
    "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 128),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MODULES = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in SHAPES]


def shape_of(module: str) -> tuple[int, int]:
    return SHAPES[module.split(".", 3)[3]]


def write_model(folder: Path, weights: dict[str, Tensor]) -> Path:
    write_tiny_model(
        folder,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    save_file(weights, folder / "model.safetensors")
    return folder


def random_weights() -> dict[str, Tensor]:
    weights = {f"{module}.weight": torch.randn(shape_of(module)) * 0.1 for module in MODULES}
    weights |= {
        name: torch.randn(VOCAB_SIZE, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.rand(HIDDEN) + 0.5
    return weights | {"model.norm.weight": torch.ones(HIDDEN)}


def write_adapter(folder: Path, rank: int, weights: dict[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
    """An adapter of all matrices, and the weights with it merged in."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    pairs, merged = {}, dict(weights)
    for module in MODULES:
        height, width = shape_of(module)
        left, right = torch.randn(rank, width) / width**0.5, torch.randn(height, rank) * 0.1 / rank**0.5
        pairs |= {
            f"base_model.model.{module}.lora_A.weight": left,
            f"base_model.model.{module}.lora_B.weight": right,
        }
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + 2 * right @ left
    save_file(pairs, folder / "adapter_model.safetensors")
    return Adapter(folder.name, str(folder), adapter_digest(folder)), merged


def engine_on(device: str, folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device=device, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(
            itl_target_ms=None, max_num_batched_tokens=256, max_num_seqs=32, **settings
        ),
        lora=LoRAConfig(max_loras=3, max_lora_rank=64),
        speculate="off",
    )
    return build_engine(config, folder)


def test_an_engine_answers_as_merged_models_do(tmp_path: Path) -> None:
    """Prompts in pieces, and decodes beside prompts, with graphs. Four adapters take turns in three slots."""
    torch.manual_seed(1)
    weights = random_weights()
    folder = write_model(tmp_path / "model", weights)
    adapters: list[Adapter | None] = [None]
    models = [folder]
    for number, rank in enumerate((4, 16, 40, 16)):
        adapter, merged = write_adapter(tmp_path / f"adapter{number}", rank, weights)
        adapters.append(adapter)
        models.append(write_model(tmp_path / f"merged{number}", merged))
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(3, 60))] for _ in range(15)]
    engine = engine_on("cuda", folder)
    asked = [
        msgspec.structs.replace(request(f"{n}", prompt, 24), adapter=adapters[n % 5])
        for n, prompt in enumerate(prompts)
    ]
    given = run(engine, asked)
    for index, model in enumerate(models):
        alone = engine_on("cpu", model)
        plain = [msgspec.structs.replace(each, adapter=None) for each in asked[index::5]]
        expected = run(alone, plain)
        for each in plain:
            assert tokens(given[each.id]) == tokens(expected[each.id]), each.id
        alone.close()
    executor = engine.loop.executor
    assert isinstance(executor, ModelExecutor)
    assert executor.forward._graphs is not None
    versions = {version for *_, version in executor.forward._graphs._captured}
    assert versions - {None}
    before = set(executor.forward._graphs._captured)
    run(engine, [request("plain", prompts[0], 4)])  # has a graph of its own, without adapters
    assert all(version is None for *_, version in set(executor.forward._graphs._captured) - before)
    engine.close()
