"""Answers about images equal those of transformers, to the token: alone, batched, in chunks, with prefix hits and
preempted. The gateway writes the prompts, so that its rules for image tokens are compared with transformers'
processors too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from PIL import Image
from torch import Tensor

from penstock.core.engine_config import (
    CacheConfig,
    Device,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.core.gateway_config import GatewayConfig
from penstock.core.plan import StepPlan
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.engine.build import Engine, build_engine
from penstock.gateway.images import checked_image
from penstock.gateway.models.served_model import PreparedPrompt, ServedModel
from penstock.gateway.prompts import ChatMessage, ChatPrompt, ImagePart, TextPart
from penstock.kernels.reference import TorchOps
from penstock.kvcache.cache import blocks_of_context
from penstock.models import vision_load
from penstock.models.config import Fields
from penstock.models.load import load_vision_part, open_checkpoint
from penstock.models.vision import Pixels
from penstock.models.vision_load import text_fields
from tests.engine.tiny import run, teach_short_answers, tokens
from tests.models.tiny_vision import TinyVision, picture, png
from tests.models.vision_checkpoints import CHECKPOINTS, make_vision

NUM_TOKENS = 8
ONE_RANK = ParallelConfig()
PICTURES = (picture(90, 60, 1), picture(40, 100, 2))


def vision_engine(
    model: TinyVision,
    num_kv_blocks: int = 256,
    device: Device = "cpu",
    parallel: ParallelConfig = ONE_RANK,
    **scheduler: Any,
) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(model.folder), device=device, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerConfig(**{"itl_target_ms": None, **scheduler}),
        parallel=parallel,
        speculate="off",
        num_threads=1,
    )
    return build_engine(config, model.folder)


def chat(images: Sequence[Image.Image], text: str = "what is this?") -> ChatPrompt:
    parts = [ImagePart(url="data:") for _ in images]
    loaded = [
        msgspec.structs.replace(part, loaded=checked_image(part, png(image), GatewayConfig()))
        for part, image in zip(parts, images, strict=True)
    ]
    return ChatPrompt(messages=(ChatMessage("user", (*loaded, TextPart(text))),))


def request(name: str, prompt: PreparedPrompt, **settings: Any) -> Request:
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **settings}
    return Request(
        id=name,
        prompt_token_ids=prompt.token_ids,
        images=prompt.images,
        sampling=SamplingParams(**sampling),
    )


@dataclass(frozen=True)
class Case:
    """A model, its engine, and prompts with the answers of transformers."""

    model: TinyVision
    engine: Engine
    prompts: list[PreparedPrompt]
    answers: list[list[int]]

    def answers_of(self, engine: Engine, **settings: Any) -> list[list[int]]:
        requests = [request(str(number), prompt, **settings) for number, prompt in enumerate(self.prompts)]
        events = run(engine, requests)
        return [tokens(events[each.id]) for each in requests]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_vision(request.param, tmp_path_factory.mktemp("vision") / request.param)
    return make_case(model, vision_engine(model))


def make_case(model: TinyVision, engine: Engine) -> Case:
    served = ServedModel(engine.ready, GatewayConfig())
    prompts, answers = [], []
    for images in (PICTURES[:1], PICTURES, ()):
        prompt = chat(images)
        prepared = asyncio.run(served.prepare(prompt))
        text = served.template.render(prompt).text
        expected_prompt, answer = model.expected(text, images, NUM_TOKENS)
        assert list(prepared.token_ids) == expected_prompt
        prompts.append(prepared)
        answers.append(answer)
    assert len({tuple(answer) for answer in answers}) > 1, "images change the answers"
    return Case(model, engine, prompts, answers)


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return make_vision("idefics3", tmp_path_factory.mktemp("vision") / "smallest")


def test_answers_are_those_of_transformers(case: Case, shows: Callable[..., None]) -> None:
    shows(open_checkpoint(case.model.folder).architecture.name, "images")
    for number, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True)):
        events = run(case.engine, [request(f"alone-{number}", prompt)])
        assert tokens(events[f"alone-{number}"]) == answer
    # Again and all at once, now with every prompt in the prefix cache.
    assert case.answers_of(case.engine) == case.answers
    stats = case.engine.loop.stats()
    assert stats.num_images_encoded == len(PICTURES)
    assert stats.image_cache_hits == stats.image_cache_queries - len(PICTURES)
    assert stats.prefix_cache_hits > 0
    assert stats.image_encoder_s > 0


def test_a_text_that_spells_the_place_of_an_image_is_text(case: Case) -> None:
    served = ServedModel(case.engine.ready, GatewayConfig())
    assert served.card.vision is not None
    spelled = asyncio.run(served.prepare(chat(PICTURES[:1], f"{served.card.vision.template_token} is what?")))
    assert [image.num_tokens for image in spelled.images] == [
        image.num_tokens for image in case.prompts[0].images
    ]


def test_the_largest_image_is_as_large_as_the_model_sees(case: Case) -> None:
    executor: Any = case.engine.loop.executor
    vision = executor.forward.images.vision
    pixels = vision.largest(64)
    made = vision.encode(pixels, 0, min(vision.tiles_at_once, pixels.num_tiles))
    assert sum(len(rows) for rows in made) == pixels.num_rows
    assert pixels.num_tiles >= max(image.num_tiles for prompt in case.prompts for image in prompt.images)
    if "patch_size" in vision.card.numbers:
        assert 16 <= pixels.num_rows <= 64


def test_an_image_of_one_pixel_is_seen(case: Case) -> None:
    executor: Any = case.engine.loop.executor
    vision = executor.forward.images.vision
    pixels = vision.prepare(png(picture(1, 1)))
    assert sum(len(rows) for rows in vision.encode(pixels, 0, pixels.num_tiles)) == pixels.num_rows


def test_chunks_through_images_and_preemption_change_nothing(case: Case) -> None:
    longest = max(image.num_tokens for prompt in case.prompts for image in prompt.images)
    is_whole = any(image.is_whole for prompt in case.prompts for image in prompt.images)
    num_tokens = longest + 4 if is_whole else 20
    context = max(len(prompt.token_ids) + NUM_TOKENS for prompt in case.prompts)
    windows = case.engine.loop.scheduler.cache.window_layout
    num_blocks = blocks_of_context(context, 16, windows, num_tokens)
    small = vision_engine(case.model, num_blocks + 5, max_num_batched_tokens=num_tokens)
    assert case.answers_of(small) == case.answers
    assert case.answers_of(small) == case.answers


def test_preempted_requests_go_on_with_their_images(smallest: TinyVision) -> None:
    engine, small = vision_engine(smallest), vision_engine(smallest, 16)
    served = ServedModel(engine.ready, GatewayConfig())
    prompts = [asyncio.run(served.prepare(chat([picture(90, 60, seed)]))) for seed in range(4)]
    teach_short_answers(small)
    made = [
        run(each, [request(str(number), prompt, max_tokens=60) for number, prompt in enumerate(prompts)])
        for each in (engine, small)
    ]
    assert small.loop.stats().num_preemptions > 0
    for number in range(len(prompts)):
        assert tokens(made[0][str(number)]) == tokens(made[1][str(number)])


class RankPart:
    """A model within another object, as a rank of a tensor-parallel engine has it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run_inner(self, run: Callable[[Any], Tensor]) -> Tensor:
        return run(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_rank_runs_its_part_of_the_model(smallest: TinyVision) -> None:
    engine = vision_engine(smallest)
    served = ServedModel(engine.ready, GatewayConfig())
    prompt = asyncio.run(served.prepare(chat(PICTURES)))
    answer = tokens(run(engine, [request("whole", prompt)])["whole"])
    executor: Any = vision_engine(smallest)
    forward = executor.loop.executor.forward
    forward._model = RankPart(forward._model)
    assert tokens(run(executor, [request("part", prompt)])["part"]) == answer


def test_an_answer_goes_on_at_another_engine(smallest: TinyVision) -> None:
    engine = vision_engine(smallest)
    served = ServedModel(engine.ready, GatewayConfig())
    whole = request("whole", asyncio.run(served.prepare(chat(PICTURES))))
    answer = tokens(run(engine, [whole])["whole"])
    rest = msgspec.structs.replace(whole, id="rest", output_token_ids=tuple(answer[:5]))
    assert tokens(run(vision_engine(smallest), [rest])["rest"]) == answer[5:]


def test_the_same_tokens_with_another_image_share_no_block(case: Case) -> None:
    engine = case.engine
    served = ServedModel(engine.ready, GatewayConfig())
    one, other = (
        asyncio.run(served.prepare(chat([picture(64, 64, seed)], "the same text"))) for seed in (31, 32)
    )
    assert one.token_ids == other.token_ids
    run(engine, [request("one", one)])
    events = run(engine, [request("other", other), request("again", one)])
    assert (events["other"][0].num_cached_tokens or 0) <= one.images[0].start
    assert (events["again"][0].num_cached_tokens or 0) > one.images[0].end - 16
    assert tokens(events["other"]) != tokens(events["again"])


def test_tiles_are_spread_over_steps_while_answers_stream(smallest: TinyVision) -> None:
    engine = vision_engine(smallest, itl_target_ms=0.001)
    served = ServedModel(engine.ready, GatewayConfig())
    text = asyncio.run(served.prepare(chat((), "tell me a story")))
    image = asyncio.run(served.prepare(chat([picture(90, 60, 5)])))
    plans: list[StepPlan] = []
    execute = engine.loop.executor.submit
    engine.loop.executor.submit = lambda plan: (plans.append(plan), execute(plan))[1]  # type: ignore[method-assign]
    engine.loop.add(request("text", text, max_tokens=1900))
    engine.loop.step()
    engine.loop.add(request("image", image, max_tokens=1))
    while not any(event.request_id == "image" for event in engine.loop.step()):
        pass
    engine.loop.abort("text")
    encoding = [plan for plan in plans if plan.encodings]
    assert len(encoding) >= image.images[0].num_tiles
    assert all(any(chunk.request_id == "text" for chunk in plan.chunks) for plan in encoding)
    assert sum(each.num_tiles for plan in plans for each in plan.encodings) == image.images[0].num_tiles


def test_a_cancelled_request_and_a_full_cache_leave_the_engine_working(smallest: TinyVision) -> None:
    engine = vision_engine(smallest)
    served = ServedModel(engine.ready, GatewayConfig())
    prompts = [asyncio.run(served.prepare(chat([picture(90, 60, seed)]))) for seed in range(6)]
    engine.loop.scheduler._images._capacity_tokens = 2 * prompts[0].images[0].num_tokens
    first = run(engine, [request(f"first-{number}", prompt) for number, prompt in enumerate(prompts)])
    engine.loop.add(request("gone", prompts[0]))
    engine.loop.step()
    engine.loop.abort("gone")
    again = run(engine, [request(f"again-{number}", prompt) for number, prompt in enumerate(prompts)])
    for number in range(len(prompts)):
        assert tokens(first[f"first-{number}"]) == tokens(again[f"again-{number}"])
    assert engine.loop.stats().image_cache_tokens <= 2 * prompts[0].images[0].num_tokens


def test_an_older_transformers_gives_a_model_for_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_vision("llava", tmp_path / "llava")
    monkeypatch.setattr(vision_load, "OLDEST_TRANSFORMERS", (99, 1))
    with caplog.at_level("WARNING", logger="penstock"):
        assert load_vision_part(model.folder, TorchOps()) is None
    assert f"images need transformers 99.1 or newer, not {transformers.__version__}" in caplog.text


@pytest.mark.parametrize(
    ("kind", "counts"), [("Glm4v", (8, 12, 12)), ("PaddleOCRVL", (16, 24, 24)), ("Qwen2VL", (16, 24, 24))]
)
def test_settings_without_sections_have_positions_in_three_dimensions(
    tmp_path: Path, kind: str, counts: tuple[int, ...]
) -> None:
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert "mrope_section" not in json.dumps(settings)
    axes = text_fields(tmp_path, Fields(settings, "config.json")).raw("rope_axes")
    assert tuple(axes.count(axis) for axis in range(3)) == counts


def test_bad_images_are_refused_and_nothing_breaks(smallest: TinyVision) -> None:
    engine = vision_engine(smallest)
    served = ServedModel(engine.ready, GatewayConfig())
    good = asyncio.run(served.prepare(chat(PICTURES[:1])))
    damaged = msgspec.structs.replace(good.images[0], data=b"no image", digest=bytes(16))
    other_shape = msgspec.structs.replace(good.images[0], data=png(picture(32, 32)), digest=bytes(15) + b"\1")
    for name, image in (("damaged", damaged), ("shape", other_shape)):
        engine.loop.add(msgspec.structs.replace(request(name, good), images=(image,)))
    events = run(engine, [request("good", good)])
    refused = {rejection.request_id: rejection for rejection in engine.loop.take_rejections()}
    assert set(refused) == {"damaged", "shape"}
    assert all(each.code == "invalid_request_error" for each in refused.values())
    assert events["good"][-1].finish_reason is FinishReason.LENGTH


def test_an_image_that_the_encoder_fails_on_ends_its_requests_only(
    smallest: TinyVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vision_engine(smallest)
    served = ServedModel(engine.ready, GatewayConfig())
    good, bad = (asyncio.run(served.prepare(chat([picture(90, 60, seed)]))) for seed in (1, 2))
    alone = tokens(run(engine, [request("alone", good)])["alone"])
    images = engine.loop.executor.forward.images
    assert images is not None
    name, unlucky = next(iter(images.vision.prepare(bad.images[0].data).tiled.items()))
    encode = images.vision.encode

    def fails(pixels: Pixels, first_tile: int, num_tiles: int) -> list[Tensor]:
        if pixels.tiled[name].equal(unlucky):
            raise RuntimeError("shape '[0, 4]' is invalid")
        return encode(pixels, first_tile, num_tiles)

    monkeypatch.setattr(images.vision, "encode", fails)
    engine.loop.scheduler._images._capacity_tokens = bad.images[0].num_tokens
    for attempt in ("first", "second"):
        events = run(engine, [request(f"{attempt}-bad", bad), request(f"{attempt}-good", good)])
        assert events[f"{attempt}-bad"][-1].finish_reason is FinishReason.ERROR
        assert tokens(events[f"{attempt}-good"]) == alone
