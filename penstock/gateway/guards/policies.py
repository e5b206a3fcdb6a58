"""The policies of all workspaces, and the way of requests and answers through them.

Settings change at once and as a whole: a request keeps the policy that it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.guards.answer import GuardedAnswer
from penstock.gateway.guards.inputs import Decode, check_input
from penstock.gateway.guards.judge import Ask
from penstock.gateway.guards.policy import Policy, compile_policy
from penstock.gateway.guards.reports import Case, GuardMetrics
from penstock.gateway.guards.settings import NO_POLICY, GuardSettings, check_guard_settings
from penstock.gateway.prompts import GenerationRequest


class GuardPolicies:
    def __init__(self, ask: Ask) -> None:
        """`ask` is how judges put their questions to a model."""
        self._ask = ask
        self._settings = GuardSettings()
        self._policies: dict[str, Policy] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.metrics = GuardMetrics()

    def apply(self, settings: GuardSettings) -> None:
        """Raises ConfigError, and changes nothing, when they cannot be used."""
        check_guard_settings(settings)
        policies = {
            name: compile_policy(name, policy, self._ask) for name, policy in settings.policies.items()
        }
        self._settings, self._policies = settings, policies

    def policy_for(self, principal: Principal) -> Policy | None:
        if not self._policies:
            return None
        name = self._settings.workspaces.get(principal.workspace_id, self._settings.default_policy)
        return None if name is None or name == NO_POLICY else self._policies[name]

    def case(self, policy: Policy, request_id: str, principal: Principal, tier: Tier) -> Case:
        return Case(policy, self.metrics, request_id, principal, tier)

    async def check(self, case: Case, request: GenerationRequest, decode: Decode) -> GenerationRequest:
        return await check_input(case, request, decode, self._run_later)

    def wrap(self, case: Case, answer: AnswerStream) -> AnswerStream:
        return GuardedAnswer(answer, case, self._run_later) if case.policy.output.rules else answer

    def _run_later(self, review: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(review)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
