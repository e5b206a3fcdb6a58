"""How several replicas share one machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.figures import parse_bytes
from penstock.serve.config import resolve
from penstock.serve.control import planned_replicas, shared_engine
from penstock.serve.environment import visible_gpus


def test_one_replica_takes_what_it_always_took() -> None:
    engine = EngineConfig()
    assert shared_engine(engine, 1, ("0", "1")) is engine


def test_replicas_on_the_cpu_share_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.machine._folders", lambda *_: iter(()))  # no control group limits it
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    engine = shared_engine(EngineConfig(), 3, ())
    assert engine.num_threads == 2
    assert engine.cache.kv_cache_memory is not None
    assert parse_bytes(engine.cache.kv_cache_memory) == 85 << 20, "a third of a quarter of a GiB"
    assert shared_engine(EngineConfig(), 20, ()).num_threads == 1


def test_what_the_user_set_holds_for_each_replica() -> None:
    cache = CacheConfig(kv_cache_memory="2GiB")
    engine = shared_engine(EngineConfig(cache=cache, num_threads=5), 4, ())
    assert engine.cache == cache
    assert engine.num_threads == 5


def test_replicas_share_a_gpu_only_where_there_are_too_few() -> None:
    engine = EngineConfig()
    assert shared_engine(engine, 2, ("0", "1")).cache.gpu_memory_utilization == 0.9
    assert shared_engine(engine, 3, ("0", "1")).cache.gpu_memory_utilization == pytest.approx(0.45)
    on_cpu = replace(engine, model=ModelConfig(device="cpu"))
    assert shared_engine(on_cpu, 3, ("0", "1")).cache.gpu_memory_utilization == 0.9


def test_replicas_are_planned_as_the_flags_say() -> None:
    config = resolve({}, {"replicas": "3", "region": "here", "served_model_name": "mine"})
    specs = planned_replicas(config, Path("/weights"))
    assert len(specs) == 3
    assert len(set(map(repr, specs))) == 1
    assert (specs[0].model, specs[0].region, specs[0].model_path) == ("mine", "here", "/weights")


def test_gpus_are_those_that_the_environment_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-77")
    assert visible_gpus() == ("3", "GPU-77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
