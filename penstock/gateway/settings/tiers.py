"""The order of the tiers, and the most urgent tier that an operator grants whatever a key may claim.

The settings may change while a server runs, for the day when one workspace sends too much."""

from __future__ import annotations

import msgspec

from penstock.core.request import Tier
from penstock.gateway.prompts import GenerationRequest

_URGENCY = {tier: rank for rank, tier in enumerate(Tier)}  # most urgent first


def least_urgent(first: Tier, second: Tier) -> Tier:
    return first if _URGENCY[first] >= _URGENCY[second] else second


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most urgent tier that is granted, whatever a key may claim: to all workspaces, or to one by its id."""

    best: Tier = Tier.PRIORITY
    workspaces: dict[str, Tier] = {}

    def best_for(self, workspace_id: str) -> Tier:
        return self.workspaces.get(workspace_id, self.best)

    def capped(self, request: GenerationRequest) -> GenerationRequest:
        tier = least_urgent(self.best_for(request.principal.workspace_id), request.tier)
        return request if tier is request.tier else msgspec.structs.replace(request, tier=tier)
