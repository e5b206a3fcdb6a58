"""What an engine tells gateways when it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ConfigError
from penstock.engine.build import build_engine

from ..models.test_encoders import write_bert


def test_an_engine_tells_how_many_requests_it_runs_and_keeps_waiting() -> None:
    scheduler = SchedulerConfig(max_num_seqs=3, max_queue_requests=4, max_queue_tokens=50)
    engine = build_engine(EngineConfig(model=ModelConfig(model="echo"), scheduler=scheduler), Path("echo"))
    assert engine.ready.max_num_seqs == 3
    assert engine.ready.max_requests == 7
    assert engine.ready.max_queue_tokens == 50


def test_a_chat_template_of_the_operator_takes_the_place_of_all_others() -> None:
    settings = ModelConfig(model="echo", chat_template="{{ messages }}")
    card = build_engine(EngineConfig(model=settings), Path("echo")).ready.model
    assert (card.chat_template, card.named_templates) == ("{{ messages }}", {})


def test_an_encoder_takes_no_chat_template(tmp_path: Path) -> None:
    settings = ModelConfig(model="bert", device="cpu", load_format="random", chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match="has no chats"):
        build_engine(EngineConfig(model=settings), write_bert(tmp_path / "bert"))
