"""How the steps of four-bit tiles are divided among programs on Hopper, and which products are divided. The kernel
itself needs a GPU (`tests/gpu`)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton")

from penstock.kernels.gpus import HOPPER
from penstock.kernels.triton import int4_even, int4_tiles

first_step, part, turn = (each.fn for each in (int4_even._first_step, int4_even._part, int4_even._turn))


def parts(program: int, all_steps: int, programs: int, steps: int) -> list[tuple[int, int, int]]:
    begin, end = (first_step(each, all_steps, programs) for each in (program, program + 1))
    return [part(index, begin, end, steps) for index in range((end - 1) // steps - begin // steps + 1)]


@settings(deadline=None)
@given(tiles=st.integers(1, 40), steps=st.integers(1, 20), programs=st.integers(1, 30))
def test_every_step_of_every_tile_is_done_once(tiles: int, steps: int, programs: int) -> None:
    programs = min(programs, tiles * steps)
    done: dict[int, list[tuple[int, int]]] = {}
    for program in range(programs):
        own = parts(program, tiles * steps, programs, steps)
        expected = [(tile, first + step) for tile, first, length in own for step in range(length)]
        begin, end = (first_step(each, tiles * steps, programs) for each in (program, program + 1))
        # The warp that copies goes through the same steps in the same order.
        assert [turn(index, begin, end, steps) for index in range(end - begin)] == expected
        for tile, step in expected:
            done.setdefault(tile, []).append((step, program))
        # Sums are stored before anything else, and a tile that others have begun comes last.
        assert all(first + length == steps for _, first, length in own[1:])
        assert all(first == 0 for _, first, _ in own[:-1])
    assert sorted(done) == list(range(tiles))
    for tile, pairs in done.items():
        assert sorted(step for step, _ in pairs) == list(range(steps))
        # The program of the last step finds the other programs of a tile as the kernel does, one before the other.
        finisher = next(program for step, program in pairs if step == steps - 1)
        others = {program for _, program in pairs} - {finisher}
        found = set()
        other, lacks = finisher, first_step(finisher, tiles * steps, programs) > tile * steps
        while lacks:
            other -= 1
            found.add(other)
            lacks = first_step(other, tiles * steps, programs) > tile * steps
        assert found == others


@pytest.mark.parametrize("programs", [1, 2, 132])
def test_parts_differ_by_one_step_at_most(programs: int) -> None:
    lengths = [
        first_step(program + 1, 1000, programs) - first_step(program, 1000, programs)
        for program in range(programs)
    ]
    assert sum(lengths) == 1000
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("rows", [129, 200, 256, 300, 512, 1024, 2048])
@pytest.mark.parametrize(
    ("made", "width", "is_gated"),
    [
        (6144, 4096, False),
        (4096, 14_336, False),
        (28_672, 4096, True),
        (1024, 576, False),
        (64, 64, True),
        (128_256, 4096, False),
    ],
)
def test_every_program_has_steps_and_a_processor(
    rows: int, made: int, width: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs wait for each other, so each must get a processor, and flags."""
    for processors in (78, 114, 132):
        monkeypatch.setattr(int4_tiles, "num_processors", lambda device, count=processors: count)
        monkeypatch.setattr(int4_tiles, "current", lambda: HOPPER)
        choice = int4_tiles.choose_tile(rows, made, width, 128, is_gated, 0)
        for _, even in int4_tiles._even_tiles(rows, made, width, is_gated, processors):
            tiles = -(-rows // even.rows) * -(-made // (2 * even.tile.outputs))
            steps = -(-width // (2 * even.tile.width))
            assert even.shares <= processors
            assert 2 * even.shares <= int4_even.FLAGS
            assert tiles * steps >= int4_tiles.FEWEST_STEPS * even.shares
            assert even.tile.shares == 1 or even.shares == tiles * even.tile.shares
        assert choice.tile.is_even or made < 4096


def test_few_rows_have_no_flags_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_tiles, "num_processors", lambda device: 132)
    monkeypatch.setattr(int4_tiles, "current", lambda: HOPPER)
    for rows in (3, 32, 64, 128):
        assert not int4_tiles.choose_tile(rows, 28_672, 4096, 128, True, 0).tile.is_even
