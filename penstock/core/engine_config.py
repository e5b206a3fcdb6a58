"""The settings of an engine: model, cache, scheduler, ranks. See `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.figures import Count, CountOrZero, NotNegative, Positive, Share, ShareOrZero
from penstock.core.request import SamplingDefaults

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4", "fp8"]
LoadFormat = Literal["auto", "pt", "random"]
ModelImplementation = Literal["auto", "native", "transformers"]
LengthBins = Literal["off", "tenant", "prompt"]
DEFAULT_CPU_KV_MEMORY = "512MiB"
TierShares = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){2}$", max_length=64)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, "A known model name, a Hugging Face id, a folder or a .gguf file."] = "smollm2-135m"
    served_model_name: Annotated[
        str | None,
        "Name that clients use for the model. Default: as given. More names, after a comma or with the flag "
        "again, are aliases.",
    ] = None
    device: Annotated[Device, "Device to run on. auto: a CUDA GPU if there is one, else the CPU."] = "auto"
    dtype: Annotated[
        DType,
        "Compute type: auto takes bfloat16 where the hardware has it, else float32. On a CPU, only auto may "
        "turn the inputs of quantized weights into two bytes each, for speed.",
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        "Quantize the weights while loading: int8, int4 or fp8. Quantized checkpoints need no flag.",
    ] = None
    model_implementation: Annotated[
        ModelImplementation,
        "The code that runs the model: native, or the transformers library (an extra) with paged attention. "
        "Auto: transformers for architectures that are not native.",
    ] = "auto"
    trust_remote_code: Annotated[
        bool, "Run Python code that comes with a model, if transformers has none for it."
    ] = False
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer"],
        "The kernels of attention over prompts on CUDA: triton (also with auto), or flashinfer, an extra.",
    ] = "auto"
    max_model_len: Annotated[
        Count | None, "Maximum length of prompt and answer together, in tokens. Default: the model's maximum."
    ] = None
    seed: Annotated[int, "Seed for requests without one, and for random weights."] = 0
    load_format: Annotated[
        LoadFormat,
        "auto reads safetensors or GGUF; pt reads pytorch_model.bin, unpickling tensors only; random fills "
        "weights from config.json alone, for benchmarks.",
    ] = "auto"

    mmproj: Annotated[
        str,
        "The vision part of a GGUF model: auto takes an mmproj file beside the model, none takes text only, "
        "FILE reads that file.",
    ] = "auto"
    chat_template: Annotated[
        str | None, "FILE with a chat template in Jinja, or the template itself, in place of the model's."
    ] = None
    generation_config: Annotated[
        str,
        "Where sampling defaults come from: auto reads the model's generation_config.json, none (or vllm) "
        "reads nothing, FOLDER reads the file there.",
    ] = "auto"
    override_generation_config: Annotated[
        str, 'Sampling defaults as JSON, such as {"temperature": 0.6}, in place of the defaults of the model.'
    ] = "{}"
    hf_overrides: Annotated[
        str,
        'Settings as JSON in place of those in config.json, such as {"rope_scaling": {"rope_type": "yarn", '
        '"factor": 4.0, "original_max_position_embeddings": 32768}}.',
    ] = "{}"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(ge=16, le=16), "Tokens per KV block."] = 16
    kv_cache_memory: Annotated[
        str | None,
        "Memory for the KV cache, such as 512MiB or 8GiB. Default on a CPU: 512MiB, at most a quarter of the "
        "memory.",
    ] = None
    num_kv_blocks: Annotated[Annotated[int, Meta(ge=2)] | None, "KV blocks, instead of a memory size."] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        "Type of cached keys and values: auto is the compute type; fp8 (CUDA only) and int8 halve it.",
    ] = "auto"
    gpu_memory_utilization: Annotated[Share, "Fraction of a GPU's memory that Penstock may use."] = 0.9
    enable_prefix_caching: Annotated[
        bool, "Reuse the KV of prefixes that earlier requests have computed."
    ] = True
    max_pinned_fraction: Annotated[ShareOrZero, "Fraction of the KV cache that pinned blocks may use."] = 0.5
    kv_host_memory: Annotated[
        str | None,
        "Host memory for KV that was evicted from the cache, such as 4GiB; 0 for none. Default: the size of "
        "the KV cache, at most 4GiB.",
    ] = None
    kv_disk_cache: Annotated[
        str | None, "Directory for KV of prefixes that were evicted from host memory."
    ] = None
    kv_disk_cache_size: Annotated[str, "Maximum size of that directory, such as 50GiB."] = "50GiB"
    image_cache_memory: Annotated[
        str,
        "Memory of the device for encoded images, which prompts with the same image share. For a "
        "vision-language model only.",
    ] = "256MiB"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[Count, "Requests that run at once."] = 256
    max_num_batched_tokens: Annotated[Count, "Most tokens in one step."] = 2048
    itl_target_ms: Annotated[
        NotNegative | None, "Keep predicted steps under this while answers stream; 0 turns it off."
    ] = 100.0
    max_queue_requests: Annotated[CountOrZero, "Requests that may wait; more get 503."] = 1024
    max_queue_tokens: Annotated[CountOrZero, "Prompt tokens that may wait; more get 503."] = 1_000_000
    max_output_tokens: Annotated[Count | None, "Server cap on max_tokens. Default: the model's context."] = (
        None
    )
    queue_timeout_s: Annotated[Positive | None, "Maximum seconds in the queue before a request gets 503."] = (
        600.0
    )
    aging_s: Annotated[Positive, "After this long in the queue a request counts as one tier more urgent."] = (
        30.0
    )
    length_bins: Annotated[
        LengthBins,
        "Predict lengths of answers from the tenant's earlier answers (tenant), and from those to prompts of "
        "similar length and kind (prompt); off predicts none.",
    ] = "prompt"
    preempt_batch: Annotated[bool, "Let urgent requests that lack room preempt running batch requests."] = (
        True
    )
    tier_shares: Annotated[
        TierShares | None,
        "Shares of the tokens that start, for the tiers priority, default and batch, such as 8,3,1. Default: "
        "the more urgent tier goes first.",
    ] = None
    min_cacheable_tokens: Annotated[
        Count, "Shortest prompt prefix that a cache breakpoint keeps; shorter ones are not."
    ] = 1024
    max_draft_tokens: Annotated[
        int,
        Meta(ge=0, le=64),
        "Maximum number of tokens drafted for a request in one step. Fewer are drafted if more are not "
        "predicted to pay off.",
    ] = 12


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a replica that is split over several processes, each with its own device."""

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64), "Ranks that each layer is sharded over."] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=64), "Pipeline stages that the layers are divided into."
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        "With --enable-expert-parallel: ranks that each have all attention heads, requests and KV of their "
        "own, and share the experts. Without: another name for --replicas.",
    ] = 1
    enable_expert_parallel: Annotated[
        bool, "Place whole experts on the ranks of a stage, not a slice of every expert."
    ] = False
    enable_eplb: Annotated[
        bool,
        "Count the tokens of each expert, and move experts between ranks while serving so that all ranks have "
        "about as many tokens.",
    ] = False
    num_redundant_experts: Annotated[
        CountOrZero,
        "Copies of busy experts that the ranks hold in each layer besides its experts, with --enable-eplb.",
    ] = 0
    eplb_step_interval: Annotated[Count, "Steps for which tokens are counted before experts are moved."] = (
        3000
    )

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_stage * self.pipeline_parallel_size

    @property
    def ranks_per_stage(self) -> int:
        """Return the number of ranks that share a machine and the experts of their layers."""
        return self.tensor_parallel_size * self.data_parallel_size


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which the ranks of a replica on several nodes find the first rank. Every node gets its own
    copy."""

    host: str  # the address of the first rank's node
    port: int
    key: str  # a secret of this replica alone
    node_host: str  # the address of the node that has this copy


decode_rendezvous = msgspec.json.Decoder(Rendezvous).decode


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_loras: Annotated[Count, "LoRA adapters that are loaded at once; requests for more wait."] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=512), "Largest rank of a LoRA adapter."] = 64


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one engine process, which gets them as JSON."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoRAConfig = LoRAConfig()
    parallel: ParallelConfig = ParallelConfig()
    speculate: Annotated[
        str,
        "Draft tokens and verify several in one step, which never changes an answer: auto (lookup, and "
        "with AMX the head that comes with the default model), off, lookup, draft=MODEL, heads=FOLDER or heads=mtp.",
    ] = "auto"
    num_threads: Annotated[
        Count | None, "CPU threads for kernels. Default: every core that the process may use."
    ] = None
    steps_in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=4)] | None,
        "Steps submitted before the first is collected. Default: 2 on a GPU or in stages, else 1.",
    ] = None
    kv_transfer: Annotated[
        bool, "Exchange KV blocks with other replicas, through NIXL (needs the extra `disaggregation`)."
    ] = False
    record_plans: Annotated[str | None, "File to log every scheduler call to, for replay and diagnosis."] = (
        None
    )


SpeculateKind: TypeAlias = Literal["auto", "off", "lookup", "draft", "heads"]

# The argument after the kind and an equals sign.
_ARGUMENTS = {"draft": "MODEL", "heads": "FOLDER"}
OWN_HEADS = "mtp"  # in place of a folder: the checkpoint's own layer for multi-token prediction


class Speculate(msgspec.Struct, frozen=True):
    kind: SpeculateKind
    argument: str = ""  # the model of `draft`, the folder of `heads`


def parse_speculate(text: str) -> Speculate:
    """Parse the setting. Raises ConfigError, which lists the valid forms, for any other text."""
    kind, equals, argument = text.partition("=")
    if kind in get_args(SpeculateKind) and bool(equals) == bool(argument) == (kind in _ARGUMENTS):
        return Speculate(cast(SpeculateKind, kind), argument)
    forms = [f"{kind}={_ARGUMENTS[kind]}" if kind in _ARGUMENTS else kind for kind in get_args(SpeculateKind)]
    raise ConfigError(f"--speculate must be {', '.join(forms[:-1])} or {forms[-1]}, not '{text}'.")


MAX_TEMPLATE_BYTES = 1 << 20


def read_chat_template(given: str) -> str:
    """Return the template that `chat_template` names or is. Raises ConfigError for a file that cannot be read."""
    if "{%" in given or "{{" in given:
        return given
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--chat-template names {given}, which cannot be read: {error.strerror}.") from None
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"--chat-template names {given}, which is larger than any chat template.")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template names {given}, which is not a text in UTF-8.") from None


def parse_sampling_override(text: str) -> dict[str, Any]:
    """Read `override_generation_config`. Raises ConfigError for anything but an object of sampling defaults. A null
    removes a default of the model's makers."""
    known = SamplingDefaults.__struct_fields__
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"--override-generation-config has the unknown field {unknown[0]!r}.",
                hint=f"Known: {', '.join(known)}.",
            )
        msgspec.convert(given, SamplingDefaults)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--override-generation-config cannot be read: {error}.") from None
    return given


def parse_hf_overrides(text: str) -> dict[str, Any]:
    """Read `hf_overrides`. Raises ConfigError for anything but an object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--hf-overrides cannot be read: {error}.") from None
