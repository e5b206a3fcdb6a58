"""Prompt caching end to end: the demonstration of bench/prompt_caching.py, and the real Anthropic client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import pytest

from bench import prompt_caching as bench
from penstock.core.engine_config import ModelConfig
from penstock.simulator.replay import replay

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.e2e

SYSTEM = (
    "You answer in one word. " + "The river feeds the penstock, and the penstock feeds the turbine. " * 130
)


@pytest.fixture(scope="module")
def small_server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose cache holds 3,200 tokens, of which pins may hold 800."""
    folder = tmp_path_factory.mktemp("small")
    plans = folder / "plans.jsonl"
    settings = ("--num-kv-blocks", "200", "--max-pinned-fraction", "0.25", "--record-plans", str(plans))
    model = (str(chat_model), "--served-model-name", "tiny", "--load-format", "random")
    running = start_server(folder, *model, *settings)
    yield running
    assert running.stop() == 0
    with plans.open("rb") as lines:
        assert replay(lines).mismatch is None


@pytest.mark.slow
def test_a_kept_prompt_survives_memory_pressure_until_its_time(chat_model: Path) -> None:
    demonstration = bench.Demonstration(ModelConfig(model=str(chat_model), load_format="random"))
    try:
        first, second, pressed, late = demonstration.run()
    finally:
        demonstration.close()
    assert first.cached_tokens == first.use.read_tokens == 0
    assert sum(first.use.written_tokens) == bench.SYSTEM_TOKENS
    for call in (second, pressed):
        assert call.use.read_tokens > 0.9 * bench.SYSTEM_TOKENS
        assert sum(call.use.written_tokens) == 0
        assert call.cached_tokens >= call.use.read_tokens
    assert demonstration.num_blocks_from_host > 0, "part of it was meant to come back from host memory"
    # What was retained is an ordinary prefix now, which host memory may still hold.
    assert late.use.read_tokens == 0
    assert first.token_ids == second.token_ids == pressed.token_ids == late.token_ids


def take_the_whole_cache(server: RunningServer) -> None:
    for number in range(2):
        prompt = [number * 3000 + position for position in range(100, 2400)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        httpx.post(server.url + "/v1/completions", json=body, timeout=600).raise_for_status()


def test_the_anthropic_client_sees_reads_and_writes(small_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=small_server.url, api_key="none", max_retries=0)

    def ask(question: str, system: str = SYSTEM) -> anthropic.types.Usage:
        answer = client.messages.create(
            model="tiny",
            max_tokens=4,
            system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": question}],
        )
        return answer.usage

    first = ask("What feeds the turbine?")
    kept = first.cache_creation_input_tokens
    assert kept is not None
    assert kept >= 1024
    assert first.cache_read_input_tokens == 0
    second = ask("And what feeds the penstock, then?")
    assert second.cache_read_input_tokens == kept
    assert second.cache_creation_input_tokens == 0
    assert second.input_tokens < 0.1 * kept
    take_the_whole_cache(small_server)
    pressed = ask("And what feeds the river?")
    assert pressed.cache_read_input_tokens == kept
    metrics = httpx.get(small_server.url + "/metrics").text
    assert "penstock_kv_kept_blocks_lost_total{" in metrics
    assert 'penstock_kv_blocks_from_host_total{model_name="tiny"} 0.0' not in metrics
    changed = ask("What feeds the turbine?", "Please: " + SYSTEM)
    assert changed.cache_read_input_tokens == 0


def test_the_anthropic_client_finds_the_conversation_so_far(small_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=small_server.url, api_key="none", max_retries=0)
    turns: list[anthropic.types.MessageParam] = []
    reads, prompts = [], []
    for question in (SYSTEM + " Is that so?", "Are you sure?", "And now?"):
        turns.append({"role": "user", "content": question})
        answer = client.messages.create(
            model="tiny", max_tokens=4, messages=turns, cache_control={"type": "ephemeral"}
        )
        usage = answer.usage
        reads.append(usage.cache_read_input_tokens or 0)
        prompts.append(reads[-1] + (usage.cache_creation_input_tokens or 0) + usage.input_tokens)
        turns.append({"role": "assistant", "content": "Yes."})
    assert reads[0] == 0
    assert reads[1] > 0.9 * prompts[0]
    assert reads[2] > 0.9 * prompts[1]
