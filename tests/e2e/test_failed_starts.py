"""A server that cannot start says why in one sentence, whichever process found the reason: the engine, or the server
that `penstock chat` starts. The reasons themselves are tested where they arise: tests/models/test_load.py,
tests/engine/test_device.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import PENSTOCK

pytestmark = pytest.mark.slow
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSTOCK, *arguments], capture_output=True, text=True, timeout=600, check=False)


def folder_with(folder: Path, config: str) -> str:
    (folder / "config.json").write_text(config)
    return str(folder)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one error that the command printed."""
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    return error.removeprefix("Error:").strip()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    flags = ("--load-format", "random", "--device", "cuda", "--port", "0")
    done = run("serve", folder_with(tmp_path, json.dumps(LLAMA)), *flags)
    assert "no CUDA device" in sentence(done)
    assert "Hint: Try --device auto." in done.stderr


def test_chat_shows_the_reason_and_the_hint_of_the_server_it_started(tmp_path: Path) -> None:
    done = run("chat", folder_with(tmp_path, "{"), "-m", "hello")
    assert "config.json cannot be read as JSON" in sentence(done)
    assert "Hint: Fetch the file again." in done.stderr
