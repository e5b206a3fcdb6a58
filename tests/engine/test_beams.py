"""Beam search through the API, the gateway and a real engine: the same beams and scores as transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.engine.build import Engine, build_engine
from tests.api.conftest import direct_client
from tests.engine.tiny import run
from tests.gateway.fake_engine import EOS_ID, FakeEngine, byte_tokenizer
from tests.models.checkpoints import Reference, save_random

PROMPT = list(b"What is a penstock?")
PADDING_ID = 261
MORE_ENDS = list(
    range(5, 250, 6)
)  # beside the model's own end token, which random weights hardly ever choose


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model of the fake engine's vocabulary, whose answers have an end now and then."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=byte_tokenizer().get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        made = save_random("beams", model, tmp_path_factory.mktemp("beams"))
        model.lm_head.weight *= 3.0
    model.save_pretrained(made.folder)
    return made


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(reference.folder), device="cpu", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_batched_tokens=24, max_num_seqs=8),
        speculate="off",
        num_threads=1,
    )
    return build_engine(config, reference.folder)


async def searched(engine: Engine, **fields: Any) -> dict[str, Any]:
    def script(request: Request) -> list[TokenEvent]:
        return run(engine, [request])[request.id]

    body = {"prompt": PROMPT, "use_beam_search": True, "return_token_ids": True, "logprobs": 0}
    body |= {"stop_token_ids": MORE_ENDS} | fields
    async with direct_client(FakeEngine(script)) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(reference: Reference, n: int, width: int, **settings: Any) -> list[tuple[list[int], float]]:
    output = reference.model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=n,
        pad_token_id=PADDING_ID,
        eos_token_id=[EOS_ID, *MORE_ENDS],
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    found = []
    for sequence, score in zip(output.sequences, output.get("sequences_scores", [math.nan]), strict=True):
        token_ids = sequence[len(PROMPT) :].tolist()
        while token_ids[-1] == PADDING_ID:
            del token_ids[-1]
        found.append((token_ids, float(score)))
    return found


def score_of(choice: dict[str, Any], num_tokens: int, length_penalty: float) -> float:
    return float(sum(choice["logprobs"]["token_logprobs"]) / num_tokens**length_penalty)


@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "early_stopping"),
    [
        (1, 1, 1.0, False),
        (2, 2, 1.0, False),
        (4, 3, 1.0, True),
        (4, 4, 0.0, "never"),
        (5, 5, 2.0, "never"),
        (6, 2, -1.0, False),
        (16, 16, 0.5, False),
    ],
)
async def test_the_beams_of_transformers(
    reference: Reference, engine: Engine, width: int, n: int, length_penalty: float, early_stopping: Any
) -> None:
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    wanted = expected(reference, n, width, max_new_tokens=24, **settings)
    # The end token stays in the text, so that its log-probability is among those shown.
    answer = await searched(
        engine, n=n, best_of=width, max_tokens=24, temperature=0, include_stop_str_in_output=True, **settings
    )
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [token_ids for token_ids, _ in wanted]
    scores = [score_of(choice, len(choice["token_ids"]), length_penalty) for choice in choices]
    if width > 1:  # or transformers does not search
        assert scores == pytest.approx([score for _, score in wanted], rel=1e-5)
    reasons = ["stop" if token_ids[-1] in (EOS_ID, *MORE_ENDS) else "length" for token_ids, _ in wanted]
    assert [choice["finish_reason"] for choice in choices] == reasons
    steps, rest = divmod(answer["usage"]["completion_tokens"], width)
    assert not rest
    assert max(len(token_ids) for token_ids, _ in wanted) <= steps <= 24
    engine.loop.scheduler.check_integrity()


async def test_the_least_length(reference: Reference, engine: Engine) -> None:
    wanted = expected(reference, 3, 3, max_new_tokens=12, min_new_tokens=6)
    answer = await searched(engine, n=3, max_tokens=12, min_tokens=6)
    assert len(wanted[0][0]) > 6
    assert [choice["token_ids"] for choice in answer["choices"]] == [token_ids for token_ids, _ in wanted]


async def test_a_stop_string_ends_a_beam(engine: Engine) -> None:
    fields: dict[str, Any] = {"n": 4, "max_tokens": 12, "stop_token_ids": []}
    text = (await searched(engine, **fields))["choices"][0]["text"]
    fields["stop"] = stop = next(character for character in text[1:] if character.isascii())
    kept = (await searched(engine, **fields, include_stop_str_in_output=True))["choices"]
    cut = (await searched(engine, **fields))["choices"]
    ended = [choice["text"] for choice in kept if choice["finish_reason"] == "stop"]
    assert ended
    assert all(text.endswith(stop) and text.count(stop) == 1 for text in ended)
    assert [choice["text"] for choice in cut] == [choice["text"].removesuffix(stop) for choice in kept]
    assert [choice["token_ids"] for choice in cut] == [choice["token_ids"] for choice in kept]
    later = await searched(engine, **fields, min_tokens=11)
    assert all(len(choice["token_ids"]) >= 11 for choice in later["choices"])


async def test_beams_reuse_cached_blocks(engine: Engine) -> None:
    cached: list[int] = []

    def script(request: Request) -> list[TokenEvent]:
        events = run(engine, [request])[request.id]
        known = len(request.prompt_token_ids) + len(request.output_token_ids)
        cached.append(known - (events[0].num_cached_tokens or 0))
        return events

    body = {"prompt": "x" * 40, "use_beam_search": True, "n": 2, "max_tokens": 30, "ignore_eos": True}
    async with direct_client(FakeEngine(script)) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 60
    assert cached[0] == 40
    assert max(cached[1:]) <= 2 * 16
