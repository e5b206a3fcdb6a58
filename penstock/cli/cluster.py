"""`penstock cluster`: the hosts, gateways and leader of a shared fleet, and orders about hosts. `penstock top`: a
live view of replicas, queues, routing, releases and the autoscaler, from /admin/cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand, PenstockGroup
from penstock.cli.console import json_option, print_json
from penstock.cli.options import server_options
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from penstock.cli.clients import AdminClient
    from penstock.core.cluster_view import ClusterView, PoolView, ReleaseView, ReplicaView

WAIT_INTERVAL_S = 0.5
_wait_option = click.option("--wait", is_flag=True, help="Return when it is done.")
_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long --wait waits.",
)


@click.group(cls=PenstockGroup, short_help="Show and operate the hosts of a shared fleet.")
def cluster() -> None:
    """Show the hosts, gateways and leader of a shared fleet, and take hosts out of service.

    Any gateway of the fleet takes these commands (--url), and the leader (`penstock control`) carries them out.

    \b
      penstock cluster status
      penstock cluster drain host-a1b2c3 --wait
      penstock cluster uncordon host-a1b2c3
      penstock cluster move host-a1b2c3-1 --to host-d4e5f6
      penstock cluster convert host-a1b2c3-1 decode
    """


@cluster.command(short_help="Show hosts, replicas, gateways and the leader.")
@json_option
@server_options
def status(as_json: bool, client: AdminClient) -> None:
    """Show the leader, hosts, replicas and gateways. Without a leader, show the replicas that the gateway knows."""
    _show(client.cluster(), as_json=as_json)


@cluster.command(short_help="Place no more replicas on a host.")
@click.argument("host")
@json_option
@server_options
def cordon(host: str, as_json: bool, client: AdminClient) -> None:
    """Place no more replicas on HOST. Its replicas continue."""
    _show(client.operate({"action": "cordon", "target": host}), as_json=as_json)


@cluster.command(short_help="Take a host back into service.")
@click.argument("host")
@json_option
@server_options
def uncordon(host: str, as_json: bool, client: AdminClient) -> None:
    """Take HOST back into service. If it was drained, its own replicas start again."""
    _show(client.operate({"action": "uncordon", "target": host}), as_json=as_json)


@cluster.command(short_help="Move all replicas away from a host.")
@click.argument("host")
@_wait_option
@_timeout_option
@json_option
@server_options
def drain(host: str, wait: bool, timeout_s: float, as_json: bool, client: AdminClient) -> None:
    """Move all replicas away from HOST, and place no more there.

    Each replica starts on another host first, if one has room. Then it finishes its requests and ends. The process
    `penstock engine` stays until it is ended.
    """

    def is_done(view: ClusterView) -> bool:
        return view.leader is not None and not any(replica.host == host for replica in view.replicas)

    view = client.operate({"action": "drain", "target": host})
    if wait:
        view = _wait(client, is_done, timeout_s, f"{host} still has replicas.")
    _show(view, as_json=as_json)


@cluster.command(short_help="Move one replica to another host.")
@click.argument("replica")
@click.option("--to", metavar="HOST", help="The host.  [default: the one with the most room]")
@_wait_option
@_timeout_option
@json_option
@server_options
def move(
    replica: str, to: str | None, wait: bool, timeout_s: float, as_json: bool, client: AdminClient
) -> None:
    """Start a replica like REPLICA on another host, then let REPLICA finish its requests and end."""

    def is_done(view: ClusterView) -> bool:
        return view.leader is not None and not any(each.id == replica for each in view.replicas)

    view = client.operate({"action": "move", "target": replica, "to": to})
    if wait:
        view = _wait(client, is_done, timeout_s, f"{replica} is still there.")
    _show(view, as_json=as_json)


@cluster.command(short_help="Let a replica prefill or decode from now on.")
@click.argument("replica")
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@_wait_option
@_timeout_option
@json_option
@server_options
def convert(
    replica: str, role: str, wait: bool, timeout_s: float, as_json: bool, client: AdminClient
) -> None:
    """Let REPLICA work in the other ROLE from now on: prefill or decode.

    Nothing is loaded again, the replica keeps its cache, and its requests continue. A model keeps at least one
    replica in each role. `penstock serve` takes this command too. Where autoscaling is on, it may change the role
    again.
    """

    def is_done(view: ClusterView) -> bool:
        return any((each.id, each.role) == (replica, role) for each in view.replicas)

    view = client.order_replica({"action": "convert", "replica_id": replica, "role": role})
    if wait:
        view = _wait(client, is_done, timeout_s, f"{replica} does not {role} yet.")
    _show(view, as_json=as_json)


def _wait(
    client: AdminClient, is_done: Callable[[ClusterView], bool], timeout_s: float, problem: str
) -> ClusterView:
    """Wait until an order is carried out. While no process leads, a gateway does not know of orders, but of what
    replicas do."""
    end_s = time.monotonic() + timeout_s
    while True:
        view = client.cluster()
        if is_done(view):
            return view
        if time.monotonic() >= end_s:
            raise UsageError(problem, hint="`penstock cluster status` and the leader's log say more.")
        time.sleep(WAIT_INTERVAL_S)


def _show(view: ClusterView, *, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    leader = view.leader
    if leader is None:
        click.echo("leader    none: start `penstock control`, or wait 10 s if one was lost just now")
    else:
        age_s = view.at - leader.since
        click.echo(
            f"leader    {leader.name}, number {leader.epoch}, for {age_s:.0f} s, version {leader.version}"
        )
    for host in view.hosts:
        replicas = f"{host.num_replicas} of at most {host.max_replicas} replicas"
        click.echo(f"host      {host.name}  {host.state}, {replicas}, version {host.version}")
    for replica in view.replicas:
        load = f"{replica.num_running} running, {replica.num_waiting} waiting"
        role = "" if replica.role == "both" else f" for {replica.role}"
        if replica.next_role is not None:
            role += f", soon for {replica.next_role}"
        click.echo(
            f"replica   {replica.id}  {replica.state}{role}, {replica.model} {replica.revision}, {load}"
        )
    for gateway in view.gateways:
        follows = "follows" if gateway.follows else "is behind"
        click.echo(f"gateway   {gateway.name}  {follows}, version {gateway.version}")


SCRIPT_WIDTH = 240
_STYLES = {"ready": "green", "draining": "yellow", "unhealthy": "red", "starting": "cyan", "warming": "cyan"}


@click.command(cls=PenstockCommand, short_help="Watch replicas, queues and releases.")
@click.option(
    "--interval",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between updates.",
)
@click.option("--once", is_flag=True, help="Print once and exit, for scripts.")
@json_option
@server_options
def top(interval: float, once: bool, as_json: bool, client: AdminClient) -> None:
    """Watch a running server: its replicas with their queues, KV caches and latencies, how requests were routed,
    what the autoscaler did last, and releases.

    Times are medians and 95th percentiles of the last minute, as the gateways saw them. SPEC is the share of drafted
    tokens that were accepted, and the tokens per step of requests with drafts, since the replica started. Ctrl-C ends
    it.
    """
    from penstock.cli.console import stdout_console

    view = client.cluster()
    if as_json:
        print_json(view)
        return
    console = stdout_console()
    if once:
        # A pipe has no width, and scripts need whole words.
        console.width = console.width if console.is_terminal else max(console.width, SCRIPT_WIDTH)
        console.print(drawn(view))
        return
    from rich.live import Live

    live = Live(drawn(view), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), live:
        while True:
            time.sleep(interval)
            live.update(drawn(client.cluster()), refresh=True)


def drawn(view: ClusterView) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_replicas(view), Text(_routing(view))]
    parts += [Text(_pool(pool, view.at)) for pool in view.pools]
    parts += [Text(_release(release, view.at)) for release in view.releases]
    return Group(*parts)


def _replicas(view: ClusterView) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("REPLICA", "MODEL", "REVISION", "STATE"):
        table.add_column(head, no_wrap=True)
    for head in ("RUN", "WAIT", "QUEUED", "KV", "CACHED", "SPEC", "TTFT ms", "ITL ms"):
        table.add_column(head, justify="right", no_wrap=True)
    for replica in view.replicas:
        state = replica.state if replica.role == "both" else f"{replica.state} {replica.role}"
        table.add_row(
            replica.id,
            replica.model,
            replica.revision,
            Text(state, style=_STYLES.get(replica.state, "")),
            f"{replica.num_running}",
            f"{replica.num_waiting}",
            f"{replica.num_waiting_tokens:,}",
            f"{replica.kv_usage:.0%}",
            "–" if replica.cached_share is None else f"{replica.cached_share:.0%}",
            _speculation(replica),
            _range(replica.ttft_p50_s, replica.ttft_p95_s),
            _range(replica.itl_p50_s, replica.itl_p95_s),
        )
    return table


def _speculation(replica: ReplicaView) -> str:
    """Format the accepted share of drafted tokens, and the tokens per step of requests with drafts."""
    if replica.accepted_share is None:
        return "–"
    return f"{replica.accepted_share:.0%}/{replica.tokens_per_draft or 1.0:.1f}"


def _routing(view: ClusterView) -> str:
    routing = view.routing
    total = sum(routing.reasons.values())
    line = f"routed    {_counted(total, 'request')} by {_counted(routing.num_gateways, 'gateway')}"
    if total:
        reasons = sorted(routing.reasons.items(), key=lambda item: -item[1])
        line += ": " + ", ".join(f"{reason} {count / total:.0%}" for reason, count in reasons)
    if routing.num_prompt_tokens:
        line += (
            f"; {routing.num_matched_tokens / routing.num_prompt_tokens:.0%} of prompt tokens thought cached"
        )
    return line


def _pool(pool: PoolView, now: float) -> str:
    role = "" if pool.role == "both" else f" ({pool.role})"
    range_ = (
        _counted(pool.num_wanted, "replica")
        if pool.min_replicas == pool.max_replicas
        else f"{pool.num_wanted} of {pool.min_replicas}–{pool.max_replicas} replicas"
    )
    line = f"pool      {pool.model}{role}: {range_}, {pool.queued_prefill_tokens:,.0f} prefill tokens queued"
    line += f" ({pool.drain_s:.1f} s), TTFT p95 {_milliseconds(pool.ttft_p95_s)} ms"
    line += f" of {pool.ttft_target_s * 1e3:.0f} ms, {_counted(pool.held_requests, 'request')} held"
    if pool.last_decision_at is not None:
        line += f"; {pool.last_decision}, {now - pool.last_decision_at:.0f} s ago"
    return line


def _release(release: ReleaseView, now: float) -> str:
    line = f"release   {release.model}: {release.stable} → {release.candidate}, {release.stage.replace('_', ' ')}"
    if release.candidate_share and not release.is_over:
        line += f" {release.candidate_share:.0%}"
    line += f" for {now - release.since:.0f} s"
    undecided = [f"{gate.gate} {gate.result} ({gate.sentence})" for gate in release.gates]
    return line + (": " + ", ".join(undecided) if undecided else f" ({release.reason.replace('_', ' ')})")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _range(p50_s: float | None, p95_s: float | None) -> str:
    """Format the median and the 95th percentile."""
    return f"{_milliseconds(p50_s)}/{_milliseconds(p95_s)}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"
