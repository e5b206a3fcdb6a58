"""The files of the monitoring kit, as the tests read them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.promql import Reader, Series, exported_series

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
RULE_FILES = sorted((MONITORING / "rules").glob("*.yaml"))
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))


@functools.cache
def rules(kind: str) -> list[dict[str, Any]]:
    """All rules that have this key: `record` or `alert`."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def reader() -> Reader:
    """Knows what gateways export and what the recording rules make of it."""
    found = _recorded()
    return Reader(found.series, found.used)


@functools.cache
def _recorded() -> Reader:
    found = Reader(exported_series())
    for rule in rules("record"):
        labels = found.labels(rule["expr"]) | rule.get("labels", {}).keys()
        known = found.series.setdefault(rule["record"], Series(labels, is_exported=False))
        assert known.labels == labels, f"rules for {rule['record']} disagree about its labels"
    return found


def dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def targets(board: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every query of a dashboard, with its panel."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target


def without_variables(expression: str) -> str:
    """An expression as Grafana sends it."""
    return re.sub(r"\$\{?\w+\}?", "x", re.sub(r"\$__(rate_interval|interval|range)", "5m", expression))
