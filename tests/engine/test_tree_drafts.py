"""Trees of drafts change no answer, and their paths are found and kept."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import ON_DEVICE, Chunk
from penstock.core.request import Request
from penstock.engine import cache_memory
from penstock.engine.batch import DEVICE_DRAFTS, BatchRows
from penstock.engine.build import Engine
from penstock.engine.drafters.choice import Contest
from penstock.engine.drafters.following import Newest
from penstock.engine.drafters.trees import TREE_NODES, TREE_WIDTH, Tree, num_nodes
from penstock.engine.graphs import NUM_COLUMNS, DecodeGraphs
from penstock.engine.staging import Staging
from penstock.engine.trees import accepted_paths
from penstock.simulator.replay import replay
from tests.models.heads import eagle_tensors, write_folder

from .tiny import VOCAB_SIZE, request, run, teach_short_answers, tiny_engine, tokens, write_tiny_model
from .trees import KnowingTrees, drafter_of, tree_engine

source = random.Random(4)
SHARED = [source.randrange(3, VOCAB_SIZE) for _ in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("head") / "eagle", eagle_tensors(VOCAB_SIZE, third=False), VOCAB_SIZE
    )


def some_requests(count: int = 6, max_tokens: int = 24) -> list[Request]:
    rng = random.Random(9)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    ]
    return [
        request(
            f"r{n}",
            [*(SHARED if n % 2 else []), *(rng.randrange(3, VOCAB_SIZE) for _ in range(1 + 7 * n))],
            max_tokens + n,
            **kinds[n % len(kinds)],
        )
        for n in range(count)
    ]


def texts(model: Path, requests: list[Request], **changes: Any) -> dict[str, list[int]]:
    events = run(tiny_engine(model, speculate="off", **changes), requests)
    return {each.id: [*each.prompt_token_ids, *tokens(events[each.id])] for each in requests}


def knowing(
    engine: Engine, known: dict[str, list[int]], spoiled: float, patch: pytest.MonkeyPatch
) -> KnowingTrees:
    drafter_of(engine)._trees = trees = KnowingTrees(known, spoiled, patch)
    return trees


def answered(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    events = run(engine, requests)
    return {each.id: [*each.prompt_token_ids, *tokens(events[each.id])] for each in requests}


@pytest.mark.parametrize(
    ("cache", "spoiled"),
    [
        *(({}, spoiled) for spoiled in (0.0, 0.3, 1.0)),
        ({"kv_cache_dtype": "int8"}, 0.3),
        ({"max_num_batched_tokens": 16}, 0.3),
        ({"steps_in_flight": 2}, 0.3),
        ({"max_num_seqs": 2}, 0.0),
    ],
    ids=str,
)
def test_answers_are_the_same(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[str, Any], spoiled: float
) -> None:
    requests = some_requests()
    if "kv_cache_dtype" in cache:  # whose codes differ by backend
        known = answered(tree_engine(model, head, monkeypatch, trees=False, **cache), requests)
    else:
        known = texts(model, requests)
    engine = tree_engine(model, head, monkeypatch, **cache)
    trees = knowing(engine, known, spoiled, monkeypatch)
    assert answered(engine, requests) == known
    assert trees.num_grown > 15
    (stats,) = engine.loop.stats().drafters
    assert len(stats.drafted) <= 4, "counted by levels"
    assert (sum(stats.accepted) > 30) == (spoiled < 1.0)


def test_trees_of_a_head(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [*some_requests(), request("edited", SHARED[:9], 30, presence_penalty=0.5)]
    engine = tree_engine(model, head, monkeypatch)
    assert answered(engine, requests[:-1]) == texts(model, requests[:-1])
    (stats,) = engine.loop.stats().drafters
    assert len(stats.drafted) == 4
    # With a request that needs to know drafts, all get chains.
    assert answered(engine, requests) == texts(model, requests)


def test_a_record_with_trees_replays(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = some_requests(2, 60)
    known, log = texts(model, requests), tmp_path / "plans"
    engine = tree_engine(model, head, monkeypatch, takes_all=False, record_plans=str(log))
    knowing(engine, known, 0.1, monkeypatch)
    assert answered(engine, requests) == known
    engine.close()
    with log.open("rb") as lines:
        assert replay(lines).num_plans > 10


def test_log_probabilities_are_those_of_the_path(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request("r", SHARED[:20], 40, temperature=0.7, seed=2, logprobs=2)]
    (plain,) = run(tree_engine(model, head, monkeypatch, trees=False), asked).values()
    engine = tree_engine(model, head, monkeypatch)
    knowing(engine, {"r": [*SHARED[:20], *tokens(plain)]}, 0.2, monkeypatch)
    (found,) = run(engine, asked).values()
    assert tokens(found) == tokens(plain)
    ours, theirs = ([each for event in events for each in event.logprobs] for events in (found, plain))
    assert [each.top_token_ids for each in ours] == [each.top_token_ids for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)


def test_requests_that_share_a_beginning_and_blocks(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of paths is found by later prompts that have the answers in them."""
    requests = [request(f"r{n}", [*SHARED[:33], n], 50 + n) for n in range(4)]
    known = texts(model, requests)
    engine = tree_engine(model, head, monkeypatch)
    later = [request(f"later-{name}", [*text, 9], 12) for name, text in known.items()]
    known |= texts(model, later, enable_prefix_caching=False)
    knowing(engine, known, 0.3, monkeypatch)
    assert answered(engine, requests) == {each.id: known[each.id] for each in requests}
    events = run(engine, later)
    for each in later:
        assert [*each.prompt_token_ids, *tokens(events[each.id])] == known[each.id]
        assert (events[each.id][0].num_cached_tokens or 0) > len(each.prompt_token_ids) - 40


@pytest.mark.parametrize("swaps", [False, True])
def test_preempted_requests(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    requests = [request(f"p{n}", [3 + n, *SHARED[:20]], 60) for n in range(8)]
    known = texts(model, requests)
    monkeypatch.setattr(cache_memory, "block_copy_s", lambda *_: 0.0)
    host = {} if swaps else {"kv_host_memory": "0"}
    engine = tree_engine(model, head, monkeypatch, num_kv_blocks=20, **host)
    known |= {f"short-{n}": [3 + n, 4, 5, *[0] * 8] for n in range(16)}
    knowing(engine, known, 0.2, monkeypatch)
    teach_short_answers(engine)
    assert answered(engine, requests) == {each.id: known[each.id] for each in requests}
    assert engine.loop.stats().num_preemptions > 0


def test_trees_that_fail_become_chains(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = some_requests(3)
    engine = tree_engine(model, head, monkeypatch)
    drafter = drafter_of(engine)
    grow, count = drafter._trees.grow, [0]

    def fail(*args: Any) -> Tree:
        count[0] += 1
        if count[0] > 4:
            raise torch.OutOfMemoryError("injected")
        return grow(*args)  # type: ignore[no-any-return]

    drafter._trees.grow = fail
    assert answered(engine, requests) == texts(model, requests)
    assert count == [5]
    assert "drafts are chains from now on" in caplog.text
    (stats,) = engine.loop.stats().drafters
    assert stats.drafted[0] > 20


def test_cancelled_requests_and_small_steps(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = some_requests()
    known = texts(model, requests)
    engine = tree_engine(model, head, monkeypatch, steps_in_flight=2, max_num_seqs=3)
    knowing(engine, known, 0.2, monkeypatch)
    for each in requests:
        engine.loop.add(each)
    found: dict[str, list[int]] = {each.id: list(each.prompt_token_ids) for each in requests}
    for number in range(1000):
        if not engine.loop.has_work:
            break
        if number == 9:
            engine.loop.abort("r1")
            engine.loop.abort("r2")
        for event in engine.loop.step():
            found[event.request_id] += event.token_ids
        engine.loop.scheduler.check_integrity()
    for name in ("r0", "r3", "r4", "r5"):
        assert found[name] == known[name]


def test_a_step_that_lacks_memory_is_computed_in_pieces(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.models.families.llama import Llama

    requests = [request(f"r{n}", SHARED[n:20], 40) for n in range(3)]
    known = texts(model, requests)
    forward = Llama.forward

    def limited(self: Llama, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(token_ids) > 10 and rest[0].neighbours is not None:
            raise torch.OutOfMemoryError("injected")
        return forward(self, token_ids, *rest)

    engine = tree_engine(model, head, monkeypatch)
    monkeypatch.setattr(Llama, "forward", limited)
    knowing(engine, known, 0.2, monkeypatch)
    assert answered(engine, requests) == known
    assert engine.loop.stats().num_out_of_memory == 0


def test_a_node_that_is_no_number_ends_the_answer_in_front_of_it(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.models.families.llama import Llama

    asked = [request("r", SHARED[:20], 30)]
    known = texts(model, asked)
    forward = Llama.forward

    def broken(self: Llama, token_ids: torch.Tensor, batch: Any, kv: Any) -> torch.Tensor:
        hidden = forward(self, token_ids, batch, kv)
        hidden[batch.positions == 31] = float("nan")
        return hidden

    engine = tree_engine(model, head, monkeypatch)
    monkeypatch.setattr(Llama, "forward", broken)
    knowing(engine, known, 0.0, monkeypatch)
    assert answered(engine, asked)["r"] == known["r"][:32]
    assert engine.loop.stats().num_nan_logits == 1


def test_a_tree_has_the_most_probable_guesses(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's probability is what the head says about its path alone."""
    engine = tree_engine(model, head, monkeypatch)
    drafter = drafter_of(engine)
    run(engine, [request("r", SHARED[:9], 8)])
    steps, guesser, kv = drafter._steps, drafter._guesser, drafter._kv.store
    with torch.inference_mode():
        torch.manual_seed(3)
        prefix, depth = 11, 4
        tables = torch.randperm(kv.num_blocks - 1)[None, : steps.width(prefix + 40)].to(torch.int32)
        first = torch.randint(3, VOCAB_SIZE, (prefix,))
        states = torch.randn(prefix, 64)
        everything = torch.arange(prefix)
        batch = steps.batch(everything, tables.repeat(prefix, 1), steps.bound(64))
        made = guesser.forward(first.to(torch.int32), states, batch, kv)[-1:]
        newest = Newest(made, torch.tensor([prefix]))
        tree = drafter._trees.grow(newest, tables, 64, depth)

        def share(path: tuple[int, ...]) -> float:
            total, state = 0.0, made
            for level, token in enumerate(path):
                shares, guesses = guesser.top(state, VOCAB_SIZE)
                total += float(shares[0, guesses[0] == token])
                at = steps.batch(torch.tensor([prefix + level]), tables, steps.bound(64))
                state = guesser.forward(torch.tensor([token], dtype=torch.int32), state, at, kv)
            return total

        paths = paths_of(tree.tokens[0], tree.ancestors[0])
        assert len(paths) == num_nodes(depth) == TREE_NODES
        assert [len(path) for path in paths] == (torch.arange(1, 16) - tree.lags[0]).tolist()
        shares = [share(path) for path in paths]
        assert shares == pytest.approx(sorted(shares, reverse=True), abs=1e-4)
        _, best = guesser.top(made, TREE_WIDTH)
        others = [(int(token),) for token in best[0] if (int(token),) not in paths]
        assert all(share(path) <= shares[-1] + 1e-4 for path in others)


def paths_of(tokens: torch.Tensor, ancestors: torch.Tensor) -> list[tuple[int, ...]]:
    numbered = enumerate(zip(tokens.tolist(), ancestors.tolist(), strict=True), 1)
    return [
        tuple(int(tokens[node - back - 1]) for back in reversed(range(node)) if bits >> back & 1)
        for node, (_, bits) in numbered
    ]


@settings(max_examples=60)
@given(st.data())
def test_the_longest_path_that_was_sampled_is_accepted(data: st.DataObject) -> None:
    few = st.integers(0, 2)  # tokens: siblings may be equal
    num_trees, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 15))
    depth = 4
    trees: list[list[list[int]]] = []
    for _ in range(num_trees):
        paths = [[0]]
        for _ in range(data.draw(st.integers(1, width))):
            parent = data.draw(st.sampled_from([path for path in paths if len(path) <= depth]))
            paths.append([*parent, len(paths)])
        trees.append(paths)
    counts = [len(paths) - 1 for paths in trees]
    most = max(counts) + 1
    drawn = [[data.draw(few) for _ in range(most)] for _ in trees]
    guesses = [[data.draw(few) for _ in range(most)] for _ in trees]
    bits = [
        [
            -1,
            *(sum(1 << (node - each) for each in paths[node]) - (2 << node) for node in range(1, len(paths))),
        ]
        + [5] * (most - len(paths))
        for paths in trees
    ]
    found = accepted_paths(*(torch.tensor(each) for each in (guesses, drawn, bits, counts)), depth=depth)
    for index, paths in enumerate(trees):
        good = [
            path
            for path in paths
            if all(guesses[index][node] == drawn[index][before] for before, node in pairwise(path))
        ]
        longest = max(map(len, good))
        expected = next(path for path in good if len(path) == longest)
        assert found.lengths[index] == longest - 1
        own = found.nodes[index].tolist()
        assert own[:longest] == expected
        assert own[longest:] == [min(level, counts[index]) for level in range(longest, len(own))]


def rounds(contest: Contest, tree_tokens: float, count: int = 2500, seed: int = 5) -> float:
    """The share of rounds that get trees, where those of chains bring 2 tokens each."""
    rng, num_trees, drafted = random.Random(seed), 0, False
    for _ in range(count):
        asked = contest.choose()
        if asked == drafted:
            more = (tree_tokens if drafted else 2.0) - 1.0
            accepted = sum(rng.random() < more / 4 for _ in range(4))
            contest.note(1 + accepted, 1.0, is_tree=drafted)
        drafted = asked
        num_trees += asked
    return num_trees / count


def test_trees_are_used_where_they_bring_more() -> None:
    assert rounds(Contest(), 3.0) > 0.6
    assert rounds(Contest(), 1.0) < 0.1, "a hopeless trial ends early"
    assert rounds(Contest(), 1.8) < 0.3


def test_small_gains_are_found_although_rounds_vary() -> None:
    """The tokens of a round vary by half of their mean."""
    gains = [rounds(Contest(), 2.2, seed=seed) > 0.6 for seed in range(20)]
    losses = [rounds(Contest(), 1.8, seed=seed) > 0.6 for seed in range(20)]
    assert sum(gains) >= 17
    assert sum(losses) <= 1


def test_a_choice_is_made_anew_when_the_rates_change() -> None:
    contest = Contest()
    assert rounds(contest, 3.0) > 0.6
    assert rounds(contest, 1.0) < 0.7
    assert rounds(contest, 1.0) < 0.1


def test_graphs_get_trees_as_other_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of a graph of decodes are those of the same step outside of graphs."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    staging = Staging(cpu, 1 << 16)
    rows = BatchRows(8, 256, 16, cpu, staging)
    rows._splits_drafts = True
    graphs = DecodeGraphs(
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(num_blocks=64, block_size=16),  # type: ignore[arg-type]
        rows,
        staging,
        256,
    )
    chunks = [
        Chunk("plain", 8, 1, True, (7,)),
        Chunk("tree", 16, 6, True, (5, 6), drafts=(ON_DEVICE,) * 5, tree_depth=2),
    ]
    for chunk in chunks:
        rows.begin(chunk.request_id, range(3, 4 + chunk.start))
        rows.place_blocks(rows.row(chunk.request_id), replace(chunk, begins=True))
        rows.place_drafts(chunk)
    first = rows.row("tree") * DEVICE_DRAFTS
    for place, values in (
        (rows.draft_tokens, [50, 51, 52, 53, 54]),
        (rows.draft_lags, [0, 1, 2, 2, 3]),
        (rows.draft_ancestors, [-1, -3, -7, -13, -25]),
    ):
        place[first : first + 5] = torch.tensor(values, dtype=torch.int32)
    step = rows.build(chunks)
    batch = rows.attention_batch(step)
    assert batch.positions.tolist() == [8, 16, 17, 17, 17, 18, 18]
    assert batch.ancestors is not None
    assert batch.ancestors.tolist() == [-1, -1, -1, -3, -7, -13, -25]
    lags = rows.num_taken_back(step.samples)
    assert lags is not None
    assert lags.tolist() == [0, 0, 0, 1, 2, 2, 3]
    graphs._fill(step, 7, 8, 256)
    filled = graphs._batch(8, 256)
    for ours, theirs in (
        (filled.positions, batch.positions),
        (filled.slots, batch.slots),
        (filled.context_lens, batch.context_lens),
        (graphs._ancestors, batch.ancestors),
    ):
        assert ours[:7].tolist() == theirs.tolist()
    sources = graphs._inputs[: NUM_COLUMNS * 8].view(NUM_COLUMNS, 8)[1]
    assert graphs._buffer[sources[:7].long()].tolist() == rows.token_ids(step).tolist()
