"""The cores and the memory that a process may use, where control groups bound them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core import machine
from penstock.core.machine import default_cpu_kv_bytes, usable_cores, usable_memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 22, "SC_PAGE_SIZE": 1 << 12}.__getitem__)


def groups_at(folder: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write control groups. Returns the file that names those of the process, and their root."""
    (folder / "self").write_text(lines)
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "self", folder / "root"


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        pytest.param("0::/\n", {}, 8, id="no limit"),
        pytest.param("0::/\n", {"cpu.max": "max 100000"}, 8, id="unlimited"),
        pytest.param("0::/\n", {"cpu.max": "200000 100000"}, 2, id="a container"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000"}, 1, id="less than a core"),
        pytest.param("0::/\n", {"cpu.max": "350000 100000"}, 3, id="a part of a core"),
        pytest.param("0::/\n", {"cpu.max": "6400000 100000"}, 8, id="more than there is"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3, id="a parent"
        ),
        pytest.param(
            "2:cpu,cpuacct:/docker/7\n1:memory:/docker/7\n",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
            id="version 1 in a container",
        ),
        pytest.param(
            "2:cpu:/x\n0::/x\n",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            8,
            id="version 1 without a limit",
        ),
    ],
)
def test_cores(tmp_path: Path, lines: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(*groups_at(tmp_path, lines, files)) == cores


@pytest.mark.parametrize(
    ("lines", "files", "size"),
    [
        pytest.param("0::/\n", {}, 16 * GIB, id="no limit"),
        pytest.param("0::/\n", {"memory.max": "max"}, 16 * GIB, id="unlimited"),
        pytest.param("0::/\n", {"memory.max": f"{2 * GIB}"}, 2 * GIB, id="a container"),
        pytest.param("0::/a\n", {"a/memory.max": f"{3 * GIB}", "memory.max": f"{GIB}"}, GIB, id="a parent"),
        pytest.param(
            "4:memory:/m\n", {"memory/m/memory.limit_in_bytes": f"{2 * GIB}"}, 2 * GIB, id="version 1"
        ),
        pytest.param(
            "4:memory:/m\n",
            {"memory/m/memory.limit_in_bytes": "9223372036854771712"},
            16 * GIB,
            id="version 1 without a limit",
        ),
    ],
)
def test_memory(tmp_path: Path, lines: str, files: dict[str, str], size: int) -> None:
    assert usable_memory(*groups_at(tmp_path, lines, files)) == size


def test_a_system_without_control_groups_has_its_own_cores_and_memory(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert (usable_cores(absent, absent), usable_memory(absent, absent)) == (8, 16 * GIB)


def test_the_kv_caches_of_all_engines_take_at_most_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size, num_engines, expected in [(16, 1, GIB // 2), (1, 1, GIB // 4), (4, 4, GIB // 4)]:
        monkeypatch.setattr(machine, "usable_memory", lambda size=size: size * GIB)
        assert default_cpu_kv_bytes(num_engines) == expected
