"""The bench of trees against chains: guesses agree with the head as it is served, and walks and costs add up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.draft_costs import NOTHING, Costs, Shape, Stopwatch, between, shapes
from bench.tree_head import Guesses, TreeHead
from bench.trees import Walks, show_costs, show_shapes, show_verdicts, steps_of, times, walk
from penstock.core.engine_config import EngineConfig, ModelConfig
from penstock.core.errors import ConfigError
from penstock.engine.learning.training import load_target
from penstock.models.drafters.heads import Target
from tests.engine.tiny import VOCAB_SIZE, write_tiny_model
from tests.models.heads import eagle_tensors, write_folder
from tests.models.test_heads import medusa_tensors, one_text

DRAFT_VOCAB, PROMPT_LEN, LENGTH = 12, 4, 20
DRAFT_IDS = sorted(random.Random(3).sample(range(3, VOCAB_SIZE), DRAFT_VOCAB))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    model = write_tiny_model(tmp_path_factory.mktemp("trees") / "model")
    settings = ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random")
    return load_target(EngineConfig(model=settings, num_threads=1), model)


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> TreeHead:
    tensors = eagle_tensors(VOCAB_SIZE, third=False)
    tensors["d2t"] = torch.tensor(DRAFT_IDS) - torch.arange(DRAFT_VOCAB)
    return TreeHead(write_folder(tmp_path_factory.mktemp("heads"), tensors, VOCAB_SIZE), target, 64)


@pytest.fixture(scope="module")
def text() -> list[int]:
    rng = random.Random(4)
    return [rng.choice(DRAFT_IDS) for _ in range(LENGTH)]


def served(head: TreeHead, text: list[int], drafted: list[int]) -> torch.Tensor:
    """The log-probabilities of the head's tokens behind a text and drafts, one pass of the whole for each draft, as
    an engine's head computes them."""
    target, eagle = head.lesson.target, head.served
    _, hidden = head.lesson.states(torch.tensor([text], dtype=torch.int32))
    features, tokens = hidden[0, :-1], torch.tensor(text[1:] + drafted, dtype=torch.int32)
    for count in range(len(text) - 1, len(text) + len(drafted)):
        kv = target.ops.allocate_kv(1, 4, 16, eagle.num_kv_heads, eagle.head_dim)
        made = eagle.forward(tokens[:count], features, one_text(count), kv)
        features = torch.cat([features, made[-1:]])
    return target.model.logits(made[-1:])[0, DRAFT_IDS].log_softmax(dim=0)


def test_a_tree_of_one_child_per_guess_is_the_chain_that_the_served_head_drafts(
    head: TreeHead, text: list[int]
) -> None:
    text, depth = list(text), 3
    for position in (9, 12, 13, 14):  # a text that chains can follow, sometimes
        text[position] = DRAFT_IDS[int(served(head, text[:position], []).argmax())]
    guesses = head.guess(text, PROMPT_LEN, 1, depth)
    assert guesses.scores.shape == (LENGTH - PROMPT_LEN - 1, depth)
    wanted = []
    for newest in range(PROMPT_LEN, LENGTH - 1):
        drafted: list[int] = []
        for _ in range(depth):
            drafted.append(DRAFT_IDS[int(served(head, text[: newest + 1], drafted).argmax())])
        truth = text[newest + 1 : newest + 1 + depth]
        pairs = enumerate(zip(drafted, truth, strict=False))
        wanted.append(next((at for at, (a, b) in pairs if a != b), len(truth)))
    assert guesses.accepted(Shape(1, depth, depth)) == wanted
    assert max(wanted) >= 1
    assert guesses.accepted(Shape(1, 1, 1)) == [min(each, 1) for each in wanted]


def test_the_score_of_a_guess_is_the_joint_probability_of_its_path(head: TreeHead, text: list[int]) -> None:
    guesses = head.guess(text, PROMPT_LEN, DRAFT_VOCAB, 3)
    for at, newest in enumerate(range(PROMPT_LEN, LENGTH - 3)):
        score, truth = 0.0, text[newest + 1 : newest + 4]
        for depth, token in enumerate(truth, 1):
            shares = served(head, text[: newest + 1], truth[: depth - 1])
            score += float(shares[DRAFT_IDS.index(token)])
            (found,) = (guesses.is_right[at] & (guesses.depths == depth)).nonzero(as_tuple=True)
            assert depth > 2 or len(found) == 1  # all guesses of the first depth have children
            for index in found:
                assert float(guesses.scores[at, index]) == pytest.approx(score, abs=1e-3)


def test_a_tree_that_has_the_chain_in_it_accepts_as_much(head: TreeHead, text: list[int]) -> None:
    chain = head.guess(text, PROMPT_LEN, 1, 2).accepted(Shape(1, 2, 2))
    guesses = head.guess(text, PROMPT_LEN, 4, 2)
    tree = guesses.accepted(Shape(4, 2, 20))  # every guess: the chain is among them
    assert all(a <= b for a, b in zip(chain, tree, strict=True))
    assert sum(chain) < sum(tree)
    for few, many in ((2, 4), (4, 8), (8, 20)):
        pairs = zip(guesses.accepted(Shape(4, 2, few)), guesses.accepted(Shape(4, 2, many)), strict=True)
        assert all(a <= b for a, b in pairs)


def test_a_head_that_knows_the_answer_brings_its_depth_and_one_token_more() -> None:
    scores = torch.tensor([0.0, -5.0, 0.0, -6.0, -7.0, -8.0]).expand(9, 6)
    is_right = torch.tensor([True, False, True, False, False, False]).expand(9, 6)
    guesses = Guesses(scores, is_right, torch.tensor([1, 1, 2, 2, 2, 2]))
    assert guesses.accepted(Shape(2, 2, 2)) == [2] * 9
    assert guesses.accepted(Shape(2, 2, 1)) == [1] * 9  # the parent of two guesses that are as probable
    assert guesses.accepted(Shape(2, 1, 2)) == [1] * 9
    assert steps_of([2] * 9) == 3
    assert steps_of([0] * 9) == 9
    assert steps_of([1, 0, 0, 3, 0, 0, 0]) == 3  # from positions 0, 2 and 3
    assert steps_of([]) == 0


def test_shapes_are_chains_up_to_the_depth_and_trees_that_can_have_their_nodes() -> None:
    found = shapes([2, 8], [2, 4, 16], 3)
    assert found[:4] == [NOTHING, Shape(1, 1, 1), Shape(1, 2, 2), Shape(1, 3, 3)]
    trees = [Shape(2, 1, 2), Shape(2, 2, 2), Shape(2, 3, 8), Shape(4, 2, 8), Shape(4, 3, 8)]
    assert found[4:] == trees


COSTS = Costs(2, {2: 10.0, 10: 18.0}, {2: 1.0, 6: 3.0}, {2: 0.5}, {2: 0.7, 4: 0.9}, 0.25)


def test_a_step_costs_its_verification_its_passes_of_the_head_and_its_choices() -> None:
    assert COSTS.ms(NOTHING) == 10.0
    assert COSTS.ms(Shape(1, 2, 2)) == pytest.approx(14.0 + (3.0 + 0.5) + (1.0 + 0.5))
    assert COSTS.ms(Shape(2, 2, 4)) == pytest.approx(18.0 + (3.0 + 0.7) + (2.0 + 0.9) + 0.25)
    assert between({1: 4.0, 3: 8.0}, 5) == 12.0
    assert between({1: 4.0}, 5) == 4.0
    assert times("1:4.2,8:4.5") == {1: 4.2, 8: 4.5}


def test_a_shape_is_measured_on_answers_that_it_was_not_chosen_on() -> None:
    chain, other = Shape(1, 1, 1), Shape(1, 2, 2)
    walks = Walks([10, 10], {chain: [5, 10], other: [10, 5]})
    costs = Costs(1, {1: 1.0}, {1: 0.0}, {1: 0.0}, {1: 0.0}, 0.0)
    assert walks.best([chain, other], costs, slice(0, None, 2)) == chain
    assert walks.fair_tokens_per_s([chain, other], costs) == pytest.approx([1000.0, 1000.0])
    assert walks.fair_tokens_per_s([chain], costs) == pytest.approx([2000.0, 1000.0])


def test_answers_are_walked_and_steps_are_timed(
    head: TreeHead, target: Target, text: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = shapes([2, 4], [2], 2)
    walks = walk(head, [(PROMPT_LEN, text), (PROMPT_LEN, text[:-3])], candidates)
    assert walks.num_tokens == [LENGTH - PROMPT_LEN - 1, LENGTH - PROMPT_LEN - 4]
    assert walks.num_steps[NOTHING] == walks.num_tokens
    costs = Stopwatch(head.served, target, 3, candidates).costs()
    assert set(costs.step) == {3, 6, 9, 15}
    assert set(costs.head) == {3, 6, 9}
    assert min(costs.step.values()) > 0
    show_costs(costs)
    show_shapes(walks, [2, 4], costs)
    show_verdicts(walks, [costs])
    assert "2 (2 wide, 1 deep)" in capsys.readouterr().out


def test_heads_of_other_kinds_are_refused(target: Target, tmp_path: Path) -> None:
    third = write_folder(tmp_path / "third", eagle_tensors(VOCAB_SIZE, third=True), VOCAB_SIZE)
    medusa = write_folder(tmp_path / "medusa", medusa_tensors("original"), VOCAB_SIZE)
    for folder in (third, medusa):
        with pytest.raises(ConfigError):
            TreeHead(folder, target, 64)
