"""Every kernel compiles for GPUs that this machine does not have, in a process without the interpreter, and needs no
more shared memory than the GPU has. Three families stand for all here: the least shared memory without float8,
Hopper, and the newest; the last two for the kernels whose instructions differ from those of the first. Kernels that
`compiled.txt` records, with the same source, settings and release of Triton, are not compiled again, unless tests run
with `--exhaustive`. `make compile-targets` compiles all variants for all families, which takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

from penstock.engine.warmup import DECODES, MANY_TOKENS, PREFILLS
from penstock.kernels.gpus import FAMILIES, HOPPER, OLDEST, family_of
from penstock.kernels.interface import DenseWeight
from penstock.kernels.triton import decode_attention, experts, int4_row, prefill_attention, targets
from penstock.kernels.triton.device import empty_rows, in_whole_tiles
from penstock.kernels.triton.expert_weights import pack_matrix, stack
from penstock.kernels.triton.products import MAX_HOPPER_ROWS
from penstock.kernels.triton.targets import TILES, Tile

RECORD = Path(__file__).parent / "compiled.txt"


@pytest.mark.timeout(900)
def test_every_kernel_compiles(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "tests.triton.compile_targets", "--representative", "--jobs", "1"]
    record = [] if request.config.getoption("exhaustive") else ["--record", str(RECORD)]
    done = subprocess.run(
        [*command, "--targets", "86,90,120", *record],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [problem for report in reports for problem in report["problems"]] == []
    assert done.returncode == 0
    assert [report["target"] for report in reports] == ["86", "90", "120"]
    unrecorded = [line for report in reports for line in report["compiled"]]
    if record and unrecorded:
        names = ", ".join(line.rpartition(" ")[0] for line in unrecorded)
        warnings.warn(f"`make compile-record` would spare the next run to compile {names}", stacklevel=1)
    every, hopper, newest = (set(report["kernels"]) for report in reports)
    assert len(every) > 40
    # Float8 products are for GPUs that have them, and experts round inputs for theirs; some kernels are for Hopper.
    float8 = {"float8", "float8_blocks", "experts", "expert_numbers"}
    assert {name.partition(".")[0] for name in newest - every} == float8
    assert {name.partition(".")[0] for name in hopper - every} == float8 | {
        "few_hopper",
        "hopper_attention",
        "int4_even",
        "int4_hopper",
    }
    # Where products have instructions of their own, every kernel with products is compiled.
    assert len(hopper & every) >= 15
    products = {"prefill_attention", "decode_attention", "latent_attention", "segments", "lora", "int8"}
    unpacking = {"experts", "expert_rows", "int4_row"}
    assert products | unpacking <= {name.partition(".")[0] for name in hopper}
    assert unpacking | {"int4_few"} <= {name.partition(".")[0] for name in newest}


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


def test_large_tiles_of_experts_are_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits: each number that is loaded is multiplied as often as possible."""
    dense = pack_matrix([DenseWeight(torch.zeros(256, 2048))] * 2, torch.bfloat16, torch.device("cpu"))
    weight = stack([dense], torch.bfloat16)
    for family in (HOPPER, FAMILIES[1]):
        monkeypatch.setattr(targets, "current", lambda family=family: family)
        assert experts._tile(128, weight, torch.bfloat16, True) == Tile(128, 64, 8, 3)
        assert experts._tile(64, weight, torch.bfloat16, True).outputs == 64
        assert experts._tile(128, weight, torch.float32, True).outputs == 64


def test_only_hopper_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for family in FAMILIES:
        monkeypatch.setattr(targets, "current", lambda family=family: family)
        assert targets.has_hopper_kernels() == (family == HOPPER)
    monkeypatch.setattr(targets, "current", lambda: HOPPER)
    for version, compiles in (("3.6.0", True), ("3.9.1+git", True), ("3.10.0", False), ("4.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        assert targets.has_hopper_kernels() == compiles


@pytest.mark.parametrize(
    ("made", "width", "is_gated"),
    [
        (6144, 4096, False),
        (4096, 14_336, False),
        (28_672, 4096, True),
        (6144, 1024, True),
        (1024, 3072, False),
        (128_256, 4096, False),
    ],
)
@pytest.mark.parametrize("group", [32, 128])
def test_a_few_steps_need_every_tile_of_four_bits(
    made: int, width: int, is_gated: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.triton import int4_tiles

    monkeypatch.setattr(int4_tiles, "num_processors", lambda device: 132)
    monkeypatch.setattr(int4_tiles, "current", lambda: HOPPER)

    def kernels(all_rows: Iterable[int]) -> set[tuple[int, int4_tiles.HopperTile, bool]]:
        choices = [int4_tiles.choose_tile(rows, made, width, group, is_gated, 0) for rows in all_rows]
        return {(tile_rows, tile, shares > 1) for tile_rows, tile, shares in choices}

    steps = [step.num_requests * step.tokens_each for step in (*PREFILLS, *DECODES)]
    assert kernels(range(int4_row.MAX_ROWS + 1, MAX_HOPPER_ROWS + 1)) == kernels(
        rows for rows in (*steps, MANY_TOKENS) if rows > int4_row.MAX_ROWS
    )


@pytest.mark.parametrize("most_requests", [8, 256])
@pytest.mark.parametrize("width", [1024, 14_336])
@pytest.mark.parametrize("made", [256, 512, 1024, 2560, 4096, 5120, 6144])
def test_a_few_steps_need_every_product_of_some_hundred_rows(
    made: int, width: int, most_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.triton import few_hopper

    monkeypatch.setattr(few_hopper, "num_processors", lambda device: 132)
    device = torch.device("cuda")

    def kernels(all_rows: Iterable[int]) -> set[bool]:
        """Whether products of these numbers of rows are cut (split-K)."""
        return {
            few_hopper._num_shares(rows, made, width, device) > 1
            for rows in all_rows
            if few_hopper.fills_once(rows, made, device)
        }

    steps = [
        step.num_requests * step.tokens_each
        for step in (*PREFILLS, *DECODES)
        if step.num_requests <= most_requests
    ]
    first = few_hopper.MAX_ROWS + 1
    assert kernels(range(first, 8192)) == kernels(rows for rows in (*steps, MANY_TOKENS) if rows >= first)


def test_matrices_have_memory_for_whole_tiles() -> None:
    for num_rows in (1, 3, 16, 17, 40, 128, 129, 300):
        x = empty_rows(num_rows, 8, torch.bfloat16, torch.device("cpu"))
        whole = in_whole_tiles(x)
        assert x.shape == (num_rows, 8)
        assert x.is_contiguous()
        assert whole.data_ptr() == x.data_ptr()
        assert whole.shape[0] % 16 == 0
        assert 0 <= whole.shape[0] - num_rows < max(16, num_rows)
    alone = torch.zeros(40, 8)
    assert in_whole_tiles(alone) is alone
    assert in_whole_tiles(torch.zeros(80, 8)[8:48]).shape == (64, 8)


@pytest.mark.parametrize(
    ("num_requests", "queries", "span", "is_specialized", "is_split"),
    [
        (1, 8192, 8192, True, False),
        (1, 2048, 16384, True, False),
        (1, 128, 16384, True, True),
        (1, 640, 16384, True, True),  # else a second round would be nearly empty
        (8, 1024, 1024, True, False),
        (40, 100, 100, False, False),  # short contexts
        (32, 5, 4096, False, False),  # a few tokens each
        (1, 5, 65536, False, True),
    ],
)
def test_prompts_go_to_the_faster_kernel(
    num_requests: int, queries: int, span: int, is_specialized: bool, is_split: bool
) -> None:
    shape = prefill_attention._best_shape(
        num_requests=num_requests,
        queries=queries,
        span=span,
        num_heads=32,
        tile_heads=4,
        may_split=True,
        may_be_large=True,
        may_specialize=True,
        processors=132,
    )
    assert (shape.is_specialized, shape.splits > 1) == (is_specialized, is_split)
    assert shape.splits * shape.split_keys >= span > (shape.splits - 1) * shape.split_keys


def test_crowded_decodes_of_sixteen_bits_have_two_warps() -> None:
    tiles = [decode_attention._tile(size, each, is_small=small) for size, each, small in (
        (128, 4, True), (64, 4, True), (128, 4, False), (256, 4, True), (128, 8, True), (128, 2, True),
    )]  # fmt: skip
    assert [tile.num_warps for tile in tiles] == [2, 2, 4, 4, 4, 4]
