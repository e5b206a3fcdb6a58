"""Every setting, in one small frozen struct per room, composed in `ServeConfig`.

Resolved once, before anything is built; nothing changes it later. The command line and the TOML file are both
generated from these structs: a field `max_num_seqs` is the flag `--max-num-seqs` and the key `max_num_seqs`.
`Meta(description=...)` is the help text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str, Meta(description="A known model name, a Hugging Face id, a folder or a .gguf file.")
    ] = "smollm2-135m"
    served_model_name: (
        Annotated[str, Meta(description="Name that clients use for the model. Default: as given.")] | None
    ) = None
    device: Annotated[Device, Meta(description="Where to run: auto takes CUDA where there is one.")] = "auto"
    dtype: Annotated[
        DType, Meta(description="Compute type: auto takes bfloat16 where the hardware has it, else float32.")
    ] = "auto"
    quantization: (
        Annotated[Quantization, Meta(description="Quantize weights while loading: int8 (weight-only).")]
        | None
    ) = None
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
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of a GPU's memory that Penstock may use.", gt=0, le=1)
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV of prefixes seen before.")] = True
    max_pinned_fraction: Annotated[
        float, Meta(description="Share of the KV cache that pins may hold.", ge=0, le=1)
    ] = 0.5


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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one engine process needs. Serialised to it as JSON."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    num_threads: (
        Annotated[int, Meta(description="CPU threads for kernels. Default: every core.", ge=1)] | None
    ) = None
    steps_in_flight: (
        Annotated[
            int,
            Meta(
                description="Steps submitted before the first is collected. Default: 2 on a GPU, else 1.",
                ge=1,
                le=4,
            ),
        ]
        | None
    ) = None
    record_plans: (
        Annotated[str, Meta(description="File to log every scheduler call to, for replay and diagnosis.")]
        | None
    ) = None


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
    drain_timeout: Annotated[
        float, Meta(description="Seconds that running answers get to finish after SIGTERM.", ge=0)
    ] = 60.0
    max_body_bytes: Annotated[int, Meta(description="Largest request body.", ge=1024)] = 32 << 20


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    server: ServerConfig = ServerConfig()
