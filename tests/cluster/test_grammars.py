"""Grammars and embeddings across the process boundary, on a tiny model in a real engine process."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path

import pytest

from penstock.cluster.replica import EngineClient, ReplicaSpec
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.errors import InvalidRequest
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Grammar, Request, SamplingParams
from tests.cluster.engines import Inbox, engine_process, send
from tests.copies import CopyingLauncher
from tests.engine.byte_model import constrained, write_byte_model

pytestmark = pytest.mark.slow


async def test_a_bad_grammar_is_refused_and_a_good_one_holds(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path / "model")
    model = ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="random")
    config = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=64))
    spec = ReplicaSpec(model="bytes", engine=config, model_path=str(folder))
    async with engine_process(spec, CopyingLauncher()) as engine:
        bad = send(engine.client, constrained("bad", Grammar("regex", "(a")))
        good = send(engine.client, constrained("good", Grammar("regex", "[ab]{4}c")))
        await bad.until(lambda inbox: inbox.error is not None)
        assert isinstance(bad.error, InvalidRequest)
        assert "cannot be compiled" in bad.error.message
        await good.until(lambda inbox: inbox.finish_reason is not None)
        assert good.finish_reason is FinishReason.STOP
        assert re.fullmatch("[ab]{4}c", bytes(good.tokens[:-1]).decode())
        assert len(await embedding(engine.client)) == 64


async def embedding(client: EngineClient) -> tuple[float, ...]:
    request = Request(
        id="embed", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=1), pooling="mean"
    )
    arrived: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()
    inbox = Inbox()
    client.add(request, timeout_s=None, on_event=arrived.set_result, on_error=inbox.on_error)
    event = await asyncio.wait_for(arrived, 60)
    assert event.embedding is not None
    return struct.unpack(f"<{len(event.embedding) // 4}f", event.embedding)
