"""Builds an engine from its configuration: loads the model and connects the parts.

Torch takes seconds to import, and an echo engine does not need it, so modules that need torch are imported late.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.engine_config import EngineConfig, Rendezvous, parse_speculate
from penstock.core.errors import ConfigError
from penstock.core.figures import parse_bytes
from penstock.core.messages import EngineReady, ModelCard
from penstock.core.plan_log import LogHeader
from penstock.engine.collaborator import (
    Collaborator,
    MemoryWatch,
    PlanRecorder,
    RecordedExchange,
    StepWatch,
    refuse_adapters,
    refuse_grammars,
    refuse_images,
)
from penstock.engine.drafters.combination import build_drafter
from penstock.engine.echo import ECHO_MODEL, EchoExecutor, echo_card
from penstock.engine.loaded import Loaded, Progress
from penstock.engine.loop import EngineLoop
from penstock.kvcache.cache import blocks_of_context
from penstock.scheduler.build import build_scheduler
from penstock.scheduler.ranks import RankSchedulers
from penstock.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.parallel.executor import FirstRank
    from penstock.engine.transfer.sharing import SharedKV

logger = logging.getLogger(__name__)

ECHO_KV_BLOCKS = 1 << 16
ECHO_MAX_MODEL_LEN = 1 << 16


@dataclass(frozen=True, slots=True)
class Engine:
    loop: EngineLoop
    ready: EngineReady
    recorder: PlanRecorder | None
    ranks: FirstRank | None = None  # the executor, where it runs on several ranks
    shared_kv: SharedKV | None = None  # with --kv-transfer

    def close(self) -> None:
        self.loop.close()
        if self.ranks is not None:
            self.ranks.close()


def build_engine(
    config: EngineConfig,
    model_path: Path,
    *,
    on_progress: Progress | None = None,
    clock: Clock | None = None,
    rendezvous: Rendezvous | None = None,
) -> Engine:
    """Build the engine. With a `rendezvous`, each stage of its pipeline is on a node of its own."""
    clock = clock or SystemClock()
    speculate = parse_speculate(config.speculate)
    ranks = None
    # Ranks with requests of their own.
    parallel, num_ranks = (config.parallel, config.parallel.data_parallel_size)
    check_data_parallel(config)
    if parallel.num_ranks == 1 and (parallel.enable_eplb or parallel.num_redundant_experts):
        raise ConfigError(
            "--enable-eplb and --num-redundant-experts place experts on several ranks, and there is one rank.",
            hint="Add --tensor-parallel-size or --data-parallel-size, and --enable-expert-parallel.",
        )
    if str(model_path) == ECHO_MODEL:
        loaded = _load_echo(config, clock)
    elif config.parallel.num_ranks > 1:
        loaded, ranks = _load_ranks(config, model_path, clock, on_progress, rendezvous)
    elif _is_encoder(model_path := _overridden(config, model_path)):
        loaded = _load_encoder(config, model_path, clock, on_progress)
    else:
        from penstock.engine.decoder import load_decoder

        loaded = load_decoder(config, model_path, clock, on_progress)
    card = _with_template(loaded.card, config.model.chat_template)
    reuses_prefixes = config.cache.enable_prefix_caching and not card.is_encoder
    # A prompt leaves room for a token of its answer. Encoders have no answers.
    max_model_len = card.max_model_len + (1 if card.is_encoder else 0)
    drafter = None
    # Encoders never draft, and refuse a named drafter. A fixed state cannot go back when a draft is rejected.
    if loaded.states is None and (not card.is_encoder or speculate.argument):
        drafter = build_drafter(speculate, loaded.forced_drafters, loaded.drafter)
    scheduler_config = config.scheduler
    if loaded.max_num_seqs is not None:
        scheduler_config = msgspec.structs.replace(scheduler_config, max_num_seqs=loaded.max_num_seqs)
    if drafter is None:
        scheduler_config = msgspec.structs.replace(scheduler_config, max_draft_tokens=0)
    depth = config.steps_in_flight or loaded.default_steps_in_flight
    # Deeper, a step is submitted before the tokens that its masks need are known, or after another step than the one
    # with the drafts that it follows.
    masks_late = loaded.masks_late and depth == 2
    starts_late = loaded.starts_late and depth == 2
    header = LogHeader(
        config=scheduler_config,
        num_blocks=loaded.num_kv_blocks,
        block_size=config.cache.block_size,
        enable_prefix_caching=reuses_prefixes,
        max_pinned_fraction=config.cache.max_pinned_fraction,
        max_model_len=max_model_len,
        eos_token_ids=card.eos_token_ids,
        num_host_blocks=loaded.num_host_blocks,
        block_copy_s=loaded.block_copy_s,
        tile_tokens=loaded.tile_tokens,
        halves_blocks=loaded.halves_blocks,
        states=loaded.states,
        windows=loaded.windows,
        image_cache_tokens=loaded.image_cache_tokens,
        masks_late=masks_late,
        starts_late=starts_late,
        num_ranks=num_ranks,
    )
    scheduler = build_scheduler(header)
    recorder = None if config.record_plans is None else PlanRecorder(Path(config.record_plans), header)
    num_blocks, num_seqs = scheduler.stats().num_kv_blocks, scheduler_config.max_num_seqs * num_ranks
    ready = EngineReady(
        model=card,
        num_kv_blocks=num_blocks,
        num_contexts=num_blocks
        / blocks_of_context(card.max_model_len, config.cache.block_size, loaded.windows),
        block_size=config.cache.block_size,
        max_num_seqs=num_seqs,
        max_requests=num_seqs + scheduler_config.max_queue_requests,
        max_queue_tokens=scheduler_config.max_queue_tokens,
        max_output_tokens=min(config.scheduler.max_output_tokens or card.max_model_len, card.max_model_len),
        max_lora_rank=config.lora.max_lora_rank if loaded.adapters is not None else 0,
    )
    disk = _disk_cache(config, loaded, scheduler, recorder, clock)
    loop = EngineLoop(
        scheduler,
        loaded.executor,
        clock,
        vocab_size=card.vocab_size,
        depth=depth,
        collaborators=_collaborators(loaded, ranks, recorder, disk, clock),
        drafter=drafter,
    )
    return Engine(loop, ready, recorder, ranks, loaded.shared_kv)


def check_data_parallel(config: EngineConfig) -> None:
    """Raise ConfigError for settings that one engine with data-parallel attention cannot have."""
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return
    if not parallel.enable_expert_parallel:
        raise ConfigError(
            "The ranks of --data-parallel-size share experts, and --enable-expert-parallel is not given.",
            hint="Add --enable-expert-parallel, or start as many replicas.",
        )
    drafts = parse_speculate(config.speculate)
    refused = {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--kv-transfer, which prefill and decode replicas need": config.kv_transfer,
        f"--speculate {config.speculate}": drafts.kind in ("draft", "heads"),
    }
    for what, is_given in refused.items():
        if is_given:
            raise ConfigError(
                f"Data-parallel attention does not support {what}.",
                hint="Leave either that or --data-parallel-size out.",
            )


def _disk_cache(
    config: EngineConfig,
    loaded: Loaded,
    scheduler: Scheduler | RankSchedulers,
    recorder: PlanRecorder | None,
    clock: Clock,
) -> Collaborator | None:
    """Open the files of KV blocks. If that fails, the engine logs a warning and continues without them."""
    if config.cache.kv_disk_cache is None:
        return None
    reason = ""
    if loaded.kv is None or not loaded.num_host_blocks:
        reason = "there is no host memory for KV"
    elif config.parallel.num_ranks > 1:
        reason = "the KV of a block lies on several ranks"
    elif loaded.windows is not None or loaded.states is not None:
        reason = "layers with windows or fixed states need more than blocks"
    if reason or loaded.kv is None or isinstance(scheduler, RankSchedulers):
        logger.warning("--kv-disk-cache has no effect: %s", reason)
        return None
    from penstock.engine.disk_cache import BlockFiles, DiskCache, model_digest

    size = parse_bytes(config.cache.kv_disk_cache_size)
    folder, digest = Path(config.cache.kv_disk_cache), model_digest(*loaded.kv_facts)
    try:
        files = BlockFiles(folder, size, digest, loaded.kv.block_bytes)
    except OSError as error:
        logger.warning("--kv-disk-cache has no effect: %s cannot be used: %s", folder, error.strerror)
        return None
    exchange = RecordedExchange(scheduler.exchange, clock, recorder)
    return DiskCache(files, loaded.kv, scheduler, exchange)


def _collaborators(
    loaded: Loaded,
    ranks: FirstRank | None,
    recorder: PlanRecorder | None,
    disk: Collaborator | None,
    clock: Clock,
) -> list[Collaborator]:
    """Return the collaborators, in the order in which requests pass their waiting lists. KV transfers join later,
    before the others."""
    watch: list[Collaborator] = [StepWatch(ranks.check)] if ranks is not None else []
    if ranks is not None and ranks.balancer is not None:
        watch.append(ranks.balancer)
    if loaded.gpu_memory is not None:
        watch.append(MemoryWatch(loaded.gpu_memory, clock))
    adapters = loaded.adapters if loaded.adapters is not None else refuse_adapters()
    grammars = loaded.grammars if loaded.grammars is not None else refuse_grammars()
    images = loaded.images if loaded.images is not None else refuse_images()
    optional = [each for each in (disk, recorder) if each is not None]
    return [*watch, images, adapters, grammars, *optional]


def _load_echo(config: EngineConfig, clock: Clock) -> Loaded:
    if config.parallel.num_ranks > 1:
        raise ConfigError(
            "The echo engine has no model to share out over ranks.",
            hint="Leave --tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel out.",
        )
    card = echo_card(
        config.model.served_model_name or ECHO_MODEL, config.model.max_model_len or ECHO_MAX_MODEL_LEN
    )
    return Loaded(EchoExecutor(clock), card, config.cache.num_kv_blocks or ECHO_KV_BLOCKS)


def _load_ranks(
    config: EngineConfig,
    model_path: Path,
    clock: Clock,
    on_progress: Progress | None,
    rendezvous: Rendezvous | None,
) -> tuple[Loaded, FirstRank]:
    """Load the first rank in this process, and the other ranks in processes of their own."""
    from penstock.engine.parallel.processes import RankProcesses, rank_config

    config = rank_config(config, rendezvous)
    with ExitStack() as on_failure:
        others = RankProcesses(config, model_path, rendezvous)
        on_failure.callback(others.kill)
        # All ranks import torch at the same time.
        from penstock.engine.decoder import load_decoder
        from penstock.engine.parallel.data_executor import DataParallelExecutor
        from penstock.engine.parallel.executor import PipelineExecutor, TensorParallelExecutor
        from penstock.engine.parallel.experts import ExpertBalancer
        from penstock.engine.parallel.setup import check, join
        from penstock.models.load import weights_identity

        weights_id = weights_identity(model_path) if rendezvous is not None else ""
        model_path = _overridden(config, model_path)  # as each rank does
        check(config, model_path, others.num_ranks_here)
        with others.explaining():
            others.wait_until_present(weights_id)
            setup = join(config, model_path, 0, others.store_access)
            on_failure.callback(setup.mesh.close)
            loaded = load_decoder(config, model_path, clock, on_progress, setup)
        on_failure.pop_all()
    if config.parallel.pipeline_parallel_size == 1:
        balance, balancer = setup.local.balance, None
        if balance is not None:
            balancer = ExpertBalancer(balance, config.parallel.eplb_step_interval)
        kind = DataParallelExecutor if config.parallel.data_parallel_size > 1 else TensorParallelExecutor
        whole = kind(setup.local, others, balancer)
        return replace(loaded, executor=whole), whole
    staged = PipelineExecutor(setup.local, others, clock)
    # A part of the next step enters the first stage while the last stage is busy with this step.
    return replace(loaded, executor=staged, default_steps_in_flight=2), staged


def _with_template(card: ModelCard, template: str | None) -> ModelCard:
    """Return the card with this chat template in place of all others, if there is one."""
    if template is None:
        return card
    if card.is_encoder:
        raise ConfigError(f"{card.name} is an encoder and has no chats.", hint="Leave --chat-template out.")
    return msgspec.structs.replace(card, chat_template=template, named_templates={})


def _overridden(config: EngineConfig, model_path: Path) -> Path:
    from penstock.models.overrides import overridden

    return overridden(model_path, config.model)


def _is_encoder(model_path: Path) -> bool:
    from penstock.models.encoders.load import is_encoder

    return is_encoder(model_path)


def _load_encoder(
    config: EngineConfig, model_path: Path, clock: Clock, on_progress: Progress | None
) -> Loaded:
    from penstock.engine.device import choose_ops
    from penstock.engine.pooling import EncoderExecutor
    from penstock.models.encoders.load import load_encoder
    from penstock.models.load import load_tokenizer, weights_identity
    from penstock.models.tokenizer import numbered_tokenizer_json

    settings = config.model
    # Encoders are small, and their vectors are compared with other servers' vectors: they keep full precision.
    ops = choose_ops(
        msgspec.structs.replace(config, model=msgspec.structs.replace(settings, dtype="float32"))
    )
    encoder = load_encoder(
        model_path, ops, load_format=settings.load_format, seed=settings.seed, on_progress=on_progress
    )
    model = encoder.model
    max_text_len = min(settings.max_model_len or encoder.max_text_len, encoder.max_text_len)
    tokenizer = load_tokenizer(model_path)
    card = ModelCard(
        name=settings.served_model_name or settings.model,
        architecture=model.name,
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
        embedding_size=encoder.head.size,
        pooling=encoder.settings.pooling,
        pooler=encoder.settings.card,
        is_encoder=True,
        generates=False,
        weights_id=f"random-{settings.seed}"
        if settings.load_format == "random"
        else weights_identity(model_path),
    )
    blocks_per_text = max_text_len // config.cache.block_size + 1
    return Loaded(EncoderExecutor(encoder, clock), card, config.scheduler.max_num_seqs * blocks_per_text)
