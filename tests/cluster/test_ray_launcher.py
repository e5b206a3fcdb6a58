"""What can be said about replicas on Ray without a Ray cluster."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from penstock.cluster.ray_launcher import RayLauncher, resources
from penstock.core.engine_config import ModelConfig, ParallelConfig
from penstock.core.errors import ConfigError
from penstock.core.installation import install_command
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
def test_what_a_replica_takes_of_a_node(
    device: str, cluster: dict[str, float], expected: dict[str, float]
) -> None:
    engine = replace(
        ENGINE,
        model=ModelConfig(model="echo", device=device),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_parallel_size=2),
        num_threads=3,
    )
    assert resources(replace(SPEC, engine=engine), cluster) == expected


async def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as refused:
        await RayLauncher().launch(replace(SPEC, launcher="ray"), "replica-1")
    assert install_command("ray") in (refused.value.hint or "")
