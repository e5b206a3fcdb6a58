"""Open WebUI in front of the server, through Open WebUI's own API: models, chats and streams of both connections (to
OpenAI's API and to Ollama's), an error, and a title that Open WebUI asks the model for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from report import API_KEY, BASE_URL, MODEL, capability

START_TIMEOUT_S = 900.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def open_webui(**settings: str) -> Iterator[str]:
    """The address of an Open WebUI without accounts and without downloads, and the rights of its only user."""
    port = free_port()
    environment = {
        **os.environ,
        "DATA_DIR": str(Path("data").absolute()),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "secret",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",
        "ENABLE_VERSION_UPDATE_CHECK": "False",
        "ANONYMIZED_TELEMETRY": "False",
        "OPENAI_API_BASE_URL": f"{BASE_URL}/v1",
        "OPENAI_API_KEY": API_KEY,
        "OLLAMA_BASE_URLS": BASE_URL,
        "OLLAMA_API_CONFIGS": json.dumps({"0": {"enable": True, "key": API_KEY, "prefix_id": "ollama"}}),
        **settings,
    }
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with Path("open-webui.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_up(url):
            said = Path("open-webui.log").read_text()[-1500:]
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def sign_in(url: str) -> requests.Session:
    session = requests.Session()
    answer = session.post(f"{url}/api/v1/auths/signin", json={"email": "", "password": ""}, timeout=60)
    answer.raise_for_status()
    session.headers["Authorization"] = f"Bearer {answer.json()['token']}"
    return session


with open_webui() as url:
    session = sign_in(url)

    def ask(model: str, **more: object) -> requests.Response:
        body = {"model": model, "messages": QUESTION, "max_tokens": 20, **more}
        stream = bool(more.get("stream"))
        return session.post(f"{url}/api/chat/completions", json=body, timeout=120, stream=stream)

    with capability("other", "models, titles"):
        found = session.get(f"{url}/api/models", timeout=60).json()["data"]
        names = [model["id"] for model in found]
        assert {MODEL, f"ollama.{MODEL}"} <= set(names), names
        task = {"model": MODEL, "messages": QUESTION, "chat_id": "none"}
        title = session.post(f"{url}/api/v1/tasks/title/completions", json=task, timeout=240)
        assert title.json()["choices"][0]["message"]["content"], title.text

    for name in (MODEL, f"ollama.{MODEL}"):
        with capability("chat"):
            answer = ask(name)
            assert answer.json()["choices"][0]["message"]["content"], answer.text

        with capability("stream"):
            events = [line.removeprefix(b"data: ") for line in ask(name, stream=True).iter_lines() if line]
            assert events[-1] == b"[DONE]", events
            chunks = [json.loads(event) for event in events[:-1]]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
            assert "".join(delta.get("content") or "" for delta in deltas), chunks

    with capability("errors"):
        refused = ask(MODEL, temperature=-5)
        assert refused.status_code == 400, refused.text
        assert "temperature" in refused.text, refused.text
