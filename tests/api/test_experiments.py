"""/admin/experiments, and the command that asks it: whom it lets in, what it refuses, what it writes down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner

from penstock.api.admin.fleet import ExperimentEndpoints
from penstock.api.app import create_app
from penstock.cli import clients
from penstock.cli.commands import penstock
from penstock.core.cluster_view import ArmView, DifferenceView, ExperimentOrder, ExperimentView
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.core.objective import Objective, Terms
from penstock.gateway.settings.live import LiveSettings
from penstock.gateway.settings.settings import parse_settings
from tests.api.tenant_server import TenantServer

ARM = ArmView(
    policy="default",
    revision="r1",
    num_replicas=1,
    num_requests=250,
    objective=Objective(overall=Terms(ttft=1.0, itl=0.5, total=1.5)),
)
VIEW = ExperimentView(
    id="exp_1",
    model="m",
    stage="over",
    share=0.5,
    a=ARM,
    b=ArmView(policy="small", revision="r1-b", num_replicas=1, num_requests=240, objective=ARM.objective),
    difference=DifferenceView(mean=-0.3, low=-0.5, high=-0.1, num_windows=24),
    confidence=0.95,
    num_windows=24,
    min_windows=20,
    guards=(),
    verdict="b is better",
    reason="the difference is -0.300",
    started_at=0.0,
    ends_at=3600.0,
    is_over=True,
)
SETTINGS = "[policies.small]\nmax_num_batched_tokens = 256\n\n[objective.weights]\nttft = 3.0\n"


class FakeExperiments:
    def __init__(self) -> None:
        self.orders: list[ExperimentOrder] = []

    async def experiments(self) -> tuple[ExperimentView, ...]:
        return (VIEW,)

    async def start_experiment(self, order: ExperimentOrder) -> ExperimentView:
        self.orders.append(order)
        return VIEW

    async def stop_experiment(self, model: str | None) -> ExperimentView:
        return VIEW


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, static_key="root")
    server.control = FakeExperiments()  # type: ignore[attr-defined]
    live = LiveSettings()
    live.current = parse_settings(SETTINGS, "settings.toml")
    endpoints = ExperimentEndpoints(server.control, live, server.database)  # type: ignore[attr-defined]
    server.app = create_app(
        server.gateway, ServerConfig(), tenants=server.tenants, more_routes=endpoints.routes()
    )
    yield server
    await server.close()


async def test_orders_name_policy_sets_and_reach_the_audit_log(server: TenantServer) -> None:
    async with server.client("root") as admin:
        made = await admin.post("/admin/experiments", json={"a": "default", "b": "small", "window_s": 5})
        assert made.status_code == 200
        assert made.json()["object"] == "experiment"
        assert (await admin.post("/admin/experiments/stop")).status_code == 200
        listed = (await admin.get("/admin/experiments")).json()
        entries = (await admin.get("/admin/audit")).json()["data"]
    (order,) = server.control.orders  # type: ignore[attr-defined]
    assert order.policy_b.max_num_batched_tokens == 256
    assert order.objective.weights.ttft == 3.0
    assert order.config == {"share": 0.5, "window_s": 5.0}
    assert listed["data"][0]["verdict"] == "b is better"
    actions = [entry["action"] for entry in entries if entry["target"] == "exp_1"]
    assert actions == ["experiment.stop", "experiment.start"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"a": "default", "b": "smal"}, "There is no policy set 'smal'"),
        ({"a": "default", "b": "small", "share": 0}, "share"),
        ({"a": "default", "b": "small", "share": 1.0}, "share"),
        ({"a": "default", "b": "small", "speed": 1}, "speed"),
        ({"a": "default"}, "b"),
    ],
)
async def test_what_is_wrong_is_said(server: TenantServer, body: dict[str, object], sentence: str) -> None:
    async with server.client("root") as admin:
        answer = await admin.post("/admin/experiments", json=body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert not server.control.orders  # type: ignore[attr-defined]


async def test_only_administrators_may(server: TenantServer) -> None:
    key = await server.make_key(Scope.INFERENCE, Scope.USAGE, Scope.METRICS)
    async with server.client(key.secret) as client:
        for method, path in (
            ("GET", "/admin/experiments"),
            ("POST", "/admin/experiments"),
            ("POST", "/admin/experiments/stop"),
        ):
            assert (await client.request(method, path)).status_code == 403


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, list[httpx.Request]]:
    """Run the command against a server that always answers with the same experiment."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        body = msgspec.json.encode({"data": [VIEW]} if request.method == "GET" else VIEW)
        return httpx.Response(200, content=body)

    client = httpx.Client
    with monkeypatch.context() as patched:
        patched.setattr(
            clients.httpx, "Client", lambda **named: client(transport=httpx.MockTransport(answer), **named)
        )
        result = CliRunner().invoke(penstock, ["experiment", *arguments])
    return result.exit_code, result.output, seen


def test_the_command_shows_the_verdict_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = run(monkeypatch, "status")
    assert code == 0, output
    assert "small is better" in output
    assert "-0.300 (95%: -0.500 to -0.100)" in output
    code, output, seen = run(monkeypatch, "start", "default", "small", "--hours", "2", "--watch")
    assert code == 0, output
    assert b'"max_duration_s":7200.0' in seen[0].content.replace(b" ", b"")
    code, output, seen = run(monkeypatch, "stop", "--json")
    assert code == 0, output
    assert seen[0].url.path == "/admin/experiments/stop"
