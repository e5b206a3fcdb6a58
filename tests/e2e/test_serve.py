"""The real server with the real model, as a user meets it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def metric(server: RunningServer, name: str) -> float:
    text = httpx.get(server.url + "/metrics").text
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{")]
    assert values, f"{name} is not among the metrics"
    return sum(values)


def wait_until_none(server: RunningServer, *names: str) -> None:
    """Until these metrics are 0; the engine reports ten times a second."""
    deadline = time.monotonic() + 240
    while any((values := {name: metric(server, name) for name in names}).values()):
        assert time.monotonic() < deadline, values
        time.sleep(0.1)


def wait_until_idle(server: RunningServer) -> None:
    wait_until_none(server, "vllm:num_requests_running", "vllm:num_requests_waiting")


def test_streaming_chat_answers_paris(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 4, "the answer came in one piece"
    assert chunks[-1].usage.prompt_tokens > 10
    assert 0 < chunks[-1].usage.completion_tokens <= 32


def test_whole_answer_equals_streamed_answer(client: openai.OpenAI) -> None:
    settings = {"model": "smollm2-135m", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**settings)
    streamed = client.chat.completions.create(**settings, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert whole.choices[0].message.content == text


def test_a_repeated_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Repeat after me: " + "penstock feeds the turbine " * 20}]
    for _ in range(2):
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 64


def test_seeded_samples_repeat_and_differ_by_seed(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.chat.completions.create(
            model="smollm2-135m", messages=QUESTION, temperature=1.0, seed=seed, max_tokens=12
        )
        return answer.choices[0].message.content

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(3)}) > 1


async def test_answers_do_not_depend_on_who_shares_the_batch(server: RunningServer) -> None:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    prompts = [f"Here is a story about the number {n}:" for n in range(8)]

    async def complete(prompt: str) -> str:
        answer = await client.completions.create(
            model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=12
        )
        return answer.choices[0].text

    alone = [await complete(prompt) for prompt in prompts]
    together = await asyncio.gather(*map(complete, prompts))
    assert together == alone


def test_a_client_that_leaves_frees_its_place(server: RunningServer) -> None:
    wait_until_idle(server)
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    wait_until_idle(server)
    wait_until_none(server, "vllm:kv_cache_usage_perc")  # a step in flight holds its blocks until its end


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2-135m", prompt="1 2 3 4 5 6", temperature=0, max_tokens=40, stop=["9"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "9" not in answer.choices[0].text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [10**9], "max_tokens": 2}, 400),
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": [5] * 20_000, "max_tokens": 2}, 400),
        ({"prompt": "x", "temperature": "hot"}, 400),
        ({"prompt": "x", "model": "no-such-model"}, 404),
    ],
)
def test_bad_requests_are_refused_and_the_server_goes_on(
    server: RunningServer, client: openai.OpenAI, body: dict[str, object], status: int
) -> None:
    answer = httpx.post(server.url + "/v1/completions", json={"model": "smollm2-135m", **body}, timeout=60)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.completions.create(model="smollm2-135m", prompt="x", max_tokens=1).choices


@pytest.fixture(scope="module")
def mortal_server(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for the last tests of this module, which kill its engine and then end it."""
    running = start_server(tmp_path_factory.mktemp("mortal"), default_model)
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0


def test_a_stream_outlives_its_engine(default_model: str, mortal_server: RunningServer) -> None:
    """There is only one: the stream waits for its successor, and goes on where it was."""
    server = mortal_server
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    engine = next(
        int(pid) for pid in children if b"cluster.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    body = {"model": default_model, "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    undisturbed = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    parts = []
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if not parts:
                    os.kill(engine, signal.SIGKILL)
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    assert line == "data: [DONE]" or not line
    assert "".join(parts) == undisturbed["choices"][0]["text"]


def test_sigterm_drains_running_streams(default_model: str, mortal_server: RunningServer) -> None:
    server = mortal_server
    body = {"model": default_model, "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(server.url + "/health", timeout=60).status_code != 503:
            time.sleep(0.02)
        refused = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert server.process.wait(timeout=240) == 0
