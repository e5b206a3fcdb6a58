"""Every setting of Penstock, in one small frozen struct per room, composed in `ServeConfig`.

Settings are resolved once, before anything is built, and never change later. The command line and the TOML file are
both generated from these structs: a field `max_num_seqs` is the flag `--max-num-seqs` and the key `max_num_seqs`.
The text in `Annotated` is the help text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.core.engine_config import EngineConfig
from penstock.core.figures import Count, CountOrZero, NotNegative, Positive, Share
from penstock.core.gateway_config import (
    GatewayConfig,
    LedgerConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
    TenantsConfig,
)
from penstock.core.objective import RoutingPolicy

Placement = Literal["pack", "strict-pack", "strict-spread"]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of engines: how many there are, and how requests are distributed among them."""

    replicas: Annotated[
        int, Meta(ge=1, le=1024), "Engine processes that serve the model, sharing this machine."
    ] = 1
    prefill_replicas: Annotated[
        int,
        Meta(ge=0, le=1024),
        "Engines that compute long prompts and hand their KV to those that decode, instead of --replicas; "
        "without --decode-replicas only in a shared fleet.",
    ] = 0
    decode_replicas: Annotated[
        int, Meta(ge=0, le=1024), "Engines that answer with KV from --prefill-replicas."
    ] = 0
    routing_policy: Annotated[RoutingPolicy, "Policy that chooses the replica of a request."] = "prefix-aware"
    record_dispatch: Annotated[
        str | None,
        "File to log every decision of the fleet to, for replay and diagnosis. Holds prompts and answers.",
    ] = None
    region: Annotated[str, "Region in which this server's replicas run."] = ""
    heartbeat_timeout_s: Annotated[
        Positive, "Kill and restart a replica that is silent for this many seconds."
    ] = 5.0
    cluster: Annotated[
        Literal["local", "ray"], "Where replicas run: processes of this machine, or actors of a Ray cluster."
    ] = "local"
    registry: Annotated[
        str | None,
        "Registry of a shared fleet, for penstock engine and penstock gateway: redis://HOST:6379/0, "
        "postgresql://HOST/DATABASE or kubernetes://NAMESPACE.",
    ] = None
    join_token: Annotated[
        str | None,
        "Secret that the machines of a shared fleet have in common. A second one after a comma is accepted "
        "too, to rotate tokens.",
    ] = None
    engine_host: Annotated[
        str, "Address of this machine at which gateways of a shared fleet reach its engines."
    ] = "127.0.0.1"
    control_host: Annotated[
        str, "Address of this machine at which gateways of a shared fleet reach penstock control."
    ] = "127.0.0.1"
    ready_file: Annotated[
        str | None,
        "File that exists while penstock engine or penstock control is ready, for probes: neither answers HTTP "
        "requests.",
    ] = None
    ray_address: Annotated[
        str | None, "Ray cluster to join, such as ray-head:6379. Default: one on this machine."
    ] = None
    ray_placement: Annotated[
        Placement,
        "Nodes for the stages of a replica on Ray: as few as have room (pack), one (strict-pack), or one for "
        "each stage (strict-spread).",
    ] = "pack"


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of autoscaling. Without a floor and a ceiling the number of replicas does not change."""

    min_replicas: Annotated[
        CountOrZero | None, "Fewest replicas of a model; 0 ends the last one when idle."
    ] = None
    max_replicas: Annotated[
        Count | None, "Most replicas of a model. Default: the number of replicas is fixed."
    ] = None
    ttft_target_ms: Annotated[Positive, "Start replicas when the p95 time to first token is above this."] = (
        1000.0
    )
    queue_target_s: Annotated[Positive, "Start replicas when queued prompts would take longer than this."] = (
        2.0
    )
    kv_usage_target: Annotated[
        Share, "Start replicas when more than this fraction of KV blocks is in use."
    ] = 0.85
    scale_up_pause_s: Annotated[
        NotNegative, "Seconds to wait after starting replicas before starting more."
    ] = 30.0
    scale_down_pause_s: Annotated[
        NotNegative, "Seconds for which fewer replicas must have been enough before one is stopped."
    ] = 120.0
    scale_to_zero_after_s: Annotated[
        NotNegative, "With --min-replicas 0: seconds without requests before the last replica is stopped."
    ] = 300.0


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names in addition to the first model's name. `ServeConfig.models` holds the `[[models]]` of a file."""

    also_serve: Annotated[
        tuple[str, ...], "Another model to serve, as MODEL or NAME=MODEL; can be repeated."
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...], "LoRA adapter to serve under a name of its own, as NAME=FOLDER; can be repeated."
    ] = ()
    external: Annotated[
        tuple[str, ...], "URL of another OpenAI-compatible server to pass requests on to; can be repeated."
    ] = ()


Discover = Literal["dns", "srv", "kubernetes"]
Dialect = Literal["openai", "azure", "anthropic"]


class ExternalServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another server whose models are served here too: `[[external]]` of the file, or `--external URL`."""

    url: str  # with or without /v1 at its end
    name: str = ""  # in logs and metrics; empty: host and port
    models: dict[str, str] = {}  # the clients' names → the server's names; empty: all listed models
    discover: Discover | None = None  # how the URL's host is resolved to several servers
    address: str = ""  # to connect to instead of the URL's host, once it is known
    port: int | None = None  # to connect to instead of the URL's, once it is known
    region: str = ""
    cost: float = 0.0  # per token, in any unit: requests go to cheaper servers first, while these have room
    max_concurrent: int | None = None  # requests at a time; more wait here, by tier
    # True if the server continues an assistant's message; None: decided by the kind of server.
    continues: bool | None = None
    dialect: Dialect = "openai"  # the API that the server speaks
    api_version: str = ""  # of Azure
    api_key_header: str = ""  # "authorization" has "Bearer" before the key; empty: the dialect's default
    takes_cache_control: bool = False  # whether marks of prompt caching are passed on; Anthropic's always are
    # True if clients may see the number of cached tokens, which may reveal other clients' prompts.
    shows_cached_tokens: bool = False
    # Never in a file: from the environment variable that `api_key_variable` names there.
    api_key: str | None = None


class ExtraModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is served in addition to the first, by engines of its own."""

    engine: EngineConfig
    replicas: int = 1
    region: str = ""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    models: tuple[ExtraModelConfig, ...] = ()
    external: tuple[ExternalServerConfig, ...] = ()
    # The file with the tables of external servers, which is read again when it changes.
    external_file: str | None = None
    external_urls: tuple[str, ...] = ()  # of external servers that are not in the file
    runs_engines: bool = True  # False: only external servers answer
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    ledger: LedgerConfig = LedgerConfig()
    tenants: TenantsConfig = TenantsConfig()
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
