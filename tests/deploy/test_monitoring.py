"""Rules and dashboards ask for what gateways export. Whether Prometheus takes the rules: `test_promtool`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.metrics.table import METRICS, PREFIX, TIER, VLLM_PREFIX
from tests.deploy.monitoring_files import DASHBOARDS, dashboard, reader, rules, targets, without_variables
from tests.deploy.promql import Reader, exported_series

# Counted only by servers that have external servers behind them.
NEEDS_EXTERNAL_SERVERS = {name for name in METRICS if name.startswith("external_")}
# Told only where limits are shared.
NEEDS_REDIS = {"limits_redis_up", "limits_redis_errors"}


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_reads_series_that_exist(rule: dict[str, Any]) -> None:
    labels = reader().labels(rule["expr"])
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith(".")


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in rules("alert")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
class TestDashboards:
    def test_queries_read_series_that_exist(self, path: Path) -> None:
        known = reader()
        for panel, target in targets(dashboard(path)):
            labels = known.labels(without_variables(target["expr"]))
            shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
            assert shown <= labels, panel["title"]
            assert labels <= shown or panel["type"] == "stat", f"{panel['title']}: lines have the same name"

    def test_variables_are_defined_and_used(self, path: Path) -> None:
        board = dashboard(path)
        defined = {variable["name"] for variable in board["templating"]["list"]}
        expressions = " ".join(target["expr"] for _, target in targets(board))
        used = set(re.findall(r"\$(?!__)\{?(\w+)", expressions)) | {"datasource"}
        assert used == defined
        series = exported_series()
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
                assert label in series[name].labels

    def test_panels_lie_beside_each_other(self, path: Path) -> None:
        board = dashboard(path)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sum(penstock_no_such_metric)", "nobody exports"),
        ('sum(penstock_connections_open{colour="red"})', "has no label colour"),
        ("penstock_connections_open", "not joined"),
        ("sum(penstock_num_requests_running)", "counts it several times"),
        ("sum by (replica) (penstock_connections_open)", "no labels of"),
        ("histogram_quantile(0.5, sum(rate(penstock_time_to_first_token_seconds_bucket[5m])))", "bounds"),
        (
            "sum by (path) (penstock_http_requests_total) / sum(penstock_http_requests_total)",
            "nothing matches",
        ),
    ],
)
def test_the_check_finds_mistakes(expression: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        Reader(exported_series()).labels(expression)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The metrics of a real server, after some requests."""
    from tests.e2e.conftest import start_server  # imports torch, which the other tests do without

    folder = tmp_path_factory.mktemp("server")
    settings = folder / "settings.toml"
    settings.write_text(
        "[prices.models.echo]\n"
        "accelerator = {hour = 2, input_tokens_per_hour = 1000, output_tokens_per_hour = 1000}\n"
    )
    server = start_server(folder, "echo", "--data-dir", str(folder), "--settings", str(settings))
    try:
        for tier in ("default", "flex"):
            body = {"prompt": "hello", "max_tokens": 4, "service_tier": tier}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        yield httpx.get(f"{server.url}/metrics", timeout=60).text
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)


@pytest.mark.slow
def test_a_real_server_exports_what_rules_and_dashboards_read(page: str) -> None:
    known = reader()
    for rule in rules("alert"):
        known.labels(rule["expr"])
    for path in DASHBOARDS:
        for _, target in targets(dashboard(path)):
            known.labels(without_variables(target["expr"]))
    exported = {family.name for family in text_string_to_metric_families(page)}
    wanted = {
        name
        for name in METRICS
        if not {f"{PREFIX}{name}{end}" for end in ("", "_total", "_bucket", "_sum", "_count")}.isdisjoint(
            known.used
        )
    }
    assert {name.removeprefix(PREFIX) for name in exported} >= wanted - NEEDS_EXTERNAL_SERVERS - NEEDS_REDIS


@pytest.mark.slow
def test_a_real_server_has_the_labels_of_the_table(page: str) -> None:
    num_seen = 0
    for family in text_string_to_metric_families(page):
        is_vllm = family.name.startswith(VLLM_PREFIX)
        declared = METRICS[family.name.removeprefix(VLLM_PREFIX if is_vllm else PREFIX)]
        labels = set(declared.labels) - ({TIER} if is_vllm else set())
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels, sample.name
            num_seen += 1
    assert num_seen > 500
