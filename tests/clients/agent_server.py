"""A server for coding agents, whose prompts are huge: the real gateway before a scripted engine.

The engine calls the agent's shell once, and answers with a sentence when the shell's output has come back. So an
agent runs its whole loop without a model.
"""

from __future__ import annotations

import json
import threading
import time

import uvicorn

from penstock.api.app import create_app
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.request import Request
from penstock.gateway.gateway import Gateway
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted

MARK = "the-shell-was-here"
LAST_WORDS = "The agent has run its tool."
_SHELLS = {
    "exec_command": {"cmd": f"echo {MARK}"},  # Codex
    "Bash": {"command": f"echo {MARK}", "description": "Says something."},  # Claude Code, Continue
    "bash": {"command": f"echo {MARK}", "description": "Says something."},  # opencode, pi
    "run_commands": {"commands": [f"echo {MARK}"]},  # Cline
    "run_shell_command": {"command": f"echo {MARK}", "is_background": False},  # Qwen Code
}


def next_words(request: Request) -> str:
    prompt = prompt_of(request)
    tools, _, chat = prompt.partition("</tools>")
    shell = next((name for name in _SHELLS if f'"name": "{name}"' in tools), None)
    if shell is None or MARK in chat.rpartition("<|tool|>")[2].partition("<|assistant|>")[0]:
        return LAST_WORDS
    return f"<tool_call>{json.dumps({'name': shell, 'arguments': _SHELLS[shell]})}</tool_call>"


class AgentServer:
    """Serves from a thread of this process until `stop`."""

    def __init__(self, api_key: str) -> None:
        engine = scripted(next_words, template=TOOL_TEMPLATE, max_model_len=1_000_000)
        app = create_app(Gateway(engine, GatewayConfig()), ServerConfig(api_key=api_key))
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
