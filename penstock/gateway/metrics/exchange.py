"""Joins the metrics of all gateway processes of a server into one page. The table of metrics says how their values
become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.gateway.metrics.table import METRICS, PREFIX, VLLM_PREFIX, Join
from penstock.gateway.siblings import Siblings

TOPIC = "metrics"


class MetricsExchange:
    """Joins the pages of all processes."""

    def __init__(self, siblings: Siblings, render: Callable[[], bytes]) -> None:
        self._siblings = siblings
        siblings.answers[TOPIC] = lambda _: render()

    async def page(self) -> bytes:
        """Return the page of all processes that answer in time."""
        return merge(await self._siblings.ask(TOPIC))


def merge(pages: Sequence[bytes]) -> bytes:
    """Join pages in the Prometheus text format into one page."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            families.setdefault(family.name, family)
            samples = values.setdefault(family.name, {})
            join = _join_of(family.name)
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                samples[key] = _joined(samples.get(key), sample, join)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([_filled(family, values[name]) for name, family in families.items()]))
    return generate_latest(registry)


def _join_of(family_name: str) -> Join:
    """Return how values of this metric are joined. `family_name` has the prefix, as on a page."""
    name = family_name.removeprefix(PREFIX).removeprefix(VLLM_PREFIX)
    return METRICS[name].join if name in METRICS else "sum"


def _joined(known: Sample | None, sample: Sample, join: Join) -> Sample:
    if known is None:
        return sample
    return sample._replace(value=_JOINS[join](known.value, sample.value))


def _harmonic(one: float, other: float) -> float:
    return 1 / (1 / one + 1 / other) if one and other else 0.0


_JOINS: dict[Join, Callable[[float, float], float]] = {
    "sum": lambda one, other: one + other,
    "max": max,
    "min": min,
    "harmonic": _harmonic,
}


def _filled(family: Metric, samples: dict[tuple[str, frozenset[tuple[str, str]]], Sample]) -> Metric:
    whole = Metric(family.name, family.documentation, family.type, family.unit)
    whole.samples = list(samples.values())
    return whole


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
