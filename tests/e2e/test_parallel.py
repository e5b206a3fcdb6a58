"""The real server with a model on two ranks, one of which is killed in mid-stream."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import RunningServer, start_server

pytestmark = pytest.mark.e2e

QUESTION = {
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "temperature": 0,
    "max_tokens": 80,
    "ignore_eos": True,
    "stream": True,
}


def ranks(server: RunningServer) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "penstock.engine.parallel.rank" in child.cmdline()]


def ask(server: RunningServer, kill_after_chunks: int | None = None) -> str:
    text, num_chunks = "", 0
    body = {"model": "tiny", **QUESTION}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content") or ""
            num_chunks += 1
            if num_chunks == kill_after_chunks:
                (rank,) = ranks(server)
                rank.kill()
    assert choice["finish_reason"] == "length"
    return text


def test_a_stream_survives_the_death_of_a_rank(chat_model: Path, tmp_path: Path) -> None:
    model = (str(chat_model), "--served-model-name", "tiny", "--load-format", "random", "--dtype", "float32")
    server = start_server(tmp_path, *model, "--tensor-parallel-size", "2")
    try:
        (first_rank,) = ranks(server)
        disturbed = ask(server, kill_after_chunks=10)
        assert not first_rank.is_running()
        assert re.search(r"Rank 1 of 2 .* ended by signal 9", server.log.read_text())
        assert disturbed == ask(server)
        left = ranks(server)
    finally:
        assert server.stop() == 0
    assert not any(rank.is_running() for rank in left)
