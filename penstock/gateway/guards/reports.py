"""Says what guards found and did: a log line with the reason, and counters. Prompt text only where a policy asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.guards.policy import Direction, Policy, PolicyRule
from penstock.gateway.guards.settings import Action

log = logging.getLogger(__name__)

MAX_QUOTED_CHARS = 200


class GuardMetrics(Collector):
    """Written as things happen, read by a scrape."""

    def __init__(self) -> None:
        self.findings: Counter[tuple[str, str, str, str]] = Counter()  # policy, rule, direction, action
        self.failures: Counter[tuple[str, str, str]] = Counter()  # policy, rule, outcome
        self.checked: Counter[tuple[str, str]] = Counter()  # policy, direction

    def collect(self) -> Iterator[Metric]:
        checked = CounterMetricFamily(
            "penstock_guard_checks",
            "Prompts and answers that a policy looked at.",
            labels=("policy", "direction"),
        )
        for labels, count in self.checked.items():
            checked.add_metric(list(labels), count)
        yield checked
        findings = CounterMetricFamily(
            "penstock_guard_findings",
            "What rules found, by the action taken.",
            labels=("policy", "rule", "direction", "action"),
        )
        for finding, count in self.findings.items():
            findings.add_metric(list(finding), count)
        yield findings
        failures = CounterMetricFamily(
            "penstock_guard_failures",
            "Guards that broke or took too long, by what the policy made of it.",
            labels=("policy", "rule", "outcome"),
        )
        for failure, count in self.failures.items():
            failures.add_metric(list(failure), count)
        yield failures


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
        log.info(
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
        log.warning(
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
