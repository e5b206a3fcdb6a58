"""Prices of tokens. Money is counted in whole picodollars (1e-12 $), so that sums never drift.

A price of $ per million tokens is a whole number of picodollars per token down to $0.000001 per million. Knows
nothing of requests or of where prices are written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import TypeAlias

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.request import Tier
from penstock.gateway.prompts import Usage

PICODOLLARS_PER_DOLLAR = 10**12
PICODOLLARS_PER_MICRODOLLAR = 10**6
TOKENS_PER_PRICE = 10**6  # prices are per million tokens

Dollars: TypeAlias = Decimal


class AcceleratorCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices that follow from what the hardware costs and how many tokens it makes.

    A token costs the share of a paid hour that it occupies:

        price = hour × count ÷ (tokens_per_hour × utilization) × (1 + margin)

    `input_tokens_per_hour` is measured with prompts alone, `output_tokens_per_hour` with answers alone, both for
    all `count` accelerators together (`penstock bench` measures them).
    """

    hour: Dollars  # of one accelerator
    input_tokens_per_hour: int
    output_tokens_per_hour: int
    count: int = 1
    utilization: Decimal = Decimal(1)  # share of the paid hours in which it works
    margin: Decimal = Decimal(0)

    def price(self, tokens_per_hour: int) -> Dollars:
        """$ per million tokens."""
        hours = Decimal(TOKENS_PER_PRICE) / (tokens_per_hour * self.utilization)
        return self.hour * self.count * hours * (1 + self.margin)

    def check(self, place: str) -> None:
        _check_amount(f"{place}.hour", self.hour)
        _check_amount(f"{place}.margin", self.margin)
        for name in ("input_tokens_per_hour", "output_tokens_per_hour", "count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{place}.{name} must be at least 1.", param=f"{place}.{name}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(
                f"{place}.utilization must be above 0 and at most 1.", param=f"{place}.utilization"
            )


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """$ per million tokens of one model: `input` and `output`, or `accelerator`, from which both follow."""

    input: Dollars | None = None
    output: Dollars | None = None
    accelerator: AcceleratorCost | None = None
    cache_read_factor: Decimal = Decimal("0.1")  # × the input price
    cache_write_5m_factor: Decimal = Decimal("1.25")
    cache_write_1h_factor: Decimal = Decimal(2)
    batch_factor: Decimal = Decimal("0.5")  # × every price, in the batch tier
    priority_factor: Decimal = Decimal(1)

    def check(self, place: str) -> None:
        """Raise ConfigError, naming the key by its path, unless a price follows."""
        if self.accelerator is not None:
            if self.input is not None or self.output is not None:
                raise ConfigError(f"{place} has both prices and an accelerator's cost.", param=place)
            self.accelerator.check(f"{place}.accelerator")
        elif self.input is None or self.output is None:
            raise ConfigError(f"{place} needs both input and output, or an accelerator's cost.", param=place)
        for name in msgspec.structs.asdict(self):
            if name != "accelerator" and (value := getattr(self, name)) is not None:
                _check_amount(f"{place}.{name}", value)

    def rates(self, tier: Tier) -> TokenRates:
        factor = {Tier.BATCH: self.batch_factor, Tier.PRIORITY: self.priority_factor}.get(tier, Decimal(1))
        if self.accelerator is not None:
            plain = self.accelerator.price(self.accelerator.input_tokens_per_hour) * factor
            output = self.accelerator.price(self.accelerator.output_tokens_per_hour) * factor
        else:
            plain, output = (self.input or Decimal(0)) * factor, (self.output or Decimal(0)) * factor
        return TokenRates(
            input=_picodollars_per_token(plain),
            output=_picodollars_per_token(output),
            cache_read=_picodollars_per_token(plain * self.cache_read_factor),
            cache_write_5m=_picodollars_per_token(plain * self.cache_write_5m_factor),
            cache_write_1h=_picodollars_per_token(plain * self.cache_write_1h_factor),
        )


class PriceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[prices]` table. A model without an entry costs what `default` says, or nothing."""

    models: dict[str, ModelPrice] = {}
    default: ModelPrice | None = None

    def check(self) -> None:
        if self.default is not None:
            self.default.check("prices.default")
        for name, price in self.models.items():
            price.check(f"prices.models.{name}")


class TokenRates(msgspec.Struct, frozen=True, kw_only=True):
    """Picodollars per token, for one model in one tier."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0

    def cost_of(self, usage: Usage) -> int:
        """Return the cost in picodollars. Every prompt token is charged once: written to the cache, read from it, or
        plain."""
        written = usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
        read = max(usage.cache_read_tokens, min(usage.cached_tokens, usage.prompt_tokens - written))
        plain = max(0, usage.prompt_tokens - written - read)
        return (
            plain * self.input
            + read * self.cache_read
            + usage.cache_write_5m_tokens * self.cache_write_5m
            + usage.cache_write_1h_tokens * self.cache_write_1h
            + usage.completion_tokens * self.output
        )


FREE = TokenRates()


class PriceTable:
    """Rates by model and tier, worked out once. Immutable: new settings make a new table."""

    def __init__(self, settings: PriceSettings | None = None) -> None:
        settings = settings or PriceSettings()
        self._models: Mapping[str, Mapping[Tier, TokenRates]] = {
            name: _rates_by_tier(price) for name, price in settings.models.items()
        }
        self._dollars_per_hour = {
            name: price.accelerator.hour * price.accelerator.count
            for name, price in settings.models.items()
            if price.accelerator is not None
        }
        self._default = _rates_by_tier(settings.default) if settings.default else dict.fromkeys(Tier, FREE)

    def dollars_per_hour(self, model: str) -> Dollars | None:
        """Return the cost of the accelerators of a model; None if its prices do not follow from accelerators."""
        return self._dollars_per_hour.get(model)

    def rates(self, model: str, tier: Tier) -> TokenRates:
        return self._models.get(model, self._default)[tier]


def _rates_by_tier(price: ModelPrice) -> dict[Tier, TokenRates]:
    return {tier: price.rates(tier) for tier in Tier}


def _picodollars_per_token(dollars_per_million: Dollars) -> int:
    per_token = dollars_per_million * PICODOLLARS_PER_DOLLAR / TOKENS_PER_PRICE
    return int(per_token.to_integral_value(ROUND_HALF_EVEN))


def _check_amount(place: str, value: Decimal) -> None:
    if not (value.is_finite() and 0 <= value <= 10**6):
        raise ConfigError(f"{place} must be a number from 0 to 1,000,000.", param=place)


def format_dollars(picodollars: int) -> str:
    """Dollars as exact text, without an exponent and without trailing zeros beyond cents: `0.00`, `12.30`,
    `0.000015`."""
    sign = "-" if picodollars < 0 else ""
    whole, fraction = divmod(abs(picodollars), PICODOLLARS_PER_DOLLAR)
    decimals = f"{fraction:012d}".rstrip("0").ljust(2, "0")
    return f"{sign}{whole}.{decimals}"
