"""The settings of a gateway: names, limits, store, callers, HTTP, telemetry. See `config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.core.figures import Count, CountOrZero, NotNegative, Positive
from penstock.core.identity import Scope
from penstock.core.request import Tier

RedisPolicy = Literal["open", "closed"]
# Asymmetric signatures only: with a shared secret, a server that can verify a token could also issue one.
TokenAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


# Other servers' names for the same formats come last.
# fmt: off
ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "mistral_args", "gemma", "granite",
    "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder", "minimax_m2", "harmony", "seed_oss",
    "lfm2", "nemotron", "gemma4", "deepseek_v32", "deepseek_v4", "command", "jamba", "olmo3", "apertus",
    "functiongemma", "functionary", "minicpm5", "hy_v3", "solar_open", "minimax_m3", "internlm", "phi4_mini",
    "gigachat3", "longcat", "command_r", "llama4_pythonic", "llama4_json", "openai", "qwen3_xml", "glm47",
    "hunyuan_a13b", "cohere_command3", "granite-20b-fc", "phi4_mini_json", "minicpm5xml", "xlam",
]
ReasoningParser = Literal[
    "auto", "none", "think", "deepseek_r1", "mistral", "seed_oss", "granite", "gemma4", "harmony",
    "command", "apertus", "hunyuan", "responses", "minimax_m3", "hy_v3", "solar_open", "apriel", "qwen3",
    "glm45", "minimax_m2", "kimi_k2", "openai", "olmo3", "hunyuan_a13b", "cohere_command3", "ernie45",
]
# fmt: on


class NamesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names of models for clients that are known at the start: from `[[models]]` of the file, and flags."""

    first: str = ""  # the model of requests that name none; empty: any ready model
    aliases: dict[str, str] = {}  # to the name of a served model
    adapters: tuple[tuple[str, str, str | None], ...] = ()  # LoRA: name, folder, base model (None: the first)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_stream_buffer_bytes: Annotated[
        int,
        Meta(ge=1024),
        "Text of all answers to a request that is held for a slow reader before the request is aborted. "
        "Slow readers together have 256 times as much, and those in one workspace three quarters of that at most.",
    ] = 1 << 20
    default_max_tokens: Annotated[
        Count | None, "max_tokens for chat requests without one. Default: up to the context."
    ] = None
    refuse_long_outputs: Annotated[
        bool, "Refuse a max_tokens that does not fit, instead of lowering it to what fits."
    ] = False
    request_timeout_s: Annotated[Positive | None, "Maximum duration of one request. Default: none."] = None
    settings: Annotated[
        str | None,
        "TOML file with limits, prices, policies, tiers and caches; read again when it changes. Not used where "
        "the database has settings.",
    ] = None
    seed_settings: Annotated[
        bool,
        "Write the settings file to the database if the database has no settings; all gateways then follow the "
        "database.",
    ] = False
    redis_url: Annotated[str | None, "redis://… that gateways share limits through. Default: none."] = None
    redis_policy: Annotated[
        RedisPolicy, "While Redis is unavailable: open applies limits in each process, closed answers 503."
    ] = "open"
    tool_call_parser: Annotated[
        ToolCallParser, "How the model writes tool calls. auto: as its chat template shows."
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, "How the model marks its reasoning. auto: as its chat template shows."
    ] = "auto"
    embedding_cache_memory: Annotated[str, "Memory for cached embeddings, such as 256MiB; 0 for none."] = (
        "64MiB"
    )
    stored_response_days: Annotated[Positive, "How long a stored response can be looked up or continued."] = (
        30.0
    )
    stored_response_bytes: Annotated[
        Count, "Bytes of stored responses that a workspace may keep; the oldest go first."
    ] = 1 << 30
    max_images: Annotated[CountOrZero, "Images that one request may have; 0 refuses all images."] = 16
    max_image_bytes: Annotated[Count, "Largest file of an image."] = 20 << 20
    max_image_pixels: Annotated[
        Count, "Most pixels of an image; the image is refused before it is decoded."
    ] = 40_000_000
    allowed_image_hosts: Annotated[
        tuple[str, ...],
        "Host that images may be fetched from by URL, also by external servers, such as images.example or "
        "*.example.com, or * for all names; can be repeated. A private address must be named itself, such as "
        "10.1.2.3 or 10.1.0.0/16. Default: none.",
    ] = ()
    image_fetch_timeout_s: Annotated[Positive, "Timeout for fetching an image by URL."] = 10.0
    names: NamesConfig = NamesConfig()


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the store of keys, usage, files and batches. Nothing is written before one of them is used."""

    data_dir: Annotated[
        str | None, "Folder for the database and files. Default: ~/.local/state/penstock."
    ] = None
    database_url: Annotated[
        str | None, "postgresql://… or sqlite:///…. Default: a SQLite file in the data folder."
    ] = None
    files_url: Annotated[
        str | None,
        "Storage for files and batches: s3://bucket/prefix, or a folder that all gateways share. Default: "
        "files in the data folder.",
    ] = None


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the ledger, which records every request's usage."""

    usage_ledger: Annotated[
        bool | None,
        "Keep a row for every request in the database. Default: where keys have been made or tokens are taken, "
        "and where the settings file has prices.",
    ] = None
    when_unrecorded: Annotated[
        Literal["serve", "refuse"],
        "What to do with new requests while usage cannot be recorded (a full disk).",
    ] = "serve"
    usage_sync_s: Annotated[
        Positive | None,
        "Seconds between syncs of the usage journal to the disk, against power failures. Default: never.",
    ] = None


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bearer tokens (JWT) of an identity provider, as an alternative to keys. The table `[oidc]` of the file.

    A claim may be a dotted path. The maps translate the provider's values into Penstock's."""

    issuer: str
    audience: str
    jwks_url: str | None = None  # None asks the issuer's discovery document
    algorithms: tuple[TokenAlgorithm, ...] = ("RS256", "ES256")
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 30.0  # between our clock and the issuer's
    workspace_claim: str = "workspace"
    workspaces: dict[str, str] = {}  # the claim's value → a workspace's id; empty: the claim holds the id
    default_workspace: str | None = None  # for tokens without the claim; None refuses them
    scopes_claim: str = "scope"  # a text of words, or a list
    scopes: dict[str, Scope] = msgspec.field(
        default_factory=lambda: {f"penstock:{scope}": scope for scope in Scope}
    )
    default_scopes: tuple[Scope, ...] = (Scope.INFERENCE,)  # for tokens in which no word is known
    tier_claim: str = "tier"
    tiers: dict[str, Tier] = msgspec.field(default_factory=lambda: {str(tier): tier for tier in Tier})
    default_tier: Tier = Tier.DEFAULT
    models_claim: str | None = None  # a list of models that the token may use; None allows every model
    # Sign-in with a browser, for the console and the playground. None offers none.
    client_id: str | None = None
    client_secret_file: str | None = None  # for providers that want more than PKCE
    sign_in_scopes: tuple[str, ...] = ("openid",)


class TenantsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    require_keys: Annotated[
        bool | None,
        "Ask every caller for a key or token. Default: beyond loopback, and wherever keys have been made.",
    ] = None
    oidc: OidcConfig | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, "Address to listen on. Beyond loopback a key is required."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "Port to listen on; 0 takes a free one."] = 8000
    api_key: Annotated[str | None, "Key that clients must send as a bearer token."] = None
    allow_open: Annotated[
        bool, "Listen beyond loopback without a key. Anyone who reaches the port can use it."
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        "Origin of web pages that may call this server (CORS), such as https://app.example, or *; can be "
        "repeated.",
    ] = ()
    ssl_certfile: Annotated[str | None, "Certificate chain in PEM, to serve HTTPS."] = None
    ssl_keyfile: Annotated[str | None, "Private key of the certificate, unless --ssl-certfile holds it."] = (
        None
    )
    api_workers: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        "Gateway processes that share the port, for machines with many cores. Default: 1; up to 4 where keys "
        "have been made and only external servers answer.",
    ] = None
    lame_duck_s: Annotated[
        NotNegative,
        "Seconds after SIGTERM in which /ready fails but requests are still taken, so that load balancers can "
        "switch to other servers first.",
    ] = 0.0
    drain_timeout: Annotated[
        NotNegative, "Seconds that running answers get to finish once new requests are refused."
    ] = 60.0
    max_body_bytes: Annotated[int, Meta(ge=1024), "Largest request body."] = 32 << 20
    max_pending_body_bytes: Annotated[
        int,
        Meta(ge=1024),
        "Bytes of all request bodies that have not arrived in full or wait to be decoded; a workspace may hold "
        "a quarter. Large bodies of requests that wait or run may have four times as much. More are refused with "
        "503 or 429.",
    ] = 1 << 30
    max_unread_bytes: Annotated[
        int,
        Meta(ge=1024),
        "Bytes of answers that wait for slow readers, on all connections. A workspace may hold three quarters; "
        "beyond that, its connections that read nothing end.",
    ] = 1 << 30
    max_connections: Annotated[Count, "Open connections; more are refused with 503."] = 16_384
    max_websockets: Annotated[CountOrZero, "Open WebSockets; more are refused with 503."] = 10_000
    max_websocket_requests: Annotated[Count, "Requests that one WebSocket runs at once."] = 64
    websocket_idle_timeout_s: Annotated[
        Positive, "Close a WebSocket that has been idle for this many seconds."
    ] = 600.0
    header_timeout_s: Annotated[Positive, "Time that a client gets to send a request's headers."] = 20.0
    body_timeout_s: Annotated[Positive, "How often at least 16 KiB of a request's body must arrive."] = 30.0
    max_header_bytes: Annotated[
        int, Meta(ge=1024), "Largest head of a request: its path and all headers."
    ] = 32 << 10
    write_timeout_s: Annotated[
        Positive,
        "How often a client must read at least 16 KiB of the bytes that wait for it, or all of them.",
    ] = 60.0

    @property
    def num_api_workers(self) -> int:
        return self.api_workers or 1


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    log_format: Annotated[
        Literal["text", "json"], "Format of log lines; json also turns on --access-log."
    ] = "text"
    access_log: Annotated[bool | None, "Write a line for every request. Default: with --log-format json."] = (
        None
    )
    log_prompts: Annotated[
        bool, "Include the text of prompts, which may be personal, in access log lines."
    ] = False
    keep_history: Annotated[
        bool, "Keep the console's history in the database, so that it survives a restart."
    ] = False
    show_prompts: Annotated[bool, "Let the console show the text of prompts, which may be personal."] = False
    record_requests: Annotated[
        str | None,
        "File to write the times, lengths and prefix hashes of requests to, for penstock simulate and penstock "
        "plan. Never text.",
    ] = None
    otlp_endpoint: Annotated[
        str | None, "OpenTelemetry collector to send traces to, such as http://localhost:4318."
    ] = None
