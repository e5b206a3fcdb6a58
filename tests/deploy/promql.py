"""Follows labels through PromQL expressions: which metrics an expression reads, and which labels its result has.

Raises AssertionError for what Prometheus would accept and answer with nothing: a metric that nobody exports, a label
that the metric does not have, two sides whose labels cannot match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import promql_parser as promql

from penstock.gateway.metrics.table import METRICS, PREFIX

# What Prometheus itself adds to everything that it reads.
TARGET_LABELS = frozenset({"job", "instance", "namespace"})
SET_OPERATORS = frozenset({"and", "or", "unless"})


@dataclass(frozen=True)
class Series:
    labels: frozenset[str]
    is_exported: bool = True  # by gateways, several of which may be there
    is_repeated: bool = False  # all gateways tell the same value


def exported_series() -> dict[str, Series]:
    """Every name that a gateway exports, as Prometheus stores it."""
    found = {"up": Series(TARGET_LABELS, is_exported=False)}
    for row in METRICS.values():
        series = Series(frozenset(row.labels), is_repeated=row.join == "max")
        name = PREFIX + row.name
        if row.kind == "histogram":
            found[f"{name}_bucket"] = Series(series.labels | {"le"}, is_repeated=series.is_repeated)
            found[f"{name}_sum"] = found[f"{name}_count"] = series
        else:
            found[f"{name}_total" if row.kind == "counter" else name] = series
    return found


class Reader:
    """Reads expressions over known series. `used` collects the names of all series that were read."""

    def __init__(self, series: Mapping[str, Series], used: Iterable[str] = ()) -> None:
        self.series = dict(series)
        self.used = set(used)

    def labels(self, expression: str) -> frozenset[str]:
        """The labels of the expression's result."""
        return self._of(promql.parse(expression), None) or frozenset()

    def _of(self, node: promql.Expr, aggregation: str | None) -> frozenset[str] | None:
        """None for a number. `aggregation` is the nearest one around the node."""
        match node:
            case promql.NumberLiteral() | promql.StringLiteral():
                return None
            case promql.VectorSelector():
                return self._of_selector(node, aggregation)
            case promql.MatrixSelector():
                return self._of_selector(node.vector_selector, aggregation)
            case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
                return self._of(node.expr, aggregation)
            case promql.Call():
                return self._of_call(node, aggregation)
            case promql.AggregateExpr():
                return self._of_aggregate(node)
            case promql.BinaryExpr():
                return self._of_binary(node, aggregation)
        raise AssertionError(f"not expected here: {node}")

    def _of_selector(self, node: promql.VectorSelector, aggregation: str | None) -> frozenset[str]:
        name = node.name
        assert name in self.series, f"nobody exports {name}"
        self.used.add(name)
        series = self.series[name]
        for matcher in node.matchers.matchers:
            assert matcher.name in series.labels | TARGET_LABELS, f"{name} has no label {matcher.name}"
        if series.is_exported:
            assert aggregation is not None, f"{name} is not joined over gateways"
        if series.is_repeated:
            assert aggregation != "sum", (
                f"every gateway tells the same {name}: their sum counts it several times"
            )
        return series.labels

    def _of_call(self, node: promql.Call, aggregation: str | None) -> frozenset[str] | None:
        arguments = [self._of(argument, aggregation) for argument in node.args]
        vectors = [labels for labels in arguments if labels is not None]
        assert len(vectors) == 1, f"one vector is expected: {node}"
        (labels,) = vectors
        if node.func.name != "histogram_quantile":
            return labels
        assert "le" in labels, f"the buckets have lost their bounds: {node}"
        return labels - {"le"}

    def _of_aggregate(self, node: promql.AggregateExpr) -> frozenset[str]:
        modifier = node.modifier
        is_without = modifier is not None and modifier.type == promql.AggModifierType.Without
        # `sum without (label)` adds up within each gateway: the labels of targets stay.
        labels = self._of(node.expr, "sum without" if is_without and str(node.op) == "sum" else str(node.op))
        assert labels is not None
        if str(node.op) in ("topk", "bottomk"):
            return labels
        if modifier is None:
            return frozenset()
        chosen = frozenset(modifier.labels)
        assert chosen <= labels, f"{sorted(chosen - labels)} are no labels of {node.expr}"
        return labels - chosen if is_without else chosen

    def _of_binary(self, node: promql.BinaryExpr, aggregation: str | None) -> frozenset[str] | None:
        left, right = self._of(node.lhs, aggregation), self._of(node.rhs, aggregation)
        if left is None or right is None:
            return right if left is None else left
        matching = node.modifier.matching if node.modifier is not None else None
        if matching is not None:
            assert frozenset(matching.labels) <= left & right, f"the sides do not have these labels: {node}"
        else:
            assert left == right, f"the sides have other labels, so nothing matches: {node}"
        return left
