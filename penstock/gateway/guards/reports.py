"""Says what guards found and did: a log line with the reason, and counters. Prompt text only where a policy asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.guards.policy import Direction, Policy, PolicyRule
from penstock.gateway.guards.settings import Action
from penstock.gateway.metrics.table import metric_by

logger = logging.getLogger(__name__)

MAX_QUOTED_CHARS = 200


class GuardMetrics(Collector):
    """Written as things happen, read by a scrape."""

    def __init__(self) -> None:
        self.findings: Counter[tuple[str, str, str, str]] = Counter()  # policy, rule, direction, action
        self.failures: Counter[tuple[str, str, str]] = Counter()  # policy, rule, outcome
        self.checked: Counter[tuple[str, str]] = Counter()  # policy, direction

    def collect(self) -> Iterator[Metric]:
        yield metric_by("guard_checks", self.checked)
        yield metric_by("guard_findings", self.findings)
        yield metric_by("guard_failures", self.failures)


@dataclass(frozen=True, slots=True)
class Case:
    """One request under one policy: guards report about it, and judges ask on its behalf."""

    policy: Policy
    metrics: GuardMetrics
    request_id: str
    principal: Principal
    tier: Tier

    def begins(self, direction: Direction) -> None:
        self.metrics.checked[self.policy.name, direction] += 1

    def found(self, rule: PolicyRule, direction: Direction, label: str, reason: str, text: str = "") -> None:
        self.metrics.findings[self.policy.name, rule.name, direction, rule.action.value] += 1
        if rule.action is Action.ALLOW:
            return
        quoted = f" in {text[:MAX_QUOTED_CHARS]!r}" if text and self.policy.log_text else ""
        logger.info(
            "guard %s: %s %s because it %s%s",
            rule.name,
            rule.action.value,
            direction,
            reason,
            quoted,
            extra={"fields": self._fields(rule, direction) | {"label": label}},
        )

    def failed(self, rule: PolicyRule, direction: Direction, reason: str) -> None:
        outcome = "open" if rule.fails_open else "closed"
        self.metrics.failures[self.policy.name, rule.name, outcome] += 1
        logger.warning(
            "guard %s failed, and its policy is %s: %s",
            rule.name,
            outcome,
            reason,
            extra={"fields": self._fields(rule, direction)},
        )

    def _fields(self, rule: PolicyRule, direction: Direction) -> dict[str, str]:
        return {
            "request_id": self.request_id,
            "workspace_id": self.principal.workspace_id,
            "policy": self.policy.name,
            "rule": rule.name,
            "direction": direction,
            "action": rule.action.value,
        }
