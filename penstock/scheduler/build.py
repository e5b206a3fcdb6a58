"""Builds the scheduler of an engine, with its KV cache, from the header of its plan log: a replay builds the same."""

from __future__ import annotations

import msgspec

from penstock.core.plan_log import LogHeader
from penstock.kvcache.cache import KVCache
from penstock.scheduler.ranks import RankSchedulers, config_of_rank
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_builder import StepTimePredictor


def build_scheduler(header: LogHeader) -> Scheduler | RankSchedulers:
    if header.num_ranks == 1:
        return _build_one(header)
    own = msgspec.structs.replace(header, config=config_of_rank(header.config, header.num_ranks))
    predictor = StepTimePredictor()  # the ranks' devices are alike
    return RankSchedulers([_build_one(own, predictor) for _ in range(header.num_ranks)])


def _build_one(header: LogHeader, predictor: StepTimePredictor | None = None) -> Scheduler:
    cache = KVCache(
        header.num_blocks,
        block_size=header.block_size,
        enable_prefix_caching=header.enable_prefix_caching,
        max_pinned_fraction=header.max_pinned_fraction,
        num_host_blocks=header.num_host_blocks,
        halves_blocks=header.halves_blocks,
        states=header.states,
        windows=header.windows,
    )
    return Scheduler(
        header.config,
        cache,
        max_model_len=header.max_model_len,
        eos_token_ids=frozenset(header.eos_token_ids),
        block_copy_s=header.block_copy_s,
        tile_tokens=header.tile_tokens,
        image_cache_tokens=header.image_cache_tokens,
        masks_late=header.masks_late,
        starts_late=header.starts_late,
        predictor=predictor,
    )
