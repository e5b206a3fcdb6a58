"""Drafts seen by clients: the same answers through the API, the gateway and a real engine, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.gateway_config import GatewayConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.engine.build import Engine
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.gateway.gateway import Gateway
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import EOS_ID, FakeEngine, byte_tokenizer

from .drafting import num_accepted, speculate
from .tiny import run, tiny_engine, write_tiny_model

PROMPT = "one two three one two three one two three one two"
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "repeated": {"temperature": 0, "logit_bias": {"110": 30, "111": 30.5}, "max_tokens": 70},
    "several": {"temperature": 0.8, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2},
    "stopped": {"temperature": 0, "logit_bias": {"110": 30, "111": 30}, "frequency_penalty": 0.3, "stop": ["nono"]},
    "penalised": {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.9, "top_p": 0.9, "logprobs": True},
    "cut": {"temperature": 1.2, "seed": 6, "top_k": 5, "min_p": 0.05, "min_tokens": 9, "stop_token_ids": [97, 105]},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the fake engine's vocabulary."""
    vocab_size = byte_tokenizer().get_vocab_size()
    return write_tiny_model(
        tmp_path_factory.mktemp("api") / "tiny", vocab_size=vocab_size, eos_token_id=EOS_ID
    )


async def ask(engine: Engine, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers without their ids and times."""

    def script(request: Request) -> list[TokenEvent]:
        return run(engine, [request])[request.id]

    fake = FakeEngine(script)
    found = []
    async with direct_client(fake, Gateway(fake, GatewayConfig())) as client:
        for body in bodies:
            messages = [{"role": "user", "content": PROMPT}]
            answer = await client.post(
                "/v1/chat/completions",
                json={"messages": messages, "max_tokens": 40, "model": "bytes", "ignore_eos": True} | body,
            )
            assert answer.status_code == 200, answer.text
            found.append({key: answer.json()[key] for key in ("choices", "usage")})
    return found


async def test_answers_and_usage_are_those_without_drafts(model: Path) -> None:
    expected = await ask(tiny_engine(model), list(BODIES.values()))
    engine = speculate(tiny_engine(model), LookupDrafter(), 8)
    assert await ask(engine, list(BODIES.values())) == expected
    assert num_accepted(engine) > 40
    stopped = expected[list(BODIES).index("stopped")]["choices"][0]
    assert stopped["finish_reason"] == "stop"


async def test_a_prediction_is_counted_and_changes_nothing_else(model: Path) -> None:
    body = {"temperature": 0.8, "seed": 3}
    (plain,) = await ask(tiny_engine(model), [body])
    text = plain["choices"][0]["message"]["content"]
    for prediction in (text, "another answer than the model's"):
        engine = speculate(tiny_engine(model), LookupDrafter(), 8)
        (answer,) = await ask(engine, [body | {"prediction": {"type": "content", "content": prediction}}])
        assert answer["choices"] == plain["choices"]
        details = answer["usage"].pop("completion_tokens_details")
        assert answer["usage"].items() <= plain["usage"].items(), "no draft is billed"
        assert (details["accepted_prediction_tokens"] > 0) == (prediction == text)
