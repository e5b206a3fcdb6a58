"""`penstock top` and `penstock release` against a server that is only played."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from penstock.cli import clients
from penstock.cli.commands import penstock
from penstock.core.cluster_view import ClusterView, GatewayView, HostView, LeaderView
from tests.cluster.views import RELEASE, VIEW


class Played:
    """Answers the admin API; `views` are shown one after the other, the last one for good."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.views = [VIEW]
        self.order_views = [VIEW]  # that answer orders about replicas
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, request.url.path, body))
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "No."}})
        if request.url.path == "/admin/cluster":
            view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
            return httpx.Response(200, content=msgspec.json.encode(view))
        if request.url.path == "/admin/replicas":
            return httpx.Response(200, content=msgspec.json.encode(self.order_views[0]))
        return httpx.Response(200, content=msgspec.json.encode(RELEASE))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    client = httpx.Client

    def connect(**options: Any) -> httpx.Client:
        return client(transport=httpx.MockTransport(played), **options)

    monkeypatch.setattr(clients.httpx, "Client", connect)
    monkeypatch.setattr("penstock.cli.release.WATCH_INTERVAL_S", 0.0)
    return played


def run(*arguments: str) -> Result:
    return CliRunner().invoke(penstock, list(arguments))


def test_top_once_shows_everything(server: Played) -> None:
    shown = run("top", "--once").stdout
    for words in (
        "replica-1",
        "starting",
        "12/–",
        "62%/2.4",
        "4 requests by 2 gateways: prefix 75%, load 25%; 60% of prompt tokens",
        "m: 3 of 1–4 replicas, 3,000 prefill tokens queued (3.0 s)",
        "start 1: queued prefill tokens, 10 s ago",
        "v1 → v2, canary 25% for 50 s: ttft undecided (3 of 200 requests)",
    ):
        assert words in shown, shown


def test_top_draws_until_it_is_interrupted(server: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((None, None))

    def sleep(seconds: float) -> None:
        if next(looks, "enough") is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.cluster.time.sleep", sleep)
    result = run("top", "--interval", "0.5")
    assert result.exit_code == 0, result.output
    assert len(server.requests) == 3


def test_top_as_json(server: Played) -> None:
    assert msgspec.json.decode(run("top", "--json").stdout, type=ClusterView) == VIEW


def test_start_sends_only_what_was_said(server: Played) -> None:
    flags = ["--set", "max-num-seqs=64", "--steps", "0.1,0.5", "--stage-s", "5", "--max-ttft-ratio", "2"]
    flags += ["--max-false-alarms", "0.01"]
    result = run("release", "start", *flags)
    assert result.exit_code == 0, result.output
    ((method, path, order),) = server.requests
    assert (method, path) == ("POST", "/admin/releases")
    assert order["settings"] == {"max_num_seqs": "64"}
    assert order["policy"] == {
        "canary_shares": [0.1, 0.5],
        "min_stage_s": 5.0,
        "gates": {"max_ttft_ratio": 2.0, "max_false_alarms": 0.01},
    }
    assert "canary, 25% of requests" in result.stdout
    assert "gate ttft  undecided: 3 of 200 requests" in result.stdout


def test_watching_ends_with_the_release_and_fails_when_it_was_rolled_back(server: Played) -> None:
    stages = [("canary", False), ("rolling_back", False), ("rolled_back", True)]
    releases = [
        msgspec.structs.replace(RELEASE, stage=stage, is_over=is_over, reason="too slow")
        for stage, is_over in stages
    ]
    server.views = [
        msgspec.structs.replace(VIEW, releases=(release,)) for release in (releases[0], *releases)
    ]
    result = run("release", "status", "--watch")
    assert result.exit_code == 1
    assert [line.partition("  ")[2] for line in result.stdout.splitlines()[-3:]] == [
        "canary, 25% of requests: too slow",
        "rolling back: too slow",
        "rolled back: too slow",
    ]


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_orders(server: Played, command: str) -> None:
    assert run("release", command, "--model", "m").exit_code == 0
    assert server.requests == [("POST", f"/admin/releases/{command}", {"model": "m"})]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["start"], "Nothing would change."),
        (["start", "--set", "64"], "NAME=VALUE"),
        (["start", "--set", "a=b", "--steps", "much"], "--steps wants numbers"),
    ],
)
def test_wrong_flags_are_a_sentence(server: Played, arguments: list[str], sentence: str) -> None:
    result = run("release", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert server.requests == []


def test_a_refusal_is_a_sentence(server: Played) -> None:
    server.status = 403
    result = run("top", "--once")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "Error: No."
    assert "scope admin" in result.stderr


def test_no_server_is_a_sentence() -> None:
    result = run("top", "--once", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "No server answers" in result.stderr


FLEET = msgspec.structs.replace(
    VIEW,
    replicas=tuple(msgspec.structs.replace(replica, host="north") for replica in VIEW.replicas),
    hosts=(HostView(name="north", state="cordoned", num_replicas=2, max_replicas=4, version="1", epoch=3),),
    gateways=(GatewayView(name="west", version="1", follows=False),),
    leader=LeaderView(name="first", epoch=3, version="1", since=VIEW.at - 7.0),
)


def test_cluster_status_shows_hosts_gateways_and_the_leader(server: Played) -> None:
    assert "leader    none" in run("cluster", "status").stdout
    server.views = [FLEET]
    shown = run("cluster", "status").stdout
    for words in (
        "first, number 3, for 7 s",
        "north  cordoned, 2 of at most 4",
        "replica-1  ready",
        "west  is behind",
    ):
        assert words in shown
    assert msgspec.json.decode(run("cluster", "status", "--json").stdout, type=ClusterView) == FLEET


def test_orders_about_hosts(server: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.cluster.WAIT_INTERVAL_S", 0.0)
    empty = msgspec.structs.replace(FLEET, replicas=())
    server.views = [FLEET, FLEET, VIEW, empty]  # nobody leads for a moment
    assert run("cluster", "drain", "north", "--wait").exit_code == 0
    assert server.views == [empty]
    run("cluster", "cordon", "north")
    run("cluster", "uncordon", "north")
    run("cluster", "move", "north-1", "--to", "south", "--wait")
    orders = [body for method, path, body in server.requests if method == "POST" and path == "/admin/cluster"]
    assert [(order["action"], order["target"]) for order in orders] == [
        ("drain", "north"),
        ("cordon", "north"),
        ("uncordon", "north"),
        ("move", "north-1"),
    ]
    assert orders[-1]["to"] == "south"
    server.views = [FLEET]
    result = run("cluster", "drain", "north", "--wait", "--timeout", "0")
    assert "still has replicas" in result.stderr
    server.status = 404
    assert "No." in run("cluster", "cordon", "nowhere").stderr


def test_a_replica_is_converted_and_waited_for(server: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.cluster.WAIT_INTERVAL_S", 0.0)
    first = FLEET.replicas[0]

    def seen(**changes: str) -> ClusterView:
        changed = msgspec.structs.replace(first, **changes)
        return msgspec.structs.replace(FLEET, replicas=(changed, *FLEET.replicas[1:]))

    ordered, done = seen(role="prefill", next_role="decode"), seen(role="decode")
    # A server without a leader, such as `penstock serve`, carries orders out too.
    server.views = [ordered, msgspec.structs.replace(done, leader=None)]
    server.order_views = [ordered]
    result = run("cluster", "convert", first.id, "decode", "--wait")
    assert result.exit_code == 0, result.output
    assert f"{first.id}  {first.state} for decode," in result.stdout
    assert ("POST", "/admin/replicas", {"action": "convert", "replica_id": first.id, "role": "decode"}) in (
        server.requests
    )
    shown = run("cluster", "convert", first.id, "decode").stdout
    assert f"{first.id}  {first.state} for prefill, soon for decode," in shown
    server.views = [ordered]
    assert (
        "does not decode yet"
        in run("cluster", "convert", first.id, "decode", "--wait", "--timeout", "0").stderr
    )
    assert run("cluster", "convert", first.id, "both").exit_code == 2
