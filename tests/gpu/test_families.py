"""Every family on a GPU answers as transformers does on a CPU, in float32: alone, batched, from a cached prefix, in
chunks and preempted, with the GPU's kernels and CUDA graphs.

A token is right when transformers finds no token more likely by more than rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.engine import decoder
from penstock.engine.build import Engine
from penstock.kernels.select import select_ops
from penstock.kvcache.cache import blocks_of_context
from penstock.models.encoders.load import load_encoder
from tests.engine.test_images import PICTURES, make_case, vision_engine
from tests.engine.tiny import VOCAB_SIZE, request, run, teach_short_answers, tokens, write_tiny_model
from tests.models.checkpoints import Reference, make_reference
from tests.models.test_encoders import FAMILIES, LONG, TEXTS, run_encoder, write_encoder
from tests.models.tiny_families import PROMPTS, TINY, answers, family_engine, save_tiny
from tests.models.vision_checkpoints import CHECKPOINTS, make_vision

LENGTH = 32
# One family of each kind is served by the code of transformers too.
BY_TRANSFORMERS = ("llama", "gemma2", "phi3", "stablelm", "qwen3_moe", "olmoe")


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile only the variants that these steps need."""
    monkeypatch.setattr(decoder, "_warm_up", lambda *_: None)


def cuda_engine(folder: Path, num_blocks: int, implementation: str = "auto", **scheduling: Any) -> Engine:
    model = {"device": "cuda", "model_implementation": implementation}
    return family_engine(folder, num_blocks, model, **{"max_num_seqs": 4, **scheduling})


def check(family: Reference, made: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS, made, strict=True):
        assert len(answer) == LENGTH
        logits = family.logits(prompt + answer)[len(prompt) - 1 : -1]
        behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert behind.max() < 1e-3, (behind > 1e-3).nonzero().flatten().tolist()


def check_family(family: Reference, implementation: str = "auto") -> None:
    engine = cuda_engine(family.folder, 64, implementation)
    alone = tokens(run(engine, [request("alone", PROMPTS[0], LENGTH)])["alone"])
    check(family, [alone, tokens(run(engine, [request("other", PROMPTS[1], LENGTH)])["other"])])
    check(family, answers(engine, "together", LENGTH))
    cache, longest = engine.loop.scheduler.cache, max(map(len, PROMPTS)) + LENGTH
    num_blocks = blocks_of_context(longest, cache.block_size, cache.window_layout) + 1  # both start, one fits
    small = cuda_engine(family.folder, num_blocks, implementation, max_num_batched_tokens=13)
    teach_short_answers(small)
    check(family, answers(small, "preempted", LENGTH))
    # Requests may fit after all where windows give blocks back, or where layers keep a state instead of blocks.
    if cache.windows is None and cache.states is None:
        assert small.loop.stats().num_preemptions > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("name", TINY)
def test_a_family(name: str, tmp_path: Path) -> None:
    check_family(save_tiny(name, tmp_path))


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "mistral"])
def test_an_older_family(name: str, tmp_path: Path) -> None:
    check_family(make_reference(name, tmp_path))


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_the_code_of_transformers(name: str, tmp_path: Path) -> None:
    check_family(save_tiny(name, tmp_path), "transformers")


def test_sixteen_bits_pass_the_probe_of_many_layers(tmp_path: Path) -> None:
    """Few rows and many rows are rounded in other ways."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
    folder = write_tiny_model(tmp_path / "tiny", num_hidden_layers=32, **sizes)
    model = {"device": "cuda", "dtype": "bfloat16", "model_implementation": "transformers"}
    engine = family_engine(folder, 64, {**model, "load_format": "random"})
    prompt = [token % VOCAB_SIZE for token in PROMPTS[0]]
    assert len(tokens(run(engine, [request("alone", prompt, LENGTH)])["alone"])) == LENGTH


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_images(name: str, tmp_path: Path) -> None:
    model = make_vision(name, tmp_path / name)
    case = make_case(model, vision_engine(model, device="cuda", max_num_seqs=4))
    assert case.answers_of(case.engine) == case.answers
    assert case.answers_of(case.engine) == case.answers  # from the prefix cache
    assert case.engine.loop.stats().num_images_encoded == len(PICTURES)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_encoder(name: str, tmp_path: Path) -> None:
    theirs = write_encoder(name, tmp_path, "Model")
    ours = load_encoder(tmp_path, select_ops("cuda", torch.float32)).model
    texts = [*TEXTS, LONG]
    with torch.inference_mode():
        for text, states in zip(texts, ours.hidden_states(texts), strict=True):
            expected = run_encoder(theirs, text).last_hidden_state[0]
            torch.testing.assert_close(states.cpu(), expected, atol=5e-4, rtol=1e-3)
