"""`penstock cluster`: the hosts, gateways and leader of a shared fleet, and orders about hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockGroup
from penstock.cli.console import json_option, print_json
from penstock.cli.options import connect, server_options
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.clients import AdminClient
    from penstock.core.cluster_view import ClusterView

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
def status(as_json: bool, url: str, api_key: str | None) -> None:
    """Show the leader, hosts, replicas and gateways. Without a leader, show the replicas that the gateway knows."""
    with closing(connect(url, api_key)) as client:
        _show(client.cluster(), as_json=as_json)


@cluster.command(short_help="Place no more replicas on a host.")
@click.argument("host")
@json_option
@server_options
def cordon(host: str, as_json: bool, url: str, api_key: str | None) -> None:
    """Place no more replicas on HOST. Its replicas continue."""
    with closing(connect(url, api_key)) as client:
        _show(client.operate({"action": "cordon", "target": host}), as_json=as_json)


@cluster.command(short_help="Take a host back into service.")
@click.argument("host")
@json_option
@server_options
def uncordon(host: str, as_json: bool, url: str, api_key: str | None) -> None:
    """Take HOST back into service. If it was drained, its own replicas start again."""
    with closing(connect(url, api_key)) as client:
        _show(client.operate({"action": "uncordon", "target": host}), as_json=as_json)


@cluster.command(short_help="Move all replicas away from a host.")
@click.argument("host")
@_wait_option
@_timeout_option
@json_option
@server_options
def drain(host: str, wait: bool, timeout_s: float, as_json: bool, url: str, api_key: str | None) -> None:
    """Move all replicas away from HOST, and place no more there.

    Each replica starts on another host first, if one has room. Then it finishes its requests and ends. The process
    `penstock engine` stays until it is ended.
    """

    def is_done(view: ClusterView) -> bool:
        return view.leader is not None and not any(replica.host == host for replica in view.replicas)

    with closing(connect(url, api_key)) as client:
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
    replica: str, to: str | None, wait: bool, timeout_s: float, as_json: bool, url: str, api_key: str | None
) -> None:
    """Start a replica like REPLICA on another host, then let REPLICA finish its requests and end."""

    def is_done(view: ClusterView) -> bool:
        return view.leader is not None and not any(each.id == replica for each in view.replicas)

    with closing(connect(url, api_key)) as client:
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
    replica: str, role: str, wait: bool, timeout_s: float, as_json: bool, url: str, api_key: str | None
) -> None:
    """Let REPLICA work in the other ROLE from now on: prefill or decode.

    Nothing is loaded again, the replica keeps its cache, and its requests continue. A model keeps at least one
    replica in each role. `penstock serve` takes this command too. Where autoscaling is on, it may change the role
    again.
    """

    def is_done(view: ClusterView) -> bool:
        return any((each.id, each.role) == (replica, role) for each in view.replicas)

    with closing(connect(url, api_key)) as client:
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
