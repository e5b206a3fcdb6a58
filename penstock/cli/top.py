"""`penstock top`: a live view of replicas, queues, routing, releases and the autoscaler, from /admin/cluster."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import json_option, print_json
from penstock.cli.options import server_options

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from penstock.core.cluster_view import ClusterView, PoolView, ReleaseView, ReplicaView

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
def top(interval: float, once: bool, as_json: bool, url: str, api_key: str | None) -> None:
    """Watch a running server: its replicas with their queues, KV caches and latencies, how requests were routed,
    what the autoscaler did last, and releases.

    Times are medians and 95th percentiles of the last minute, as the gateways saw them. SPEC is the share of drafted
    tokens that were accepted, and the tokens per step of requests with drafts, since the replica started. Ctrl-C ends
    it.
    """
    from penstock.cli.clients import AdminClient
    from penstock.cli.console import stdout_console

    with contextlib.closing(AdminClient(url, api_key)) as client:
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
