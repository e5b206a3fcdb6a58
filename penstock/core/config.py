"""Every setting, in one small frozen struct per room, composed in `ServeConfig`.

Resolved once, before anything is built; nothing changes it later. The command line and the TOML file are both
generated from these structs: a field `max_num_seqs` is the flag `--max-num-seqs` and the key `max_num_seqs`.
`Meta(description=...)` is the help text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.core.identity import Scope
from penstock.core.request import Tier

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4", "fp8"]
RoutingPolicy = Literal["prefix-aware", "least-loaded", "power-of-two", "session-affinity", "round-robin"]
RedisPolicy = Literal["open", "closed"]
# Only signatures that a public key checks: with a shared secret, whoever can check a token could also make one.
TokenAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str, Meta(description="A known model name, a Hugging Face id, a folder or a .gguf file.")
    ] = "smollm2-135m"
    served_model_name: (
        Annotated[str, Meta(description="Name that clients use for the model. Default: as given.")] | None
    ) = None
    device: Annotated[Device, Meta(description="Where to run: auto takes CUDA where there is one.")] = "auto"
    dtype: Annotated[
        DType,
        Meta(
            description="Compute type: auto takes bfloat16 where the hardware has it, else float32. "
            "On a CPU only auto may round quantized weights again, to 8 bits, for speed."
        ),
    ] = "auto"
    quantization: (
        Annotated[Quantization, Meta(description="Round weights while loading: int8, int4 or fp8.")] | None
    ) = None
    attention_backend: Annotated[
        Literal["triton", "flashinfer"],
        Meta(description="Who computes attention over prompts on CUDA; flashinfer is an extra."),
    ] = "triton"
    max_model_len: (
        Annotated[
            int,
            Meta(description="Longest prompt plus answer, in tokens. Default: what the model allows.", ge=1),
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(description="Seed for requests that bring none, and for random weights.")] = 0
    load_format: Annotated[
        Literal["auto", "random"],
        Meta(
            description="auto reads the checkpoint; random fills weights from config.json alone, for benchmarks."
        ),
    ] = "auto"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(description="Tokens per KV block.", ge=16, le=16)] = 16
    kv_cache_memory: (
        Annotated[
            str,
            Meta(description="Memory for the KV cache, such as 512MiB or 8GiB. Default: 512MiB on a CPU."),
        ]
        | None
    ) = None
    num_kv_blocks: Annotated[int, Meta(description="KV blocks, instead of a memory size.", ge=2)] | None = (
        None
    )
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Meta(
            description="Type of cached keys and values: auto is the compute type; fp8 (CUDA only) and int8 halve it."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of a GPU's memory that Penstock may use.", gt=0, le=1)
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV of prefixes seen before.")] = True
    max_pinned_fraction: Annotated[
        float, Meta(description="Share of the KV cache that pins may hold.", ge=0, le=1)
    ] = 0.5
    kv_host_memory: (
        Annotated[
            str,
            Meta(
                description="Host memory for pinned KV that the cache has no room for, such as 4GiB; 0 for none. "
                "Default: as much as the KV cache, at most 4GiB."
            ),
        ]
        | None
    ) = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[int, Meta(description="Requests that run at once.", ge=1)] = 256
    max_num_batched_tokens: Annotated[int, Meta(description="Most tokens in one step.", ge=1)] = 2048
    itl_target_ms: (
        Annotated[
            float,
            Meta(description="Keep predicted steps under this while answers stream; 0 turns it off.", ge=0),
        ]
        | None
    ) = 100.0
    max_queue_requests: Annotated[int, Meta(description="Requests that may wait; more get 503.", ge=0)] = 1024
    max_queue_tokens: Annotated[int, Meta(description="Prompt tokens that may wait; more get 503.", ge=0)] = (
        1_000_000
    )
    max_output_tokens: (
        Annotated[int, Meta(description="Server cap on max_tokens. Default: the model's context.", ge=1)]
        | None
    ) = None
    queue_timeout_s: (
        Annotated[float, Meta(description="Longest wait for a first token's computation before 503.", gt=0)]
        | None
    ) = 600.0
    aging_s: Annotated[
        float,
        Meta(description="After this long in the queue a request counts as one tier more urgent.", gt=0),
    ] = 30.0
    min_cacheable_tokens: Annotated[
        int,
        Meta(description="Shortest prompt prefix that a cache breakpoint keeps; shorter ones are not.", ge=1),
    ] = 1024


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one replica is cut up over several processes, each with a device of its own."""

    tensor_parallel_size: Annotated[
        int, Meta(description="Ranks that each layer is cut over.", ge=1, le=64)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(description="Stages that the layers are shared out over.", ge=1, le=64)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="Place whole experts on the tensor-parallel ranks, not a slice of every expert."),
    ] = False

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_loras: Annotated[
        int, Meta(description="LoRA adapters that are loaded at once; requests for more wait.", ge=1)
    ] = 8
    max_lora_rank: Annotated[int, Meta(description="Largest rank of a LoRA adapter.", ge=1, le=512)] = 64


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one engine process needs. Serialised to it as JSON."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoRAConfig = LoRAConfig()
    parallel: ParallelConfig = ParallelConfig()
    num_threads: (
        Annotated[int, Meta(description="CPU threads for kernels. Default: every core.", ge=1)] | None
    ) = None
    steps_in_flight: (
        Annotated[
            int,
            Meta(
                description="Steps submitted before the first is collected. "
                "Default: 2 on a GPU or in stages, else 1.",
                ge=1,
                le=4,
            ),
        ]
        | None
    ) = None
    kv_transfer: Annotated[
        bool,
        Meta(description="Exchange KV blocks with other replicas, through NIXL (penstock[disaggregation])."),
    ] = False
    record_plans: (
        Annotated[str, Meta(description="File to log every scheduler call to, for replay and diagnosis.")]
        | None
    ) = None


class NamesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients may call models, as far as it is settled at the start: `[[models]]` of the file, and flags."""

    first: str = ""  # the model of requests that name none; empty: whichever is ready
    aliases: dict[str, str] = {}  # to the name of a served model
    adapters: tuple[tuple[str, str, str | None], ...] = ()  # LoRA: name, folder, base model (None: the first)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_stream_buffer_bytes: Annotated[
        int, Meta(description="Text held for a slow reader before its request is aborted.", ge=1024)
    ] = 1 << 20
    default_max_tokens: (
        Annotated[
            int,
            Meta(description="max_tokens for chat requests without one. Default: up to the context.", ge=1),
        ]
        | None
    ) = None
    request_timeout_s: (
        Annotated[float, Meta(description="Longest life of one request. Default: none.", gt=0)] | None
    ) = None
    settings: (
        Annotated[
            str,
            Meta(
                description="TOML file with limits, prices, policies, tiers and caches; read again when it changes."
            ),
        ]
        | None
    ) = None
    redis_url: (
        Annotated[str, Meta(description="redis://… that gateways share limits through. Default: none.")]
        | None
    ) = None
    redis_policy: Annotated[
        RedisPolicy,
        Meta(description="While Redis is gone: open applies limits in each process, closed answers 503."),
    ] = "open"
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "gemma"],
        Meta(description="How the model writes tool calls. auto: as its chat template shows."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        Meta(description="How the model marks its reasoning. auto: as its chat template shows."),
    ] = "auto"
    embedding_cache_memory: Annotated[
        str, Meta(description="Memory for vectors of texts embedded before, such as 256MiB; 0 for none.")
    ] = "64MiB"
    stored_response_days: Annotated[
        float, Meta(description="How long a stored response can be looked up or continued.", gt=0)
    ] = 30.0
    names: NamesConfig = NamesConfig()


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where keys, usage, files and batches are kept. Nothing is written before one of them is used."""

    data_dir: (
        Annotated[
            str, Meta(description="Folder for the database and files. Default: ~/.local/state/penstock.")
        ]
        | None
    ) = None
    database_url: (
        Annotated[
            str, Meta(description="postgresql://… or sqlite:///…. Default: a SQLite file in the data folder.")
        ]
        | None
    ) = None


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens to the record of every request's usage."""

    usage_ledger: (
        Annotated[
            bool,
            Meta(
                description="Keep a row for every request in the database. "
                "Default: where keys have been made or tokens are taken, and where the settings file has prices."
            ),
        ]
        | None
    ) = None
    when_unrecorded: Annotated[
        Literal["serve", "refuse"],
        Meta(description="What to do with new requests while usage cannot be written down (a full disk)."),
    ] = "serve"
    usage_sync_s: (
        Annotated[
            float,
            Meta(
                description="Sync the usage journal to the disk so often, where power may fail. Default: never.",
                gt=0,
            ),
        ]
        | None
    ) = None


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bearer tokens (JWT) of an identity provider, as an alternative to keys. The table `[oidc]` of the file.

    A claim may be a dotted path. The maps translate what the provider writes into what Penstock knows."""

    issuer: str
    audience: str
    jwks_url: str | None = None  # None asks the issuer's discovery document
    algorithms: tuple[TokenAlgorithm, ...] = ("RS256", "ES256")
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 30.0  # between our clock and the issuer's
    workspace_claim: str = "workspace"
    workspaces: dict[str, str] = {}  # the claim's value → a workspace's id; empty: the claim holds the id
    default_workspace: str | None = None  # for tokens without the claim; None refuses them
    scopes_claim: str = "scope"  # words in one text, or a list
    scopes: dict[str, Scope] = msgspec.field(
        default_factory=lambda: {f"penstock:{scope}": scope for scope in Scope}
    )
    default_scopes: tuple[Scope, ...] = (Scope.INFERENCE,)  # for tokens in which no word is known
    tier_claim: str = "tier"
    tiers: dict[str, Tier] = msgspec.field(default_factory=lambda: {str(tier): tier for tier in Tier})
    default_tier: Tier = Tier.DEFAULT
    models_claim: str | None = None  # a list of models that the token may use; None allows every model


class TenantsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    require_keys: (
        Annotated[
            bool,
            Meta(
                description="Ask every caller for a key or token. "
                "Default: beyond loopback, and wherever keys have been made."
            ),
        ]
        | None
    ) = None
    oidc: OidcConfig | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="Address to listen on. Beyond loopback a key is required.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_key: Annotated[str, Meta(description="Key that clients must send as a bearer token.")] | None = None
    allow_open: Annotated[
        bool,
        Meta(description="Listen beyond loopback without a key. Anyone who reaches the port can use it."),
    ] = False
    api_workers: Annotated[
        int,
        Meta(
            description="Gateway processes that share the port, for machines with many cores.", ge=1, le=256
        ),
    ] = 1
    drain_timeout: Annotated[
        float, Meta(description="Seconds that running answers get to finish after SIGTERM.", ge=0)
    ] = 60.0
    max_body_bytes: Annotated[int, Meta(description="Largest request body.", ge=1024)] = 32 << 20
    max_connections: Annotated[
        int, Meta(description="Open connections; more are refused with 503.", ge=1)
    ] = 16_384
    max_websockets: Annotated[int, Meta(description="Open WebSockets; more are refused with 503.", ge=0)] = (
        10_000
    )
    max_websocket_requests: Annotated[
        int, Meta(description="Requests that one WebSocket runs at once.", ge=1)
    ] = 64
    websocket_idle_timeout_s: Annotated[
        float, Meta(description="Close a WebSocket on which nothing runs after so long.", gt=0)
    ] = 600.0
    header_timeout_s: Annotated[
        float, Meta(description="Time that a client gets to send a request's headers.", gt=0)
    ] = 20.0
    body_timeout_s: Annotated[
        float, Meta(description="How often at least 16 KiB of a request's body must arrive.", gt=0)
    ] = 30.0
    max_header_bytes: Annotated[
        int, Meta(description="Largest head of a request: its path and all headers.", ge=1024)
    ] = 32 << 10
    write_timeout_s: Annotated[
        float, Meta(description="Drop a connection whose client reads nothing for so long.", gt=0)
    ] = 60.0


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    log_format: Annotated[
        Literal["text", "json"], Meta(description="How log lines look; json also turns on --access-log.")
    ] = "text"
    access_log: (
        Annotated[bool, Meta(description="Write a line for every request. Default: with --log-format json.")]
        | None
    ) = None
    log_prompts: Annotated[
        bool, Meta(description="Let access lines hold the text of prompts, which may be personal.")
    ] = False
    otlp_endpoint: (
        Annotated[
            str, Meta(description="OpenTelemetry collector to send traces to, such as http://localhost:4318.")
        ]
        | None
    ) = None


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many engines there are, and how requests are shared out among them."""

    replicas: Annotated[
        int, Meta(description="Engine processes that serve the model, sharing this machine.", ge=1, le=1024)
    ] = 1
    prefill_replicas: Annotated[
        int,
        Meta(
            description="Engines that compute long prompts and hand their KV to those that decode, "
            "instead of --replicas; needs --decode-replicas.",
            ge=0,
            le=1024,
        ),
    ] = 0
    decode_replicas: Annotated[
        int, Meta(description="Engines that answer with KV from --prefill-replicas.", ge=0, le=1024)
    ] = 0
    routing_policy: Annotated[
        RoutingPolicy, Meta(description="How a request finds its replica, where there are several.")
    ] = "prefix-aware"
    region: Annotated[str, Meta(description="Name of the place where this server's replicas run.")] = ""
    heartbeat_timeout_s: Annotated[
        float, Meta(description="Kill and restart a replica that is silent for so long.", gt=0)
    ] = 5.0
    cluster: Annotated[
        Literal["local", "ray"],
        Meta(description="Where replicas run: processes of this machine, or actors of a Ray cluster."),
    ] = "local"
    ray_address: (
        Annotated[
            str,
            Meta(description="Ray cluster to join, such as ray-head:6379. Default: one on this machine."),
        ]
        | None
    ) = None


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the number of replicas changes. Without a floor and a ceiling it does not."""

    min_replicas: (
        Annotated[int, Meta(description="Fewest replicas of a model; 0 ends the last one when idle.", ge=0)]
        | None
    ) = None
    max_replicas: (
        Annotated[int, Meta(description="Most replicas of a model. Default: their number stays.", ge=1)]
        | None
    ) = None
    ttft_target_ms: Annotated[
        float, Meta(description="Start replicas when the p95 time to first token is above this.", gt=0)
    ] = 1000.0
    queue_target_s: Annotated[
        float, Meta(description="Start replicas when queued prompts would take longer than this.", gt=0)
    ] = 2.0
    kv_usage_target: Annotated[
        float,
        Meta(description="Start replicas when more than this share of KV blocks is in use.", gt=0, le=1),
    ] = 0.85
    scale_up_pause_s: Annotated[
        float, Meta(description="After starting replicas, wait so long before starting more.", ge=0)
    ] = 30.0
    scale_down_pause_s: Annotated[
        float, Meta(description="How long fewer replicas must have been enough before one leaves.", ge=0)
    ] = 120.0
    scale_to_zero_after_s: Annotated[
        float,
        Meta(description="With --min-replicas 0: how long nothing may come before the last leaves.", ge=0),
    ] = 300.0


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names beside that of the first model. What a file says in `[[models]]` is in `ServeConfig.models`."""

    also_serve: Annotated[
        tuple[str, ...], Meta(description="Another model to serve, as MODEL or NAME=MODEL; can be repeated.")
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        Meta(description="LoRA adapter to serve under a name of its own, as NAME=FOLDER; can be repeated."),
    ] = ()
    external: Annotated[
        tuple[str, ...],
        Meta(description="URL of another OpenAI-compatible server to pass requests on to; can be repeated."),
    ] = ()


class ExternalServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another server whose models are served here too: `[[external]]` of the file, or `--external URL`."""

    url: str  # with or without /v1 at its end
    name: str = ""  # in logs and metrics; empty: host and port
    models: dict[str, str] = {}  # what clients call them → what the server does; empty: all that it lists
    region: str = ""
    api_key: str | None = (
        None  # never in a file: from the environment variable that `api_key_variable` names there
    )


class ExtraModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is served beside the first, by engines of its own."""

    engine: EngineConfig
    replicas: int = 1
    region: str = ""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    models: tuple[ExtraModelConfig, ...] = ()
    external: tuple[ExternalServerConfig, ...] = ()
    runs_engines: bool = True  # False: only external servers answer
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    ledger: LedgerConfig = LedgerConfig()
    tenants: TenantsConfig = TenantsConfig()
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
