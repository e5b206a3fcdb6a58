"""Several names on one real server: the default model with LoRA adapters, another model, an alias, `auto`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Of the default model: inputs of its queries, and outputs.
HIDDEN_SIZE, NUM_LAYERS, RANK = 576, 30, 4


def write_adapter(folder: Path, *, seed: int, strength: float) -> Path:
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN_SIZE) * HIDDEN_SIZE**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN_SIZE, RANK) * strength
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(default_model: str, folder: Path) -> Iterator[RunningServer]:
    nothing = write_adapter(folder / "nothing", seed=1, strength=0.0)
    settings = folder / "settings.toml"
    settings.write_text(
        '[models.aliases]\ngpt-4o-mini = "smollm2-135m"\n\n[models.auto]\nsmall = "echo"\nlarge = "smollm2-135m"\n'
    )
    running = start_server(
        folder,
        default_model,
        *("--also-serve", "echo", "--lora-modules", f"nothing={nothing}"),
        *("--settings", str(settings), "--data-dir", str(folder / "data"), "--kv-cache-memory", "64MiB"),
    )
    yield running
    assert running.stop() == 0


def ask(server: RunningServer, model: str) -> tuple[str, str | None]:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    return answer.model, answer.choices[0].message.content


def test_every_name_is_answered_by_its_model(server: RunningServer) -> None:
    listed = [entry["id"] for entry in httpx.get(server.url + "/v1/models").json()["data"]]
    assert listed == ["smollm2-135m", "echo", "nothing", "gpt-4o-mini", "auto"]
    model, text = ask(server, "smollm2-135m")
    assert (model, text) == ("smollm2-135m", "The capital of France is Paris.")
    assert ask(server, "gpt-4o-mini") == (model, text)
    assert ask(server, "nothing") == ("nothing", text)  # an adapter that changes nothing
    assert ask(server, "echo") == ("echo", "What is the ")
    assert ask(server, "auto")[0] == "echo"


async def test_adapters_come_and_go_while_others_are_served(server: RunningServer, folder: Path) -> None:
    """Of several requests that run together, each gets the weights that it asked for."""
    strong = write_adapter(folder / "strong", seed=2, strength=0.5)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"lora_name": "strong", "lora_path": str(strong)}
        (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()

        async def answer(model: str) -> str:
            body = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
            made = await client.post("/v1/chat/completions", json=body)
            return str(made.raise_for_status().json()["choices"][0]["message"]["content"])

        names = ["smollm2-135m", "strong", "nothing"]
        alone = [await answer(name) for name in names]
        assert alone[0] == alone[2] != alone[1]
        assert await asyncio.gather(*(answer(name) for name in names * 4)) == alone * 4
        (await client.delete("/admin/adapters/strong")).raise_for_status()
        gone = await client.post("/v1/completions", json={"model": "strong", "prompt": "x"})
        assert gone.status_code == 404
