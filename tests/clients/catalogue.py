"""The clients that are run against a real server, one entry each, sorted by name. To add one: an entry here, a script
in `scripts/`, and a recipe in docs/clients.md.

A script finds the server in its environment: BASE_URL (without /v1), API_KEY and MODEL. It prints one JSON line per
capability, for example {"capability": "chat", "ok": true, "note": ""}. `ok` is null for what the client cannot do,
with the reason as the note. A line {"version": "17"} names the version of a client that no package manager installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
CAPABILITIES = ("chat", "stream", "tools", "structured", "files", "errors", "cancel")
AGENT = "agent"  # a scripted engine behind the real gateway, for coding agents; see agent_server.py
DEFAULT_MODEL = "smollm2-135m"
OTHER = "other"  # anything else that a client does; the note says what


@dataclass(frozen=True)
class Client:
    """One client. The suffix of the script says what runs it: .py, .mjs, .sh or .java."""

    name: str
    title: str  # in the table
    script: str
    capabilities: tuple[str, ...]  # each must be reported
    recipe: str  # the anchor of the recipe in docs/clients.md
    pip: tuple[str, ...] = ()  # with bounds; the first one's version is shown
    npm: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # needed on PATH beside the interpreter of the script
    environment: str = ""  # the folder below .clients, where several clients share packages
    model: str = DEFAULT_MODEL  # or AGENT, or "tiny": random weights with a context of 131,072 tokens
    serve: tuple[str, ...] = ()  # more arguments of `penstock serve`
    timeout_s: float = 300.0
    quick: bool = False  # runs in `make test`: its packages are dependencies of our tests already

    @property
    def folder(self) -> str:
        return self.environment or self.name

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script


CLIENTS: tuple[Client, ...] = (
    Client(
        "aider",
        "aider",
        "aider_cli.py",
        ("chat", "stream", "errors"),
        "aider",
        pip=("aider-chat>=0.86,<1",),
        timeout_s=900.0,
    ),
    Client(
        "anthropic",
        "anthropic (Python)",
        "anthropic_sdk.py",
        ("chat", "stream", "tools", "files", "errors", "cancel"),
        "anthropic",
        pip=("anthropic>=2,<3",),
        quick=True,
    ),
    Client(
        "anthropic-js",
        "@anthropic-ai/sdk",
        "anthropic_js.mjs",
        ("chat", "stream", "tools", "files", "errors", "cancel"),
        "anthropic",
        npm=("@anthropic-ai/sdk@^0",),
    ),
    Client(
        "browser",
        "a page in a browser (Node)",
        "browser.mjs",
        ("chat", "stream", "errors", "other"),
        "browsers",
        serve=("--allowed-origins", "https://app.example"),
    ),
    Client(
        "claude-code",
        "Claude Code",
        "claude_code.sh",
        ("chat", "stream", "tools", "errors"),
        "claude-code",
        npm=("@anthropic-ai/claude-code@^2",),
        model=AGENT,
    ),
    Client(
        "cline",
        "Cline",
        "cline_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "cline",
        npm=("cline@^3",),
        model=AGENT,
    ),
    Client(
        "codex",
        "Codex",
        "codex_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "codex",
        npm=("@openai/codex@^0",),
        model=AGENT,
    ),
    Client(
        "cohere",
        "cohere (Python)",
        "cohere_client.py",
        ("errors", "other"),
        "cohere",
        pip=("cohere>=5,<8",),
        model="all-minilm-l6-v2",
    ),
    Client(
        "continue",
        "Continue",
        "continue_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "continue",
        npm=("@continuedev/cli@^1",),
        model=AGENT,
    ),
    Client(
        "curl",
        "curl",
        "curl.sh",
        ("chat", "stream", "errors", "cancel"),
        "curl",
        commands=("curl", "gzip"),
    ),
    Client(
        "dspy",
        "DSPy",
        "dspy_client.py",
        ("chat", "stream", "tools", "structured", "errors"),
        "dspy",
        pip=("dspy>=3,<4",),
    ),
    Client(
        "guidellm",
        "GuideLLM",
        "guidellm_bench.py",
        ("stream", "other"),
        "guidellm",
        pip=("guidellm>=0.8,<0.9",),
        timeout_s=600.0,
    ),
    Client(
        "instructor",
        "instructor",
        "instructor_client.py",
        ("stream", "tools", "structured"),
        "instructor",
        pip=("instructor[anthropic]>=1.7,<2",),
    ),
    Client(
        "jdk",
        "JDK HttpClient",
        "jdk_http_client.java",
        ("chat", "stream", "errors", "cancel"),
        "java",
        commands=("javac",),
    ),
    Client(
        "langchain",
        "LangChain",
        "langchain_client.py",
        ("chat", "stream", "tools", "structured", "errors", "other"),
        "langchain",
        pip=("langchain-openai>=1,<2", "langchain-anthropic>=1,<2", "langchain-ollama>=1,<2"),
    ),
    Client(
        "langchain-tests",
        "LangChain's standard tests",
        "langchain_standard.py",
        ("chat", "stream", "tools", "structured", "other"),
        "langchain",
        pip=(
            "langchain-tests>=1,<2",
            "langchain-openai>=1,<2",
            "langchain-anthropic>=1,<2",
            "pytest-asyncio<2",
        ),
        timeout_s=3600.0,
    ),
    Client(
        "litellm",
        "LiteLLM",
        "litellm_client.py",
        ("chat", "stream", "tools", "structured", "errors", "other"),
        "litellm",
        pip=("litellm>=1.70,<2", "mcp"),  # which LiteLLM imports for tools, and does not ask for
    ),
    Client(
        "llama-index",
        "LlamaIndex",
        "llama_index_client.py",
        ("chat", "stream", "tools", "structured", "errors", "cancel"),
        "llamaindex",
        pip=("llama-index-core<1", "llama-index-llms-openai-like<1", "llama-index-llms-ollama<1"),
    ),
    Client(
        "llm",
        "llm",
        "llm_client.sh",
        ("chat", "stream", "tools", "structured", "errors"),
        "llm",
        pip=("llm>=0.26,<1",),
    ),
    Client(
        "lm-eval",
        "lm_eval",
        "lm_eval_harness.py",
        ("chat", "other"),
        "lm_eval",
        pip=("lm-eval[api]>=0.4.9,<0.5",),
        timeout_s=900.0,
    ),
    Client(
        "ollama",
        "ollama (Python)",
        "ollama_sdk.py",
        ("chat", "stream", "tools", "structured", "errors", "cancel", "other"),
        "ollama",
        pip=("ollama>=0.6,<1",),
        quick=True,
    ),
    Client(
        "open-webui",
        "Open WebUI",
        "open_webui.py",
        ("chat", "stream", "errors", "other"),
        "open-webui",
        pip=("open-webui>=0.6,<1",),
        timeout_s=1800.0,
    ),
    Client(
        "openai",
        "openai (Python)",
        "openai_sdk.py",
        ("chat", "stream", "tools", "structured", "files", "errors", "cancel", "other"),
        "openai",
        pip=("openai>=3,<4",),
        quick=True,
    ),
    Client(
        "openai-agents",
        "OpenAI Agents SDK",
        "openai_agents_client.py",
        ("chat", "stream", "tools", "structured", "errors"),
        "openai-agents",
        pip=("openai-agents<1",),
    ),
    Client(
        "openai-js",
        "openai (JavaScript)",
        "openai_js.mjs",
        ("chat", "stream", "tools", "structured", "files", "errors", "cancel"),
        "openai",
        npm=("openai@6", "zod@^4"),
    ),
    Client(
        "opencode",
        "opencode",
        "opencode_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "opencode",
        npm=("opencode-ai@1.18.18",),
        model=AGENT,
    ),
    Client(
        "outlines",
        "outlines",
        "outlines_client.py",
        ("chat", "stream", "structured"),
        "outlines",
        pip=("outlines[openai]>=1,<2",),
    ),
    Client(
        "pi",
        "pi",
        "pi_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "pi",
        npm=("@mariozechner/pi-coding-agent@^0",),
        model=AGENT,
    ),
    Client(
        "pydantic-ai",
        "Pydantic AI",
        "pydantic_ai_client.py",
        ("chat", "stream", "tools", "structured", "errors"),
        "pydantic-ai",
        pip=("pydantic-ai-slim[anthropic,openai]>=1,<2",),
    ),
    Client(
        "qwen-code",
        "Qwen Code",
        "qwen_code_cli.sh",
        ("chat", "stream", "tools", "errors"),
        "qwen-code",
        npm=("@qwen-code/qwen-code@^0",),
        model=AGENT,
    ),
    Client(
        "vercel-ai",
        "Vercel AI SDK",
        "vercel_ai.mjs",
        ("chat", "stream", "tools", "structured", "errors", "cancel"),
        "vercel-ai-sdk",
        npm=("ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3", "@ai-sdk/openai-compatible@2", "zod@^4"),
    ),
)
