"""What the ledger's tests share: claims, outcomes, and a ledger in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.ledger import JOURNAL_FOLDER, UsageLedger
from penstock.gateway.ledger.prices import ModelPrice, PriceSettings, PriceTable
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.prompts import Usage
from penstock.gateway.store.database import Database, sqlite_url

NOON = 1_790_000_000 // 86_400 * 86_400 + 43_200.0  # of 21 September 2026
DAY_S = 86_400.0
PRICES = PriceTable(PriceSettings(models={"m": ModelPrice(input=1, output=2)}))  # type: ignore[arg-type]


class WallClock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def claim(
    request_id: str, *, workspace: str = "w1", key: str = "k1", model: str = "m", **changes: Any
) -> Claim:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "principal": Principal(workspace_id=workspace, key_id=key),
        "model": model,
        "endpoint": "chat",
        "tier": Tier.DEFAULT,
        "input_tokens": 10,
        "max_output_tokens": 20,
    }
    return Claim(**(fields | changes))


def outcome(prompt: int = 10, completion: int = 5, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "usage": Usage(prompt, completion, 0),
        "status": "completed",
        "duration_s": 0.5,
        "first_token_s": 0.1,
    }
    return Outcome(**(fields | changes))


@asynccontextmanager
async def open_ledger(
    folder: Path, *, clock: WallClock | None = None, journal: Journal | None = None, **options: Any
) -> AsyncIterator[UsageLedger]:
    database = Database(sqlite_url(folder))
    clock = clock or WallClock()
    journal = journal or Journal(folder / JOURNAL_FOLDER)
    ledger = UsageLedger(journal, database, LedgerSpendTracker(PRICES, clock), wall_clock=clock, **options)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.close()
        database.close()
