"""The usage row of one request, built from a claim and an outcome. Knows neither files nor tables."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from penstock.gateway.accounts import Claim, Outcome

SECONDS_PER_DAY = 86_400
MAX_NAME_CHARS = 256

# "interrupted": the gateway died between the beginning and the end; what was used is unknown and not charged.
RowStatus: TypeAlias = Literal["completed", "cancelled", "failed", "interrupted"]


class _RequestFields(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a request that are known when it begins."""

    request_id: str
    started_at: float  # Unix seconds
    organization_id: str
    workspace_id: str
    key_id: str
    model: str
    endpoint: str
    tier: str
    user: str | None


class BegunRequest(_RequestFields, frozen=True, array_like=True, tag="begin"):
    """A request that runs. Enough to write a row if the process dies before the request's end."""


class UsageRow(_RequestFields, frozen=True, array_like=True, tag="settle"):
    """A request that is over. Written once; field names are the columns of the table `usage`."""

    status: RowStatus
    error_code: str | None = None
    is_cached: bool = False  # answered from the response cache or an idempotency key: no engine tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0
    cost_picodollars: int = 0
    duration_s: float = 0.0
    first_token_s: float | None = None

    @property
    def day(self) -> int:
        """Days since the epoch, in UTC."""
        return int(self.started_at // SECONDS_PER_DAY)


JournalEntry: TypeAlias = BegunRequest | UsageRow


def begun_request(claim: Claim, started_at: float) -> BegunRequest:
    principal = claim.principal
    return BegunRequest(
        claim.request_id,
        started_at,
        principal.organization_id,
        principal.workspace_id,
        _bounded(principal.key_id),
        claim.model,
        claim.endpoint,
        str(claim.tier),
        None if claim.user is None else _bounded(claim.user),
    )


def usage_row(begun: BegunRequest, outcome: Outcome, cost_picodollars: int) -> UsageRow:
    usage = outcome.usage
    return UsageRow(
        begun.request_id,
        begun.started_at,
        begun.organization_id,
        begun.workspace_id,
        begun.key_id,
        begun.model,
        begun.endpoint,
        begun.tier,
        begun.user,
        status=outcome.status,
        error_code=outcome.error_code,
        is_cached=outcome.is_cached,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_5m_tokens=usage.cache_write_5m_tokens,
        cache_write_1h_tokens=usage.cache_write_1h_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cost_picodollars=cost_picodollars,
        duration_s=outcome.duration_s,
        first_token_s=outcome.first_token_s,
    )


def interrupted_row(begun: BegunRequest) -> UsageRow:
    return UsageRow(**msgspec.structs.asdict(begun), status="interrupted")


def _bounded(name: str) -> str:
    """Shorten a name for its column. Clients choose the names of users, and tokens the names of subjects."""
    return name[:MAX_NAME_CHARS].replace("\0", "")
