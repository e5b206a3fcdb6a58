"""Layers with windows keep what they see, and no more: the layout of layers, and real engines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.plan import WindowGroup
from penstock.engine.build import Engine
from penstock.engine.windows import LayerLayout, lay_out
from penstock.models.model import LayerWindow
from penstock.simulator.replay import replay
from tests.engine.tiny import VOCAB_SIZE, request, run, tiny_engine, tokens, write_tiny_model

GEMMA3_27B = [None if (index + 1) % 6 == 0 else LayerWindow(1024) for index in range(62)]
GPT_OSS = [None if index % 2 else LayerWindow(128) for index in range(24)]
LLAMA4 = [None if index % 4 == 3 else LayerWindow(8192, in_chunks=True) for index in range(48)]


def shrinks_to(layout: LayerLayout | None, num_layers: int, context: int) -> float:
    """The memory of a context, relative to that of layers which keep everything."""
    assert layout is not None
    whole = 0 if layout.all_have_windows else layout.num_layers * context
    windows = sum(group.num_parts * min(context, group.window + 32) for group in layout.groups)
    return (whole + layout.num_layers * windows) / (num_layers * context)


@pytest.mark.parametrize(
    ("windows", "context", "groups", "most"),
    [
        (GEMMA3_27B, 32_768, (WindowGroup(1024, 5),), 0.21),
        (GPT_OSS, 131_072, (WindowGroup(128, 1),), 0.51),
        (LLAMA4, 131_072, (WindowGroup(8192, 3, in_chunks=True),), 0.3),
        ([LayerWindow(2048)] * 32, 16_384, (WindowGroup(2048, 1),), 0.13),
        ([LayerWindow(8), LayerWindow(64), None], 512, (WindowGroup(8, 1), WindowGroup(64, 1)), 0.5),
    ],
    ids=["gemma 3 27b", "gpt-oss 20b", "llama 4", "all windows", "two windows"],
)
def test_the_memory_of_a_long_context_shrinks(
    windows: list[LayerWindow | None], context: int, groups: tuple[WindowGroup, ...], most: float
) -> None:
    layout = lay_out(windows, context, 16)
    assert shrinks_to(layout, len(windows), context) <= most
    assert layout is not None
    assert layout.groups == groups
    places = list(zip(layout.part_of_layer, layout.place_of_layer, strict=True))
    assert len(set(places)) == len(windows), "no two layers share memory"
    assert max(layout.place_of_layer) < layout.num_layers
    short = layout.num_layers * (layout.num_parts + (not layout.all_have_windows))
    assert short <= 1.25 * len(windows), "short contexts need little more than before"


@pytest.mark.parametrize(
    ("windows", "context"),
    [
        ([None] * 8, 4096),
        ([LayerWindow(4096)] * 8, 4096),
        ([LayerWindow(128), *[None] * 20], 4096),
    ],
    ids=["no windows", "wide windows", "few layers"],
)
def test_layers_stay_together_where_windows_save_nothing(
    windows: list[LayerWindow | None], context: int
) -> None:
    assert lay_out(windows, context, 16) is None


def test_chunks_that_blocks_do_not_fill_are_refused_unless_the_context_is_one_chunk() -> None:
    chunks = [LayerWindow(100, in_chunks=True)] * 4
    assert lay_out(chunks, 100, 16) is None
    with pytest.raises(ConfigError, match="chunks of 100 tokens, which blocks of 16 do not fill"):
        lay_out(chunks, 4096, 16)


MIXED = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
ALL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
rng = random.Random(3)
PROMPTS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (150, 40, 220, 90)]
REQUESTS = [request(f"{n}", prompt, 70) for n, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=[MIXED, ALL], ids=["mixed", "all windows"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("windows"), **request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """What an engine says whose layers keep everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.cache_memory.lay_out", lambda *_: None)
        engine = tiny_engine(model)
        assert engine.loop.scheduler.cache.windows is None
        return answers(engine)


def answers(engine: Engine) -> dict[str, list[int]]:
    return {name: tokens(events) for name, events in run(engine, REQUESTS).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 37, "steps_in_flight": 2},
        {"max_num_batched_tokens": 64, "num_kv_blocks": 42, "max_num_seqs": 3},
        {"speculate": "lookup", "max_draft_tokens": 6},
        {"kv_cache_dtype": "auto", "enable_prefix_caching": False},
    ],
    ids=["chunks", "little memory", "drafts", "no prefixes"],
)
def test_an_engine_that_gives_blocks_back_says_the_same(
    model: Path, expected: dict[str, list[int]], settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = tiny_engine(model, record_plans=str(tmp_path / "plans"), **settings)
    cache = engine.loop.scheduler.cache
    assert cache.windows is not None
    assert answers(engine) == expected
    again = [request(f"again {each.id}", list(each.prompt_token_ids), 70) for each in REQUESTS]
    repeated = run(engine, again)
    assert {name.removeprefix("again "): tokens(events) for name, events in repeated.items()} == expected
    if cache.enable_prefix_caching and not settings.get("num_kv_blocks"):
        assert min(events[0].num_cached_tokens or 0 for events in repeated.values()) >= 32
    engine.loop.scheduler.check_integrity()
    engine.close()
    with (tmp_path / "plans").open("rb") as log:
        result = replay(log)
    assert result.mismatch is None
    assert result.num_plans > 50


def test_more_contexts_fit_than_without_windows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": None, "kv_cache_memory": "1MiB"}
    ready = tiny_engine(model, **settings).ready
    monkeypatch.setattr("penstock.engine.cache_memory.lay_out", lambda *_: None)
    whole = tiny_engine(model, **settings).ready
    assert ready.num_contexts > 2.5 * whole.num_contexts
