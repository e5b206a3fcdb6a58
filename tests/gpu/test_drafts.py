"""On a GPU drafts change no answer, whether steps come from CUDA graphs or are launched piece by piece."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.core.request import Request
from penstock.engine.build import Engine, build_engine
from penstock.engine.drafters.choice import DraftChoice
from penstock.engine.drafters.length import DraftLength
from tests.engine.drafting import KnowingDrafter, answers, num_accepted, num_late, speculate
from tests.engine.tiny import VOCAB_SIZE, request, write_tiny_model
from tests.engine.trees import KnowingTrees, drafter_of
from tests.models.heads import eagle_tensors, write_folder

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}


def engine_of(folder: Path, named: str = "off", **changes: Any) -> Engine:
    model = write_tiny_model(folder / "tiny", **SIZES)
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=1024, **changes),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=16),
        speculate=named.replace("MODEL", str(model)),
    )
    return build_engine(config, model)


def questions() -> list[Request]:
    rng = random.Random(5)
    settings = (
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40, "logprobs": 2},
        {"temperature": 1.0, "seed": 5, "min_p": 0.02, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {7: 1.5}, "frequency_penalty": 0.3},
    )
    return [
        request(f"r{n}", [rng.randrange(3, VOCAB_SIZE) for _ in range(5 + 11 * n)], 60, **settings[n % 5])
        for n in range(10)
    ]


@pytest.mark.parametrize(
    ("num_requests", "spoiled", "kv_cache_dtype"),
    [
        *((count, spoiled, "auto") for count in (1, 10) for spoiled in (0.0, 0.3, 1.0)),
        *((10, 0.3, dtype) for dtype in ("fp8", "int8")),
    ],
)
def test_answers_are_the_same(tmp_path: Path, num_requests: int, spoiled: float, kv_cache_dtype: str) -> None:
    asked = questions()[:num_requests]
    plain_engine = engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype)
    plain = answers(plain_engine, asked)
    plain_engine.close()
    engine = engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype)
    right = {request_id: found[0] for request_id, found in plain.items()}
    late = num_late(speculate(engine, KnowingDrafter(right, spoiled)))
    drafted = answers(engine, asked)
    accepted = num_accepted(engine)
    engine.close()
    assert {name: found[0] for name, found in drafted.items()} == right
    assert bool(accepted) == (spoiled < 1.0)
    assert late[0] > 0, "steps are planned while drafts are in flight"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("num_requests", "kv_cache_dtype", "spoiled"),
    [
        *((count, "auto", spoiled) for count in (1, 5) for spoiled in (None, 0.2)),
        (5, "fp8", 0.2),
        (5, "int8", 0.2),
    ],
)
def test_trees_change_no_answer(
    tmp_path: Path,
    num_requests: int,
    kv_cache_dtype: str,
    spoiled: float | None,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `spoiled`, trees have the tokens of known answers; else a random head grows them."""
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 4)
    monkeypatch.setattr(DraftChoice, "_next", lambda self, *_: True)
    monkeypatch.setattr("tests.models.heads.SIZE", SIZES["hidden_size"])
    rng = random.Random(5)
    asked = [
        request(
            f"r{n}",
            [rng.randrange(3, VOCAB_SIZE) for _ in range(5 + 11 * n)],
            60,
            temperature=temperature,
            seed=n,
        )
        for n in range(num_requests)
    ]
    plain_engine = engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype)
    plain = {name: found[0] for name, found in answers(plain_engine, asked).items()}
    plain_engine.close()
    head = write_folder(
        tmp_path / "head",
        eagle_tensors(VOCAB_SIZE, third=False, draft_vocab=100),
        VOCAB_SIZE,
        hidden_size=SIZES["hidden_size"],
    )
    engine = engine_of(tmp_path, f"heads={head}", kv_cache_dtype=kv_cache_dtype)
    assert engine.loop.drafter is not None
    if spoiled is not None:
        texts = {each.id: [*each.prompt_token_ids, *plain[each.id]] for each in asked}
        drafter_of(engine)._trees = KnowingTrees(texts, spoiled, monkeypatch)
    drafted = answers(speculate(engine, engine.loop.drafter, 8), asked)
    (stats,) = (each for each in engine.loop.stats().drafters if each.drafter != "grammar")
    engine.close()
    assert {name: found[0] for name, found in drafted.items()} == plain
    assert stats.drafted[0] > 10
    assert len(stats.drafted) <= 4
    if spoiled is not None:
        assert sum(stats.accepted) > 25 * num_requests


@pytest.mark.parametrize("kind", ["draft", "eagle", "eagle3"])
def test_drafts_behind_steps_change_no_answer(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 4)
    asked, size = questions(), SIZES["hidden_size"]
    plain_engine = engine_of(tmp_path)
    plain = {name: found[0] for name, found in answers(plain_engine, asked).items()}
    plain_engine.close()
    named = "draft=MODEL"
    if kind != "draft":
        monkeypatch.setattr("tests.models.heads.SIZE", size)
        tensors = eagle_tensors(VOCAB_SIZE, third=kind == "eagle3", draft_vocab=100)
        folder = write_folder(
            tmp_path / "head",
            tensors,
            VOCAB_SIZE,
            hidden_size=size,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        )
        named = f"heads={folder}"
    engine = engine_of(tmp_path, named)
    drafter = engine.loop.drafter
    assert drafter is not None
    drafted = answers(speculate(engine, drafter), asked)
    (stats,) = (each for each in engine.loop.stats().drafters if each.drafter != "grammar")
    engine.close()
    assert {name: found[0] for name, found in drafted.items()} == plain
    assert stats.drafted[0] > 100
    if kind == "draft":
        greedy = [name for name in plain if name in ("r0", "r5")]
        assert sum(stats.accepted) > 40 * len(greedy)
