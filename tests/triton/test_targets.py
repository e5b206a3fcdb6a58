"""Every kernel compiles for GPUs that this machine does not have, in a process without the interpreter, and needs no
more shared memory than the GPU has. Three families stand for all here: the least shared memory without float8,
Hopper, and the newest. `make compile-targets` compiles all variants for all families, which takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

from penstock.kernels.gpus import FAMILIES, HOPPER, OLDEST, family_of
from penstock.kernels.triton import targets
from penstock.kernels.triton.targets import TILES, Tile


@pytest.mark.timeout(900)
def test_every_kernel_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compile_targets", "--representative", "--targets", "86,90,120"],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [problem for report in reports for problem in report["problems"]] == []
    assert done.returncode == 0
    assert [report["target"] for report in reports] == ["86", "90", "120"]
    # Float8 products are for GPUs that have them. No other kernel is left out.
    without, with_float8 = (set(reports[index]["kernels"]) for index in (0, 1))
    assert {name.partition(".")[0] for name in with_float8 - without} == {"float8"}
    assert not without - with_float8
    assert len(without) > 25


def test_a_chip_belongs_to_the_family_before_it() -> None:
    assert [family_of("cuda", arch).arch for arch in (80, 86, 87, 88, 89, 90, 100, 103, 120, 121)] == [
        80, 86, 87, 87, 89, 90, 100, 100, 120, 120,
    ]  # fmt: skip
    assert family_of("cuda", 150).shared_bytes == min(family.shared_bytes for family in FAMILIES[:-1])
    for backend, arch in (("cuda", OLDEST - 5), ("hip", "gfx90a")):
        with pytest.raises(ValueError, match="no kernels"):
            family_of(backend, arch)


def test_tiles_take_the_stages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(outputs=64, width=256, num_warps=4, num_stages=4)
    for family, stages in ((HOPPER, 4), (FAMILIES[0], 4), (FAMILIES[1], 3)):
        monkeypatch.setattr(targets, "current", lambda family=family: family)
        assert tile.fitted(4096, 192) == Tile(64, 256, 4, stages)
    assert tile.fitted(4096, 1024).width == 64  # a single stage does not fit otherwise
    assert tile.fitted(96, 192).width == 32
    monkeypatch.setattr(targets, "current", lambda: HOPPER)
    assert all(targets.tile(name) == TILES[name] for name in TILES)
