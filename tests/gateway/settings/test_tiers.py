"""Tiers that settings cap, whatever a key may claim."""

from __future__ import annotations

import pytest

from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.settings.settings import TierSettings
from tests.gateway.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("asked", "best", "workspaces", "granted"),
    [
        (Tier.PRIORITY, Tier.PRIORITY, {}, Tier.PRIORITY),
        (Tier.PRIORITY, Tier.DEFAULT, {}, Tier.DEFAULT),
        (Tier.BATCH, Tier.DEFAULT, {}, Tier.BATCH),
        (Tier.DEFAULT, Tier.PRIORITY, {"w": Tier.BATCH}, Tier.BATCH),
        (Tier.PRIORITY, Tier.BATCH, {"w": Tier.PRIORITY}, Tier.PRIORITY),
        (Tier.PRIORITY, Tier.PRIORITY, {"other": Tier.BATCH}, Tier.PRIORITY),
    ],
)
async def test_the_engine_sees_no_more_than_is_granted(
    asked: Tier, best: Tier, workspaces: dict[str, Tier], granted: Tier
) -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    gateway.tiers = TierSettings(best=best, workspaces=workspaces)
    answer = await gateway.submit(
        GenerationRequest(
            prompts=(TextPrompt("a"),),
            sampling=SamplingOptions(),
            tier=asked,
            principal=Principal(workspace_id="w", best_tier=Tier.PRIORITY),
        )
    )
    assert engine.added[0].tier is granted
    assert answer.tier is granted
