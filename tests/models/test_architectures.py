"""Every architecture gives what transformers gives, however its tokens are cut up, paged and batched."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import Ops
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model
from tests.models.checkpoints import Reference
from tests.models.conftest import available_ops, random_prompt
from tests.models.paged import BLOCK_SIZE, PagedRunner, Sequence

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture
def runner(reference: Reference, ops: Ops) -> PagedRunner:
    return PagedRunner(load_model(reference.folder, ops), ops)


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 16, 25])
def test_prompts_whole_and_in_chunks(
    reference: Reference, runner: PagedRunner, chunk_size: int | None
) -> None:
    prompt = random_prompt(50, seed=1)
    expected = reference.logits(prompt)
    torch.testing.assert_close(runner.prompt_logits(prompt, chunk_size), expected, **TOLERANCE)


def test_a_cached_prefix_serves_a_second_request(reference: Reference, runner: PagedRunner) -> None:
    prefix = random_prompt(2 * BLOCK_SIZE, seed=2)
    first = Sequence()
    runner.step([(first, prefix + random_prompt(5, seed=3))])
    second = Sequence(block_ids=first.block_ids[:2], num_computed=len(prefix))
    rest = random_prompt(20, seed=4)
    (logits,) = runner.step([(second, rest)])
    torch.testing.assert_close(logits, reference.logits(prefix + rest)[len(prefix) :], **TOLERANCE)


def test_a_batch_of_prompts_and_single_tokens(reference: Reference, runner: PagedRunner) -> None:
    prompts = [random_prompt(length, seed=length) for length in (40, 3, 17, 29)]
    computed = [39, 2, 0, 11]
    sequences = [Sequence() for _ in prompts]
    for sequence, prompt, count in zip(sequences, prompts, computed, strict=True):
        if count:
            runner.step([(sequence, prompt[:count])])
    chunks = [
        (sequence, prompt[count:])
        for sequence, prompt, count in zip(sequences, prompts, computed, strict=True)
    ]
    for logits, prompt, count in zip(runner.step(chunks), prompts, computed, strict=True):
        torch.testing.assert_close(logits, reference.logits(prompt)[count:], **TOLERANCE)


def test_the_same_greedy_tokens(reference: Reference, runner: PagedRunner) -> None:
    prompt = random_prompt(21, seed=5)
    assert runner.greedy(prompt, 24) == reference.greedy(prompt, 24)


@pytest.mark.parametrize("backend", available_ops(torch.bfloat16), ids=lambda ops: ops.name)
def test_bfloat16_stays_close(reference: Reference, backend: Ops) -> None:
    prompt = random_prompt(40, seed=6)
    model = load_model(reference.folder, backend)
    logits = PagedRunner(model, backend).prompt_logits(prompt)
    expected = reference.logits(prompt)
    assert logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(logits, expected, dim=1)
    # A token near a tie between experts may take the other one.
    assert (similarity > 0.99).float().mean() >= (0.95 if model.config.experts else 1.0)
    assert similarity.min() > 0.9


def test_the_model_describes_itself(reference: Reference, ops: Ops) -> None:
    model = load_model(reference.folder, ops)
    config = reference.model.config
    assert model.num_parameters == reference.model.num_parameters()
    assert model.weight_bytes >= 4 * model.num_parameters
    assert model.num_layers == config.num_hidden_layers
    assert model.num_kv_heads == config.num_key_value_heads
    assert model.config.vocab_size == config.vocab_size
    assert model.max_model_len == 256


def test_one_layer_of_each_kind(reference: Reference) -> None:
    """By the backend that lays weights out as they come."""
    model = load_model(reference.folder, TorchOps("cpu", torch.float32))
    config = model.config
    dense = config.experts.dense_layers if config.experts else frozenset()
    kinds = {(window, index in dense) for index, window in enumerate(config.windows)}
    few = model.with_distinct_layers()
    assert few.num_layers == len(kinds)
    assert model.num_layers == reference.model.config.num_hidden_layers
    PagedRunner(few, TorchOps("cpu", torch.float32)).prompt_logits([5, 6, 7])
