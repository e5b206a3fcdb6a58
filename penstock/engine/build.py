"""From a configuration to a running engine: choose the device, load the model, size the KV cache, connect the parts.

All sizes are decided here, once, with the numbers at hand; a model that does not fit is refused with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.messages import EngineReady, ModelCard
from penstock.core.plan_log import LogHeader
from penstock.engine.echo import ECHO_MODEL, EchoExecutor, echo_card
from penstock.engine.loop import EngineLoop, Executor
from penstock.engine.plain_tokenizers import numbered_tokenizer_json
from penstock.engine.record import PlanRecorder
from penstock.kvcache.cache import KVCache
from penstock.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.grammar_desk import GrammarDesk
    from penstock.models.model import Model

log = logging.getLogger(__name__)

ECHO_KV_BLOCKS = 1 << 16
STAGING_BYTES = 8 << 20
ECHO_MAX_MODEL_LEN = 1 << 16

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Engine:
    loop: EngineLoop
    ready: EngineReady
    recorder: PlanRecorder | None

    def close(self) -> None:
        self.loop.close()
        if self.recorder is not None:
            self.recorder.close()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the model side contributes: an executor, and the facts that size everything else."""

    executor: Executor
    card: ModelCard
    num_kv_blocks: int
    num_host_blocks: int = 0
    default_steps_in_flight: int = 1
    grammars: GrammarDesk | None = None


def build_engine(
    config: EngineConfig,
    model_path: Path,
    *,
    on_progress: Progress | None = None,
    clock: Clock | None = None,
) -> Engine:
    clock = clock or SystemClock()
    if str(model_path) == ECHO_MODEL:
        loaded = _load_echo(config, clock)
    elif _is_encoder(model_path):
        loaded = _load_encoder(config, model_path, clock, on_progress)
    else:
        loaded = _load_model(config, model_path, clock, on_progress)
    card = loaded.card
    reuses_prefixes = config.cache.enable_prefix_caching and not card.is_encoder
    # A prompt leaves room for a token of its answer, unless there is none.
    max_model_len = card.max_model_len + (1 if card.is_encoder else 0)
    cache = KVCache(
        loaded.num_kv_blocks,
        block_size=config.cache.block_size,
        enable_prefix_caching=reuses_prefixes,
        max_pinned_fraction=config.cache.max_pinned_fraction,
        num_host_blocks=loaded.num_host_blocks,
    )
    eos_token_ids = frozenset(card.eos_token_ids)
    scheduler = Scheduler(config.scheduler, cache, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
    recorder = None
    if config.record_plans is not None:
        header = LogHeader(
            config=config.scheduler,
            num_blocks=loaded.num_kv_blocks,
            block_size=config.cache.block_size,
            enable_prefix_caching=reuses_prefixes,
            max_pinned_fraction=config.cache.max_pinned_fraction,
            max_model_len=max_model_len,
            eos_token_ids=card.eos_token_ids,
            num_host_blocks=loaded.num_host_blocks,
        )
        recorder = PlanRecorder(Path(config.record_plans), header)
    ready = EngineReady(
        model=card,
        num_kv_blocks=loaded.num_kv_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_output_tokens=min(config.scheduler.max_output_tokens or card.max_model_len, card.max_model_len),
    )
    depth = config.steps_in_flight or loaded.default_steps_in_flight
    loop = EngineLoop(
        scheduler, loaded.executor, clock, depth=depth, recorder=recorder, grammars=loaded.grammars
    )
    return Engine(loop, ready, recorder)


def _load_echo(config: EngineConfig, clock: Clock) -> _Loaded:
    card = echo_card(
        config.model.served_model_name or ECHO_MODEL, config.model.max_model_len or ECHO_MAX_MODEL_LEN
    )
    return _Loaded(EchoExecutor(clock), card, config.cache.num_kv_blocks or ECHO_KV_BLOCKS)


def _is_encoder(model_path: Path) -> bool:
    from penstock.models.load import is_encoder

    return is_encoder(model_path)


def _load_encoder(
    config: EngineConfig, model_path: Path, clock: Clock, on_progress: Progress | None
) -> _Loaded:
    from penstock.engine.device import choose_ops
    from penstock.engine.encoder import EncoderExecutor
    from penstock.models.load import load_encoder, load_tokenizer

    settings = config.model
    # Encoders are small, and their vectors are compared with those of other servers: no precision to give away.
    ops = choose_ops(
        msgspec.structs.replace(config, model=msgspec.structs.replace(settings, dtype="float32"))
    )
    model = load_encoder(
        model_path, ops, load_format=settings.load_format, seed=settings.seed, on_progress=on_progress
    )
    max_text_len = min(settings.max_model_len or model.config.max_text_len, model.config.max_text_len)
    tokenizer = load_tokenizer(model_path)
    card = ModelCard(
        name=settings.served_model_name or settings.model,
        architecture="bert",
        vocab_size=model.config.vocab_size,
        max_model_len=max_text_len,
        tokenizer_json=(
            tokenizer.tokenizer_json if tokenizer else numbered_tokenizer_json(model.config.vocab_size)
        ),
        chat_template=None,
        special_tokens=tokenizer.special_tokens if tokenizer else {},
        bos_token_id=None,
        add_bos_token=False,
        eos_token_ids=(),
        weight_bytes=model.weight_bytes,
        num_parameters=model.num_parameters,
        dtype="float32",
        quantization=None,
        embedding_size=model.config.hidden_size,
        pooling=model.config.pooling,
        is_encoder=True,
    )
    blocks_per_text = max_text_len // config.cache.block_size + 1
    return _Loaded(EncoderExecutor(model, clock), card, config.scheduler.max_num_seqs * blocks_per_text)


def _load_model(
    config: EngineConfig, model_path: Path, clock: Clock, on_progress: Progress | None
) -> _Loaded:
    # torch takes seconds to import, and an echo engine has no use for it.
    from penstock.engine.batch import BatchRows
    from penstock.engine.device import choose_ops
    from penstock.engine.executor import ModelExecutor
    from penstock.engine.grammar import build_compiler
    from penstock.engine.grammar_desk import GrammarDesk
    from penstock.engine.grammar_masks import GrammarMasks
    from penstock.engine.graphs import DecodeGraphs
    from penstock.engine.memory import num_host_blocks, num_kv_blocks
    from penstock.engine.sampler import Sampler
    from penstock.engine.staging import Staging
    from penstock.models.load import load_model

    ops = choose_ops(config)
    model = load_model(
        model_path,
        ops,
        quantization=config.model.quantization,
        load_format=config.model.load_format,
        seed=config.model.seed,
        max_model_len=config.model.max_model_len,
        on_progress=on_progress,
    )
    block_size = config.cache.block_size
    num_blocks = num_kv_blocks(config, model, ops)
    max_model_len = _fit_context(config, model.max_model_len, num_blocks)
    card = _card(config, model_path, model, max_model_len, str(ops.dtype).removeprefix("torch."))
    kv = ops.allocate_kv(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim)
    host_blocks = num_host_blocks(config, kv)
    if host_blocks:
        kv.reserve_host(host_blocks)
    max_rows = config.scheduler.max_num_seqs
    staging = Staging(ops.device, STAGING_BYTES)
    rows = BatchRows(max_rows, max_model_len, block_size, ops.device, staging)
    is_cuda = ops.device.type == "cuda"
    compiler = build_compiler(card)
    executor = ModelExecutor(
        model,
        ops,
        kv,
        rows=rows,
        staging=staging,
        sampler=Sampler(ops, staging, max_rows, card.vocab_size, card.eos_token_ids, config.model.seed),
        clock=clock,
        graphs=DecodeGraphs(model, kv, rows, staging, max_model_len) if is_cuda else None,
        masks=GrammarMasks(compiler.limits, clock) if compiler else None,
    )
    return _Loaded(
        executor,
        card,
        num_blocks,
        num_host_blocks=host_blocks,
        default_steps_in_flight=2 if is_cuda else 1,
        grammars=GrammarDesk(compiler) if compiler else None,
    )


def _card(config: EngineConfig, model_path: Path, model: Model, max_model_len: int, dtype: str) -> ModelCard:
    from penstock.models.load import load_tokenizer

    architecture = model.config
    tokenizer = load_tokenizer(model_path)
    return ModelCard(
        name=config.model.served_model_name or config.model.model,
        architecture=architecture.architecture,
        vocab_size=architecture.vocab_size,
        max_model_len=max_model_len,
        tokenizer_json=(
            tokenizer.tokenizer_json if tokenizer else numbered_tokenizer_json(architecture.vocab_size)
        ),
        chat_template=tokenizer.chat_template if tokenizer else None,
        special_tokens=tokenizer.special_tokens if tokenizer else {},
        bos_token_id=tokenizer.bos_token_id if tokenizer else None,
        add_bos_token=tokenizer.add_bos_token if tokenizer else False,
        eos_token_ids=tokenizer.eos_token_ids if tokenizer else architecture.eos_token_ids,
        weight_bytes=model.weight_bytes,
        num_parameters=model.num_parameters,
        dtype=dtype,
        quantization=config.model.quantization,
        embedding_size=architecture.hidden_size,
    )


def _fit_context(config: EngineConfig, model_max_len: int, num_kv_blocks: int) -> int:
    """The longest context that both the model and the KV cache allow."""
    capacity = num_kv_blocks * config.cache.block_size
    asked = config.model.max_model_len
    if asked is not None and asked > capacity:
        raise ConfigError(
            f"--max-model-len {asked} needs more KV cache than there is: it holds {capacity} tokens.",
            hint="Raise --kv-cache-memory or lower --max-model-len.",
        )
    if capacity < model_max_len:
        log.info(
            "context limited to %d of %d tokens by the KV cache (--kv-cache-memory)", capacity, model_max_len
        )
    return min(model_max_len, capacity)
