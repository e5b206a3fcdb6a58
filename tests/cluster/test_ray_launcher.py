"""What can be said about replicas on Ray without a Ray cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cluster.ray_launcher import RayLauncher, refuse_too_large, resources
from penstock.core.engine_config import CacheConfig, ModelConfig, ParallelConfig
from penstock.core.errors import ConfigError
from penstock.core.machine import install_command
from tests.cluster.control_stage import ENGINE, SPEC


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        ("cpu", {"CPU": 8.0, "GPU": 4.0}, {"CPU": 3.0}),
        ("auto", {"CPU": 8.0}, {"CPU": 3.0}),
        ("auto", {"CPU": 8.0, "GPU": 4.0}, {"CPU": 3.0, "GPU": 2.0}),
        ("cuda", {"CPU": 8.0}, {"CPU": 3.0, "GPU": 2.0}),  # it waits for a node that has them
    ],
)
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor_parallel_size=2),
        ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
    ],
)
def test_what_a_replica_takes_of_a_node(
    device: str, cluster: dict[str, float], expected: dict[str, float], parallel: ParallelConfig
) -> None:
    engine = replace(
        ENGINE,
        model=ModelConfig(model="echo", device=device),  # type: ignore[arg-type]
        parallel=parallel,
        num_threads=3,
    )
    assert resources(replace(SPEC, engine=engine), cluster) == expected


def test_a_stage_that_no_node_holds_is_refused_with_the_number_of_stages_that_fit(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(900_000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(900_000))
    cache = CacheConfig(kv_cache_memory="100000")
    engine = replace(
        ENGINE,
        model=ModelConfig(model="large", device="cpu"),
        cache=cache,
        parallel=ParallelConfig(tensor_parallel_size=2),
        num_threads=4,
    )
    spec = replace(SPEC, model="large", engine=engine, model_path=str(tmp_path))
    needs = resources(spec, {"CPU": 8.0})
    assert needs == {"CPU": 4.0, "memory": 900_000.0 + 2 * 100_000.0}
    nodes = [{"CPU": 4.0, "memory": 300_000.0}, {"CPU": 4.0, "memory": 520_000.0}]
    with pytest.raises(ConfigError, match="large needs") as refused:
        refuse_too_large(spec, needs, nodes)
    assert "--pipeline-parallel-size 3" in (refused.value.hint or "")
    in_three = replace(
        spec, engine=replace(engine, parallel=replace(engine.parallel, pipeline_parallel_size=3))
    )
    needs = resources(in_three, {"CPU": 8.0})
    assert needs == {"CPU": 2.0, "memory": 500_000.0}
    refuse_too_large(in_three, needs, nodes)
    own = replace(spec, engine=replace(engine, parallel=ParallelConfig(data_parallel_size=2)))
    with pytest.raises(ConfigError, match="large needs") as refused:  # whose ranks are on one node
        refuse_too_large(own, resources(own, {"CPU": 8.0}), nodes)
    assert refused.value.hint == "Add a larger node."
    refuse_too_large(spec, resources(spec, {"GPU": 1.0}), [])  # nothing is known of the nodes


async def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as refused:
        await RayLauncher().launch(replace(SPEC, launcher="ray"), "replica-1")
    assert install_command("ray") in (refused.value.hint or "")
