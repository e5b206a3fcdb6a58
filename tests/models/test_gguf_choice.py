"""Of several GGUF files one is taken, in folders and in repositories of the hub."""

from __future__ import annotations

import logging
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import ModelLoadError
from penstock.models.catalog import from_ollama_name
from penstock.models.gguf_choice import choose_gguf, choose_mmproj, split_parts
from penstock.models.hub import ModelHub

FILES = [
    "m-F16.gguf",
    "m-Q8_0.gguf",
    "m-Q4_K_M-00001-of-00002.gguf",
    "m-Q4_K_M-00002-of-00002.gguf",
    "mmproj-m-f16.gguf",
]


def paths(*names: str) -> list[PurePosixPath]:
    return [PurePosixPath(name) for name in names]


def test_parts_by_name() -> None:
    parts = split_parts(PurePosixPath("a/m-00002-of-00003.gguf"))
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert split_parts(PurePosixPath("m.gguf")) == (PurePosixPath("m.gguf"),)


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (FILES, None, "m-Q4_K_M-00001-of-00002.gguf"),
        (FILES, "q8_0", "m-Q8_0.gguf"),
        (["m.gguf", "mmproj-m.gguf"], None, "m.gguf"),
        (["m.gguf", "m-mmproj-f16.gguf"], None, "m.gguf"),
        (["m.IQ2_XXS.gguf", "m.Q6_K.gguf"], None, "m.Q6_K.gguf"),
        (["Q8_0/m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf"], "Q8_0", "Q8_0/m-Q8_0.gguf"),
    ],
)
def test_the_choice(names: list[str], wanted: str | None, chosen: str) -> None:
    assert choose_gguf(paths(*names), "here", wanted) == PurePosixPath(chosen)


@pytest.mark.parametrize(
    ("model", "names", "chosen"),
    [
        ("m-Q4_K_M.gguf", ["mmproj-m-f16.gguf", "mmproj-m-Q8_0.gguf"], "mmproj-m-f16.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        ("m-qat-Q4_0.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("llava-7b.Q4_K_M.gguf", ["llava-7b-mmproj-fp16.gguf"], "llava-7b-mmproj-fp16.gguf"),
        ("a-4b-it-Q4_0.gguf", ["mmproj-a-4b-f16.gguf", "mmproj-b-4b-f16.gguf"], "mmproj-a-4b-f16.gguf"),
        ("a-4b-Q4_0.gguf", ["mmproj-a-4b-f16.gguf", "mmproj-model-f16.gguf"], "mmproj-a-4b-f16.gguf"),
        ("c-Q4_0.gguf", ["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"], None),
        ("m.gguf", ["m.gguf", "imatrix.gguf", "mmproj.txt"], None),
    ],
)
def test_the_vision_part_of_a_model(model: str, names: list[str], chosen: str | None) -> None:
    found = choose_mmproj(PurePosixPath(model), paths(*names))
    assert found == (None if chosen is None else PurePosixPath(chosen))


@pytest.mark.parametrize(
    ("names", "wanted", "sentence"),
    [
        (["a.gguf", "b.gguf"], None, "2 .gguf files"),
        (["one-Q4_0.gguf", "two-Q4_0.gguf"], None, "2 .gguf files"),
        (FILES, "Q2_K", "no .gguf file of the type Q2_K; there are F16, Q4_K_M, Q8_0"),
        ([], None, "no .gguf file"),
    ],
)
def test_names_that_do_not_tell(names: list[str], wanted: str | None, sentence: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        choose_gguf(paths(*names), "here", wanted)
    assert sentence in caught.value.message


class FakeHub:
    """Stands for huggingface_hub: writes the files that are asked for."""

    def __init__(self, folder: Path, listed: list[str]) -> None:
        self.folder, self.listed, self.patterns = folder, listed, list[str]()
        self.module = SimpleNamespace(HfApi=lambda **_: self, snapshot_download=self.download)

    def list_repo_files(self, repository: str, **_: Any) -> list[str]:
        return self.listed

    def download(self, repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        self.patterns = allow_patterns
        return str(self.folder)


def test_a_repository_of_gguf_files_is_not_downloaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeHub(tmp_path, [*FILES, "README.md", "config.json"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake.module)
    hub = ModelHub(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        assert hub.resolve("some/model") == tmp_path / FILES[2]
    assert "taking m-Q4_K_M-00001-of-00002.gguf" in caplog.text
    assert [name for name in fake.patterns if name.endswith(".gguf")] == FILES[2:]
    assert hub.resolve("some/model:Q8_0") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match=r"no \.gguf file of the type Q5_K"):
        hub.resolve("some/model:Q5_K")
    fake.listed.append("model.safetensors")
    assert hub.resolve("some/model") == tmp_path
    assert not any(name.endswith(".gguf") for name in fake.patterns)


def test_the_vision_part_of_a_model_in_a_folder_of_its_own_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(tmp_path, ["Q8_0/m-Q8_0.gguf", "Q4_0/m-Q4_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake.module)
    assert ModelHub(tmp_path / "cache").resolve("some/model:Q8_0") == tmp_path / "Q8_0/m-Q8_0.gguf"
    assert fake.patterns[-2:] == ["Q8_0/m-Q8_0.gguf", "mmproj-F16.gguf"]


def test_a_file_that_is_a_link_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache has links to files without names."""
    (tmp_path / "blob").touch()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "m.gguf").symlink_to(tmp_path / "blob")
    hub = ModelHub(tmp_path / "cache")
    for name in (snapshot, snapshot / "m.gguf"):
        assert hub.resolve(str(name)) == snapshot / "m.gguf"


def test_a_folder_with_several_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (*FILES, "config.json"):
        (tmp_path / name).touch()
    hub = ModelHub(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        assert hub.resolve(str(tmp_path)) == tmp_path / FILES[2]
    assert "has 5 .gguf files: taking m-Q4_K_M-00001-of-00002.gguf" in caplog.text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen2.5-coder:1.5b", "qwen2.5-coder-1.5b"),
        ("qwen2.5-coder:1.5b-instruct", "qwen2.5-coder-1.5b"),
        ("qwen2.5-coder", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF"),
        ("Llama3.2:3b", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
        ("llama3.2:3b-instruct-q8_0", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q8_0"),
        ("llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B-GGUF"),
        ("smollm2:135m", "smollm2-135m"),
        ("smollm2:135m-q8_0", "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF:Q8_0"),
        ("all-minilm", "all-minilm-l6-v2"),
        ("llama3.2:90b", None),
        ("llama3.2:3b-text", None),
        ("llama3.2:3b-q8_0-q4_0", None),
        ("unheard-of:7b", None),
        ("", None),
    ],
)
def test_names_of_ollama(name: str, meant: str | None) -> None:
    assert from_ollama_name(name) == meant


def test_a_name_of_ollama_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, FILES)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake.module)
    hub = ModelHub(tmp_path / "cache")
    assert hub.ensure("llama3.2:3b") == tmp_path / FILES[2]
    assert hub.ensure("llama3.2:3b-instruct-q8_0") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match="has not been fetched"):
        hub.resolve("qwen2.5-coder:1.5b")  # of the catalog, which needs no hub
    with pytest.raises(ModelLoadError, match=r"no model, file or folder called 'llama3\.2:90b'"):
        hub.ensure("llama3.2:90b")


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was downloaded before is served from the cache; another is refused by a sentence."""
    fake = FakeHub(tmp_path, FILES)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake.module)

    def fail(repository: str, **_: Any) -> list[str]:
        raise OSError("no route to host")

    monkeypatch.setattr(fake, "list_repo_files", fail)
    hub = ModelHub(tmp_path / "cache")
    sentence = (
        r"'llama3\.2:3b', which is 'bartowski/Llama-3\.2-3B-Instruct-GGUF', could not .* no route to host"
    )
    with pytest.raises(ModelLoadError, match=sentence):
        hub.ensure("llama3.2:3b")
    snapshot = tmp_path / "cache/hub/models--bartowski--Llama-3.2-3B-Instruct-GGUF/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").touch()
    assert hub.ensure("llama3.2:3b") == snapshot / "m-Q8_0.gguf"
    assert hub.ensure("llama3.2:3b-q8_0") == snapshot / "m-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match="no route to host"):
        hub.ensure("llama3.2:3b-q4_0")
