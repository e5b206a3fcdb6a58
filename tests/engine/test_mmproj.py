"""A GGUF model and the file of its vision part give the answers of transformers, to the token."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.models.served_model import ServedModel
from tests.engine.test_images import PICTURES, Case, chat, make_case, request, vision_engine
from tests.engine.tiny import run, tokens
from tests.models.mmproj_files import WRITTEN, write_pair
from tests.models.vision_checkpoints import make_vision


@pytest.fixture(scope="module", params=WRITTEN)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("mmproj")
    model = make_vision(request.param, folder / "folder")
    text, _ = write_pair(folder, model, request.param)
    pair = dataclasses.replace(model, folder=text)
    return make_case(pair, vision_engine(pair))


def test_answers_are_those_of_transformers(case: Case) -> None:
    for number, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True)):
        events = run(case.engine, [request(f"alone-{number}", prompt)])
        assert tokens(events[f"alone-{number}"]) == answer
    assert case.answers_of(case.engine) == case.answers


def test_images_for_a_model_without_its_vision_part_are_refused(tmp_path: Path) -> None:
    model = make_vision("idefics3", tmp_path / "folder")
    text, mmproj = write_pair(tmp_path, model, "idefics3")
    mmproj.unlink()
    engine = vision_engine(dataclasses.replace(model, folder=text))
    served = ServedModel(engine.ready, GatewayConfig())
    with pytest.raises(InvalidRequest, match="takes text only") as caught:
        served.check_images([chat(PICTURES[:1])])
    assert "--mmproj" in (caught.value.hint or "")
    assert asyncio.run(served.prepare(chat(()))).token_ids
