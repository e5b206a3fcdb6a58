"""The code that the playground shows makes the call that the playground makes: it is run, with the real SDKs."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted

FOLDER = resources.files("penstock.api").joinpath("static/console")
KEY = "key-of-the-samples"
MODULES = ("code_samples.js", "requests.js")
SCRIPT = """
import { samplesOf } from "./code_samples.js";
import { DEFAULT_SETTINGS, requestOf } from "./requests.js";
const { messages, settings, options } = JSON.parse(process.argv[2]);
const request = requestOf("bytes", messages, { ...DEFAULT_SETTINGS, ...settings });
console.log(JSON.stringify(samplesOf(request, options)));
"""
# Node has no packages here: this one records what the sample asks for, and asks with fetch.
OPENAI_PACKAGE = """
export default class OpenAI {
  constructor({ baseURL, apiKey }) {
    const at = (path) => ({ create: async (body) => {
      const headers = { authorization: `Bearer ${apiKey}`, "content-type": "application/json" };
      const answer = await fetch(baseURL + path, { method: "POST", headers, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error(await answer.text());
      if (!body.stream) return answer.json();
      const lines = (await answer.text()).split("\\n\\n").filter((line) => line.startsWith("data: {"));
      return lines.map((line) => JSON.parse(line.slice(6)));
    } });
    this.chat = { completions: at("/chat/completions") };
    this.completions = at("/completions");
  }
}
"""
ASKED = [{"role": "user", "text": 'It\'s "quoted" $HOME \\ `x`\nsecond line é'}]

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


@pytest.fixture(scope="module")
def served() -> Iterator[BoundedServed]:
    engine = scripted("fine answer", template=TOOL_TEMPLATE)
    with bounded_server(engine, ServerConfig(api_key=KEY)) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "samples.js").write_text(SCRIPT)
    for name in MODULES:
        (folder / name).write_text(FOLDER.joinpath(name).read_text())
    package = folder / "node_modules/openai"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "main": "index.js"}')
    (package / "index.js").write_text(OPENAI_PACKAGE)
    return folder


def samples(
    folder: Path, served: BoundedServed, settings: dict[str, Any], *, streams: bool = False
) -> list[dict[str, str]]:
    options = {"baseUrl": f"http://127.0.0.1:{served.port}", "hasKey": True, "isStreamed": streams}
    given = json.dumps({"messages": ASKED, "settings": settings, "options": options})
    done = subprocess.run(
        ["node", "samples.js", given], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def output_of(sample: dict[str, str], folder: Path) -> str:
    if sample["language"] == "python":  # in this process, which has imported the SDKs already
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(sample["code"], sample["title"], "exec"), {})
        return printed.getvalue()
    name, interpreter = {"bash": ("sample.sh", "bash"), "javascript": ("sample.js", "node")}[
        sample["language"]
    ]
    (folder / name).write_text(sample["code"])
    done = subprocess.run([interpreter, name], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, f"{sample['code']}\n{done.stderr}"
    if sample["title"] != "curl" or "data: " not in done.stdout:
        return done.stdout
    chunks = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    ("settings", "streams"),
    [
        ({"system": "Be brief.", "maxTokens": "32", "seed": "7", "stop": "END", "topP": "0.5"}, True),
        (
            {
                "tools": [{"name": "f", "description": "d", "parameters": '{"type": "object"}'}],
                "toolChoice": "none",
                "temperature": 0,
            },
            False,
        ),
        ({"mode": "completion", "maxTokens": "8"}, True),
    ],
    ids=["chat", "tools", "completion"],
)
def test_every_sample_asks_the_same(
    folder: Path,
    served: BoundedServed,
    settings: dict[str, Any],
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = samples(folder, served, settings, streams=streams)
    runs = [each for each in made if each["code"] and (each["title"] != "curl" or shutil.which("curl"))]
    asked = []
    for sample in runs:
        before = len(served.engine.added)
        assert "fine" in output_of(sample, folder), sample["title"]
        (request,) = served.engine.added[before:]
        sampling = request.sampling
        asked.append((prompt_of(request), sampling.temperature, sampling.top_p, sampling.seed, sampling.stop))
    assert len(asked) >= 2
    assert asked == [asked[0]] * len(asked)
    assert ASKED[0]["text"] in asked[0][0]
