"""Engines on a CPU whose steps verify trees of drafts, laid out as on a GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.clock import SystemClock
from penstock.core.engine_config import EngineConfig
from penstock.engine.build import Engine
from penstock.engine.drafters import following
from penstock.engine.drafters.choice import DraftChoice
from penstock.engine.drafters.following import Newest, Verified
from penstock.engine.drafters.trees import TREE_DEPTH, Tree, TreeSteps, num_nodes
from penstock.kernels.reference import TorchOps

from .drafting import speculate
from .tiny import VOCAB_SIZE, tiny_engine

CACHE_TYPES = {"auto": None, "int8": torch.int8}


def tree_engine(
    model: Path,
    heads: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    trees: bool = True,
    takes_all: bool = True,
    **settings: Any,
) -> Engine:
    """Build an engine that takes every draft of a head. With `trees` these are trees wherever they can be.
    Without `takes_all` the scheduler takes what it wants."""

    def torch_ops(config: EngineConfig) -> TorchOps:
        return TorchOps("cpu", torch.float32, CACHE_TYPES[config.cache.kv_cache_dtype])

    monkeypatch.setattr("penstock.engine.decoder.choose_ops", torch_ops)
    monkeypatch.setattr("penstock.engine.drafters.length.DraftLength.begin", lambda self, *_: 4)
    monkeypatch.setattr(DraftChoice, "_next", lambda self, *_: trees)
    engine = tiny_engine(model, speculate=f"heads={heads}", **settings)
    drafter = drafter_of(engine)
    drafter.follows_steps = True
    drafter._choice = DraftChoice(SystemClock(), 8, TREE_DEPTH if trees else 0)
    drafter._trees = TreeSteps(drafter._guesser, drafter._kv.store, drafter._steps)
    executor: Any = engine.loop.executor
    executor._follower = drafter
    executor._rows._splits_drafts = True
    return speculate(engine, engine.loop.drafter, most=8) if takes_all else engine  # type: ignore[arg-type]


def drafter_of(engine: Engine) -> Any:
    return engine.loop.drafter._drafters[-1]  # type: ignore[union-attr]


class KnowingTrees:
    """Grows random trees of the tokens of known answers. Each node's right child is missing with the chance
    `spoiled`."""

    def __init__(
        self, answers: Mapping[str, Sequence[int]], spoiled: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`answers` have the tokens of prompts in front."""
        self._answers, self._spoiled, self._rng = answers, spoiled, random.Random(3)
        self._step: Verified | None = None
        self.num_grown = 0
        verify = following.verified

        def watch(*args: Any) -> Verified | None:
            self._step = verify(*args)
            return self._step

        monkeypatch.setattr("penstock.engine.drafters.model.verified", watch)

    def grow(self, newest: Newest, tables: Tensor, max_context: int, depth: int) -> Tree:
        assert self._step is not None
        ends = (self._step.starts + self._step.num_accepted + 2).tolist()
        found = [
            self._tree(self._answers[name][end : end + depth], depth)
            for name, end in zip(self._step.request_ids, ends, strict=True)
        ]
        self.num_grown += len(found)
        device = newest.states.device
        tokens, lags, ancestors = (torch.tensor(each, device=device) for each in zip(*found, strict=True))
        return Tree(tokens, lags, ancestors)

    def _tree(self, right: Sequence[int], depth: int) -> tuple[list[int], list[int], list[int]]:
        rng, paths = self._rng, [[0]]
        tokens, is_right, children = [0], [True], {0: set[int]()}
        while len(paths) <= num_nodes(depth):
            parent = rng.choice([node for node, path in enumerate(paths) if len(path) <= depth])
            level = len(paths[parent]) - 1
            wanted = right[level] if is_right[parent] and level < len(right) else None
            takes = wanted is not None and wanted not in children[parent] and rng.random() >= self._spoiled
            token = wanted if takes and wanted is not None else rng.randrange(VOCAB_SIZE)
            if token in children[parent]:
                continue
            node = len(paths)
            children[parent].add(token)
            children[node] = set()
            paths.append([*paths[parent], node])
            tokens.append(token)
            is_right.append(token == wanted)
        nodes = range(1, len(paths))
        ancestors = [sum(1 << (node - each) for each in paths[node]) - (2 << node) for node in nodes]
        return tokens[1:], [node - len(paths[node]) + 1 for node in nodes], ancestors
