"""Money is exact."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.request import Tier
from penstock.gateway.ledger.prices import (
    AcceleratorCost,
    ModelPrice,
    PriceSettings,
    PriceTable,
    TokenRates,
    format_dollars,
)
from penstock.gateway.prompts import Usage


def price(**fields: Any) -> ModelPrice:
    return msgspec.convert(fields, ModelPrice)


def test_dollars_per_million_are_whole_picodollars_per_token() -> None:
    rates = price(input=0.15, output=0.6).rates(Tier.DEFAULT)
    assert rates == TokenRates(
        input=150_000, output=600_000, cache_read=15_000, cache_write_5m=187_500, cache_write_1h=300_000
    )


def test_the_batch_tier_is_half_price_and_priority_may_cost_more() -> None:
    fields = price(input=1, output=2, priority_factor=1.5)
    assert fields.rates(Tier.BATCH).input == 500_000
    assert fields.rates(Tier.BATCH).cache_read == 50_000
    assert fields.rates(Tier.PRIORITY).output == 3_000_000


def test_every_prompt_token_is_charged_once() -> None:
    rates = price(input=1, output=10).rates(Tier.DEFAULT)
    usage = Usage(1000, 7, 400, cache_read_tokens=400, cache_write_5m_tokens=300, cache_write_1h_tokens=100)
    plain = 200
    dollars = Decimal(plain) + Decimal("0.1") * 400 + Decimal("1.25") * 300 + 2 * 100 + 10 * 7
    assert rates.cost_of(usage) == dollars * 10**6


def test_automatic_cache_hits_are_reads_but_never_beyond_what_is_not_written() -> None:
    rates = price(input=1, output=0).rates(Tier.DEFAULT)
    assert rates.cost_of(Usage(100, 0, 64)) == 36 * 10**6 + 64 * 10**5
    # Blocks that were there already, and are now also pinned by a breakpoint, cost what a write costs.
    assert rates.cost_of(Usage(100, 0, 64, cache_write_5m_tokens=100)) == 125 * 10**6


def test_prices_follow_from_the_accelerators_hour() -> None:
    cost = AcceleratorCost(
        hour=Decimal("2.5"),
        count=4,
        input_tokens_per_hour=100_000_000,
        output_tokens_per_hour=5_000_000,
        utilization=Decimal("0.5"),
        margin=Decimal("0.2"),
    )
    rates = ModelPrice(accelerator=cost).rates(Tier.DEFAULT)
    assert rates.input == 240_000  # 2.5 × 4 ÷ (100 × 0.5) × 1.2 = $0.24 per million
    assert rates.output == 4_800_000


def test_unknown_models_cost_the_default_or_nothing() -> None:
    priced = PriceSettings(models={"a": price(input=1, output=1)}, default=price(input=3, output=3))
    assert PriceTable(priced).rates("a", Tier.DEFAULT).input == 10**6
    assert PriceTable(priced).rates("b", Tier.DEFAULT).input == 3 * 10**6
    assert PriceTable().rates("b", Tier.DEFAULT).cost_of(Usage(10, 10, 0)) == 0


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": 1}, "prices.models.x"),
        ({"input": -1, "output": 1}, "prices.models.x.input"),
        ({"input": "NaN", "output": 1}, "prices.models.x.input"),
        ({"input": 1, "output": 1, "batch_factor": -0.5}, "prices.models.x.batch_factor"),
        (
            {"accelerator": {"hour": 1, "input_tokens_per_hour": 0, "output_tokens_per_hour": 1}},
            "prices.models.x.accelerator.input_tokens_per_hour",
        ),
        (
            {
                "accelerator": {
                    "hour": 1,
                    "input_tokens_per_hour": 1,
                    "output_tokens_per_hour": 1,
                    "utilization": 0,
                }
            },
            "prices.models.x.accelerator.utilization",
        ),
        (
            {
                "input": 1,
                "output": 1,
                "accelerator": {"hour": 1, "input_tokens_per_hour": 1, "output_tokens_per_hour": 1},
            },
            "prices.models.x",
        ),
    ],
)
def test_a_price_that_cannot_be_is_refused_by_name(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        PriceSettings(models={"x": price(**fields)}).check()
    assert refusal.value.param == place


@given(st.lists(st.integers(0, 10**6), max_size=50))
def test_sums_do_not_drift(token_counts: list[int]) -> None:
    rates = price(input=0.1, output=0.3).rates(Tier.DEFAULT)
    parts = sum(rates.cost_of(Usage(count, count, 0)) for count in token_counts)
    assert parts == rates.cost_of(Usage(sum(token_counts), sum(token_counts), 0))


@pytest.mark.parametrize(
    ("picodollars", "text"),
    [
        (0, "0.00"),
        (15_000_000, "0.000015"),
        (12_300_000_000_000, "12.30"),
        (1, "0.000000000001"),
        (-500_000_000_000, "-0.50"),
    ],
)
def test_dollars_are_written_exactly(picodollars: int, text: str) -> None:
    assert format_dollars(picodollars) == text
