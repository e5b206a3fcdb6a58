"""Prefixes leave the device for host memory, go on to disk, and come back: what engines say, and what survives."""

from __future__ import annotations

import logging
import random
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.engine.build import Engine
from penstock.engine.disk_cache import BlockFiles, model_digest
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import select_ops
from penstock.simulator.replay import replay
from tests.engine.tiny import VOCAB_SIZE, request, run, tiny_engine, tokens, write_tiny_model

rng = random.Random(5)
PROMPTS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (180, 200, 170, 190)]
DIGEST = model_digest("a model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return asked(tiny_engine(model))[0]


def disk_engine(model: Path, folder: Path, **settings: Any) -> Engine:
    """An engine with room for one of the prompts on the device, and for two in host memory."""
    settings = {"num_kv_blocks": 18, "kv_host_memory": "256KiB", **settings}
    return tiny_engine(model, kv_disk_cache=str(folder), **settings)


def asked(engine: Engine, turn: str = "") -> tuple[list[list[int]], list[int]]:
    """The answers to the prompts, one after the other, and how many tokens of each were cached."""
    answers, cached = [], []
    for number, prompt in enumerate(PROMPTS):
        name = f"{turn}{number}"
        events = run(engine, [request(name, prompt, 8)])[name]
        answers.append(tokens(events))
        cached.append(events[0].num_cached_tokens or 0)
    return answers, cached


def always_read(engine: Engine) -> Engine:
    """The tiny model computes faster than any disk reads."""
    engine.loop.scheduler.prefill_s = lambda *_: 1e9  # type: ignore[method-assign]
    return engine


def test_prefixes_come_back_from_host_memory(
    model: Path, expected: list[list[int]], monkeypatch: Any
) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 0.0)
    engine = tiny_engine(model, num_kv_blocks=18, kv_host_memory="1MiB")
    assert asked(engine) == (expected, [0] * 4)
    answers, cached = asked(engine, "again ")
    assert answers == expected
    assert min(cached) >= 160
    assert engine.loop.stats().num_blocks_from_host > 0


def test_a_slow_copy_is_not_made_where_computing_is_quicker(model: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 10.0)
    engine = tiny_engine(model, num_kv_blocks=18, kv_host_memory="1MiB")
    asked(engine)
    assert asked(engine, "again ")[1] == [0] * 4
    assert engine.loop.stats().num_blocks_to_host == 0


def test_prefixes_come_back_from_disk_and_survive_a_restart(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 0.0)
    plans = tmp_path / "plans"
    engine = always_read(disk_engine(model, tmp_path / "kv", record_plans=str(plans)))
    assert asked(engine)[0] == expected
    assert asked(engine, "again ")[0] == expected
    engine.close()
    assert engine.loop.stats().num_blocks_to_disk > 20
    with plans.open("rb") as log:
        assert replay(log).mismatch is None

    again = always_read(disk_engine(model, tmp_path / "kv"))
    answers, cached = asked(again)
    assert answers == expected
    assert min(cached) >= 160, "closing wrote what was left"
    assert again.loop.stats().num_blocks_from_disk >= 40
    again.close()
    for path in (tmp_path / "kv").glob("*/*/*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_requests_of_another_tenant_and_model_find_nothing(
    model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 0.0)
    engine = always_read(disk_engine(model, tmp_path))
    asked(engine)
    engine.close()
    other = always_read(
        disk_engine(write_tiny_model(tmp_path / "m", rope_theta=7.0), tmp_path, dtype="bfloat16")
    )
    assert asked(other)[1] == [0] * 4
    other.close()
    again = always_read(disk_engine(model, tmp_path))
    theirs = msgspec.structs.replace(request("theirs", PROMPTS[0], 4), tenant="another")
    assert run(again, [theirs])["theirs"][0].num_cached_tokens == 0
    again.close()


@pytest.mark.parametrize("fault", ["cut", "changed", "empty", "gone", "renamed"])
def test_damaged_files_are_removed_and_the_server_goes_on(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: Any, fault: str
) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 0.0)
    engine = always_read(disk_engine(model, tmp_path))
    asked(engine)
    engine.close()
    again = always_read(disk_engine(model, tmp_path))
    paths = sorted(tmp_path.glob("*/*/*.kv"))
    for path, other in zip(paths[::2], paths[1::2], strict=False):
        if fault == "gone":
            path.unlink()
            continue
        data = path.read_bytes()
        changed = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"cut": data[:-5], "changed": changed, "empty": b""}.get(fault, other.read_bytes()))
    assert asked(again)[0] == expected
    again.close()


def test_two_requests_for_one_prefix_read_it_once(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    engine = always_read(disk_engine(model, tmp_path))
    asked(engine)
    engine.close()
    again = always_read(disk_engine(model, tmp_path, num_kv_blocks=60))
    events = run(again, [request(str(n), PROMPTS[0], 8) for n in range(3)])
    assert [tokens(each) for each in events.values()] == [expected[0]] * 3
    assert again.loop.stats().num_blocks_from_disk <= 12
    again.close()


def test_a_request_that_is_aborted_while_it_waits_leaves_no_trace(model: Path, tmp_path: Path) -> None:
    engine = always_read(disk_engine(model, tmp_path))
    asked(engine)
    engine.close()
    again = always_read(disk_engine(model, tmp_path))
    again.loop.add(request("aborted", PROMPTS[0], 8))
    again.loop.abort("aborted")
    while again.loop.has_work:
        assert again.loop.step() == []
    again.loop.scheduler.check_integrity()
    again.close()


def test_a_deadline_ends_a_request_that_waits_for_the_disk(
    model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("penstock.engine.cache_memory.block_copy_s", lambda *_: 0.0)
    engine = always_read(disk_engine(model, tmp_path))
    asked(engine)
    engine.close()
    has_come = threading.Event()
    monkeypatch.setattr(BlockFiles, "read", lambda *_: has_come.wait(60) and None)  # a slow disk
    again = always_read(disk_engine(model, tmp_path))
    again.loop.add(request("late", PROMPTS[-1], 8), timeout_s=0.01)
    assert len(again.loop._collaborators[-1]) == 1, "it waits"
    while again.loop.has_work:
        assert again.loop.step() == []
    (rejection,) = again.loop.take_rejections()
    assert rejection.code == "deadline_exceeded"
    has_come.set()
    again.close()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["float32", "int8"])
@pytest.mark.parametrize("ops", [TorchOps, select_ops], ids=["torch", "native"])
def test_blocks_go_through_bytes(ops: Any, kv_dtype: torch.dtype | None) -> None:
    store = ops(torch.device("cpu"), torch.float32, kv_dtype).allocate_kv(2, 4, 16, 2, 16)
    store.reserve_host(3)
    contents = bytes(index * 7 % 251 for index in range(store.block_bytes))
    store.write_block(1, contents)
    store.copy_to_host([1], [2])
    assert store.read_host(2) == contents
    store.copy_to_host([0], [2])
    assert store.read_host(2) != contents


@pytest.mark.parametrize(
    "settings", [{"kv_host_memory": "0"}, {"folder": "a file"}], ids=["no host", "no folder"]
)
def test_what_makes_it_impossible_is_a_sentence_in_the_log(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    folder = tmp_path / settings.pop("folder", "kv")
    if folder.name == "a file":
        folder.write_text("")
    with caplog.at_level(logging.WARNING):
        engine = disk_engine(model, folder, **settings)
    assert "--kv-disk-cache has no effect" in caplog.text
    assert len(run(engine, [request("r", PROMPTS[0], 4)])["r"]) > 0
    engine.close()


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, 1000, DIGEST, 200)
    names = [bytes([n]) * 32 for n in range(6)]
    for name in names[:3]:
        assert files.write(name, bytes(200))
    assert files.read(names[0]) == bytes(200)  # used: the second is the oldest now
    for name in names[3:5]:
        assert files.write(name, bytes(200))
    assert files.num_bytes <= 1000
    assert names[0] in files
    assert names[1] not in files
    assert not files.write(b"x" * 32, bytes(2000)), "it is larger than the whole size"
    assert len(BlockFiles(tmp_path, 600, DIGEST, 200)) == 2, "a smaller size holds from the start on"
    other = BlockFiles(tmp_path, 600, model_digest("another"), 200)
    assert len(other) == 0
    assert other.num_bytes <= 600


def test_a_full_disk_is_told_once_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = BlockFiles(tmp_path, 1 << 20, DIGEST, 200)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "replace", full)
        assert not files.write(b"a" * 32, bytes(200))
        assert not files.write(b"b" * 32, bytes(200))
    assert caplog.text.count("No space left") == 1
    assert not list(tmp_path.glob("*/*/*.part"))
    files._rests_until = 0.0
    assert files.write(b"a" * 32, bytes(200))
