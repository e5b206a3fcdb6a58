"""Block keys and plans of prompts with images, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import InvalidRequest
from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.plan import SampledToken, StepPlan, StepResult
from penstock.core.plan_log import AddCall, encode_record
from penstock.core.request import ImageInput, Request, SamplingParams
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler
from penstock.scheduler.step_builder import StepLoad, StepTimePredictor

PLACEHOLDER = 7


def image(start: int, num_tokens: int, digest: int = 1, **fields: Any) -> ImageInput:
    return ImageInput(
        start=start, num_tokens=num_tokens, digest=bytes([digest] * 16), data=b"the file", **fields
    )


def request(name: str, length: int, *images: ImageInput, max_tokens: int = 1) -> Request:
    tokens = [3] * length
    for each in images:
        tokens[each.start : each.end] = [PLACEHOLDER] * each.num_tokens
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=name, prompt_token_ids=tuple(tokens), images=images, sampling=sampling)


def scheduler(capacity: int = 1000, **settings: Any) -> Scheduler:
    config = SchedulerConfig(**{"itl_target_ms": None, "max_draft_tokens": 0, **settings})
    return Scheduler(
        config,
        KVCache(64, block_size=16),
        max_model_len=512,
        eos_token_ids=frozenset(),
        image_cache_tokens=capacity,
    )


def run(made: Scheduler, until: int = 200) -> list[StepPlan]:
    """Run to the end, one step after the other."""
    plans = []
    for step in range(until):
        plan = made.plan(float(step))
        if plan is None:
            break
        sampled = tuple(SampledToken(chunk.request_id, 5) for chunk in plan.chunks if chunk.samples)
        made.commit(plan, StepResult(plan.step_id, sampled, 0.01), float(step))
        made.check_integrity()
        plans.append(plan)
    return plans


def test_block_keys_depend_on_the_contents_of_images_and_on_nothing_in_front_of_them() -> None:
    plain = request("a", 64)
    one, other = request("b", 64, image(20, 20)), request("c", 64, image(20, 20, digest=2))

    def keys(each: Request) -> list[bytes]:
        return chain_hashes(root_hash(each.prefix_salt), each.key_token_ids, 16)

    assert plain.key_token_ids is plain.prompt_token_ids
    assert one.prompt_token_ids == other.prompt_token_ids
    assert keys(one)[0] == keys(other)[0] == keys(plain)[0]
    assert not set(keys(one)[1:]) & set(keys(other)[1:])
    # One token of an image in a block is enough, wherever the image is cut.
    edge, edge_other = request("d", 64, image(15, 2)), request("e", 64, image(15, 2, digest=2))
    assert not set(keys(edge)) & set(keys(edge_other))
    assert keys(request("f", 64, image(20, 20))) == keys(one)


def test_a_sibling_with_another_image_is_not_held_and_shares_nothing() -> None:
    made = scheduler(max_num_batched_tokens=32)
    made.add(request("one", 128, image(8, 100)), 0.0)
    made.add(request("other", 128, image(8, 100, digest=2)), 0.0)
    run(made)
    assert made.stats().prefix_cache_hits == 0
    made.add(request("again", 128, image(8, 100)), 300.0)
    run(made)
    assert made.stats().prefix_cache_hits == 112
    assert made.stats().num_images_encoded == 2


def test_tokens_of_an_image_are_computed_only_when_all_its_tiles_are_encoded() -> None:
    made = scheduler(itl_target_ms=0.001, max_num_batched_tokens=64)
    made.add(request("stream", 16, max_tokens=60), 0.0)
    plan = made.plan(0.0)
    assert plan is not None
    made.commit(plan, StepResult(plan.step_id, (SampledToken("stream", 5),), 0.01), 0.0)
    made.add(request("image", 100, image(10, 40, num_tiles=5, tile_patches=1000)), 0.0)
    plans = run(made)
    encoded, computed = 0, 0
    for plan in plans:
        encoded += sum(each.num_tiles for each in plan.encodings)
        for chunk in plan.chunks:
            if chunk.request_id == "image":
                computed = chunk.start + chunk.num_tokens
                assert computed <= 10 or encoded == 5
        assert sum(each.num_tiles for each in plan.encodings) <= 1  # beside a stream, by so short a target
    assert computed == 100


def test_a_step_may_encode_without_computing_and_begin_later() -> None:
    made = scheduler()
    made.add(request("image", 20, image(0, 18, num_tiles=40, tile_patches=50_000)), 0.0)
    plans = run(made)
    assert any(plan.encodings and not plan.chunks for plan in plans)
    (begun,) = [chunk for plan in plans for chunk in plan.chunks if chunk.begins]
    assert begun.start == 0
    assert sum(each.num_tiles for plan in plans for each in plan.encodings) == 40


def test_the_cache_of_encoded_images_is_bounded_and_drops_the_least_recently_used() -> None:
    made = scheduler(capacity=50)
    for digest in (1, 2, 1, 3, 1):
        made.add(request(f"r{digest}", 60, image(8, 20, digest=digest)), 0.0)
        plans = run(made)
        assert made.stats().image_cache_tokens <= 50
    assert made.stats().num_images_encoded == 3
    made.add(request("more", 60, image(8, 21, digest=2)), 0.0)
    plans = run(made)
    assert [digest for plan in plans for digest in plan.dropped_images] == []  # 2 made room for 3 before
    # A single image may be larger than the cache.
    made.add(request("large", 100, image(8, 80, digest=9)), 0.0)
    run(made)
    assert not made.has_work


def test_an_image_whose_tokens_see_each_other_is_computed_in_one_step() -> None:
    made = scheduler(max_num_batched_tokens=32)
    made.add(request("image", 90, image(20, 30, is_whole=True)), 0.0)
    chunks = [(chunk.start, chunk.start + chunk.num_tokens) for plan in run(made) for chunk in plan.chunks]
    assert any(start <= 20 and end >= 50 for start, end in chunks)
    with pytest.raises(InvalidRequest, match="at most 32 in one step"):
        made.add(request("too large", 90, image(20, 40, is_whole=True)), 0.0)
    with pytest.raises(InvalidRequest, match="not in order"):
        made.add(request("overlap", 90, image(20, 30), image(40, 10)), 0.0)


def test_an_aborted_request_lets_its_image_go() -> None:
    made = scheduler(capacity=20)
    made.add(request("gone", 40, image(8, 20, num_tiles=9, tile_patches=50_000)), 0.0)
    assert made.plan(0.0) is not None
    made.abort("gone", 0.0)
    made.add(request("next", 40, image(8, 20, digest=2)), 0.0)
    plan = made.plan(0.0)
    assert plan is not None
    assert plan.dropped_images == (bytes([1] * 16),)


def test_logs_hold_no_file() -> None:
    line = encode_record(AddCall(0.0, request("a", 40, image(8, 20))))
    assert b"num_tokens" in line
    assert b"dGhlIGZpbGU" not in line  # "the file" in base64


def test_the_predictor_learns_the_time_of_patches() -> None:
    predictor = StepTimePredictor()
    for _ in range(200):
        predictor.observe(StepLoad(decode_sequences=1, encoder_patches=1000), 0.003 + 1e-4 + 1000 * 5e-5)
        predictor.observe(StepLoad(decode_sequences=1), 0.003 + 1e-4)
    assert 8 <= predictor.tiles_within(0.1, StepLoad(decode_sequences=1), 200) <= 11
