"""One real server with the real default model, shared by the end-to-end tests; fetched once and cached."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from penstock.cli.console import fetch_model
from penstock.models.load import load_tokenizer
from penstock.simulator.replay import replay
from tests.engine.tiny import write_tiny_model

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class RunningServer:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for_log(self, text: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.log.read_text(errors="replace"):
            assert time.monotonic() < deadline, f"{text!r} is not in the log"
            time.sleep(0.02)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def start_server(folder: Path, *arguments: str) -> RunningServer:
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PENSTOCK, "serve", *arguments, "--port", "0"], stdout=output, stderr=subprocess.STDOUT
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for word in log.read_text(errors="replace").split():
            if word.startswith("http://127.0.0.1:"):
                return RunningServer(word.rstrip("/.,"), process, log)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')}")


@pytest.fixture(scope="session")
def default_model() -> str:
    """The name of the default model, once it is in the cache."""
    subprocess.run([PENSTOCK, "pull", "smollm2-135m"], check=True, timeout=600)
    return "smollm2-135m"


def write_chat_model(folder: Path, context: int) -> Path:
    """Write random weights with the tokenizer and the template of the default model, for prompts of any size."""
    tokenizer = load_tokenizer(fetch_model("smollm2-135m"))
    assert tokenizer is not None
    write_tiny_model(
        folder,
        vocab_size=49_152,
        max_position_embeddings=context,
        rope_theta=1e6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"), context=8192)


@pytest.fixture(scope="session")
def server(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    plans = folder / "plans.jsonl"
    running = start_server(folder, default_model, "--record-plans", str(plans))
    httpx.get(running.url + "/health", timeout=60).raise_for_status()
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0
    # All that the tests did to the real engine, fed to a fresh scheduler: the same plans must come out.
    with plans.open("rb") as lines:
        replayed = replay(lines)
    assert replayed.num_plans > 0
    assert replayed.mismatch is None
