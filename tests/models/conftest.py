from __future__ import annotations

import random

import pytest
import torch

from penstock.kernels.interface import Ops
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import select_ops
from tests.models.checkpoints import MODELS, VOCAB_SIZE, Reference, make_reference


@pytest.fixture(scope="module", autouse=True)
def models_use_one_thread(one_thread: None) -> None: ...


def available_ops(dtype: torch.dtype) -> list[Ops]:
    """The plain torch backend, and this machine's own where it has one."""
    backends: list[Ops] = [TorchOps("cpu", dtype)]
    best = select_ops("cpu", dtype)
    return backends if best.name == backends[0].name else [*backends, best]


@pytest.fixture(scope="session", params=available_ops(torch.float32), ids=lambda ops: ops.name)
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param


@pytest.fixture(scope="session", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference("llama", tmp_path_factory.mktemp("llama-alone"))


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
