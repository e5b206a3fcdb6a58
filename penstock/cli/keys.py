"""`penstock keys`: make, list, change and revoke API keys."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.commands import PenstockGroup
from penstock.cli.console import json_option, print_facts, print_json, print_rows, shown_time
from penstock.cli.options import config_options
from penstock.cli.tenants import actor_name, after_option, in_directory, limit_option, place, say_more
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import StoreConfig
from penstock.core.identity import Scope
from penstock.core.request import Tier

if TYPE_CHECKING:
    from penstock.gateway.tenants.records import Key

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_scope_option = click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([str(scope) for scope in Scope]),
    help="Permission of the key; may be given several times.  [default: inference]",
)
_model_option = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that the key may use; may be given several times.  [default: every model]",
)
_tier_option = click.option(
    "--tier",
    type=click.Choice([str(tier) for tier in Tier]),
    help="The most urgent service tier that the key may request.  [default: default]",
)
_expiry_option = click.option(
    "--expires-in", metavar="DURATION", help="Such as 12h, 30d or 8w.  [default: never]"
)
_caching_option = click.option(
    "--cache-responses/--no-cache-responses",
    "caches_responses",
    default=None,
    help="Answer identical requests from the response cache.  [default: off]",
)


@click.group(cls=PenstockGroup, short_help="Make, list, change and revoke API keys.")
def keys() -> None:
    """Manage API keys in the database of the server.

    The commands need no running server, and running servers notice a change within seconds. A server that was
    started without any key asks for keys from its next start on.

    \b
      penstock keys create --name laptop
      penstock keys create --name ci --workspace ws_… --scope inference --expires-in 30d
      penstock keys revoke key_…
    """


@keys.command(short_help="Make a key and show it once.")
@click.option("--name", required=True, help="What the key is for.")
@click.option(
    "--workspace", default="default", show_default=True, metavar="ID", help="Workspace that owns the key."
)
@_scope_option
@_model_option
@_tier_option
@_expiry_option
@_caching_option
@json_option
@config_options(StoreConfig)
def create(
    name: str,
    workspace: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    tier: str | None,
    expires_in: str | None,
    caches_responses: bool | None,
    as_json: bool,
    config: StoreConfig,
) -> None:
    """Make a key. The key is printed once and cannot be read again: only its hash is stored."""
    from penstock.gateway.tenants.directory import Actor
    from penstock.gateway.tenants.records import NewKey

    new_key = NewKey(
        name=name,
        workspace_id=workspace,
        scopes=tuple(map(Scope, scopes)) or (Scope.INFERENCE,),
        allowed_models=models or None,
        best_tier=Tier(tier or Tier.DEFAULT),
        caches_responses=bool(caches_responses),
        expires_at=_expiry(expires_in),
    )
    issued = in_directory(config, lambda directory: directory.create_key(Actor(actor_name()), new_key))
    if as_json:
        print_json({**_shown(issued.key), "secret": issued.secret})
        return
    key = issued.key
    click.echo(
        f"Made the key {key.id} ({key.name}) of workspace {key.workspace_id} {place(config)}.", err=True
    )
    click.echo("Keep it now: it is not shown again.", err=True)
    click.echo(issued.secret)


@keys.command("list", short_help="List keys, newest first.")
@click.option("--workspace", metavar="ID", help="Only the keys of this workspace.")
@limit_option
@after_option
@json_option
@config_options(StoreConfig)
def list_keys(
    workspace: str | None, limit: int, after: str | None, as_json: bool, config: StoreConfig
) -> None:
    """List keys, newest first, with the first characters of each key. Revoked and expired keys are listed too."""
    page = in_directory(
        config,
        lambda directory: directory.keys(limit=limit, after=after, workspace_id=workspace),
        reads_only=True,
    )
    if as_json:
        print_json({"data": [_shown(key) for key in page.data], "has_more": page.has_more})
        return
    if not page.data:
        click.echo(f"There are no keys {place(config)}.", err=True)
        return
    print_rows(
        ("ID", "NAME", "KEY", "WORKSPACE", "SCOPES", "TIER", "STATUS", "EXPIRES", "LAST USED"),
        [_row(key) for key in page.data],
    )
    say_more(page.has_more, page.data[-1].id)


@keys.command(short_help="Show one key.")
@click.argument("key_id")
@json_option
@config_options(StoreConfig)
def show(key_id: str, as_json: bool, config: StoreConfig) -> None:
    """Show all stored properties of a key. The secret itself is not stored."""
    from penstock.gateway.tenants.records import KEYS

    key = in_directory(config, lambda directory: directory.find(KEYS, key_id), reads_only=True)
    if as_json:
        print_json(_shown(key))
    else:
        print_facts(_facts(key))


@keys.command(short_help="Change what a key may do.")
@click.argument("key_id")
@click.option("--name", help="A new name.")
@_scope_option
@_model_option
@click.option("--every-model", is_flag=True, help="Allow every model again.")
@_tier_option
@_expiry_option
@click.option("--never-expires", is_flag=True, help="Remove the expiry of the key.")
@_caching_option
@json_option
@config_options(StoreConfig)
def update(key_id: str, as_json: bool, config: StoreConfig, **given: Any) -> None:
    """Change a key. Properties without a flag stay as they are; scopes and models are replaced as a whole."""
    from penstock.gateway.tenants.directory import Actor
    from penstock.gateway.tenants.records import KeyChanges

    changes = KeyChanges(**_changes(**given))
    actor = Actor(actor_name())
    key = in_directory(config, lambda directory: directory.update_key(actor, key_id, changes))
    if as_json:
        print_json(_shown(key))
        return
    click.echo(f"Changed the key {key.id} {place(config)}.", err=True)
    print_facts(_facts(key))


@keys.command(short_help="Revoke a key.")
@click.argument("key_id")
@json_option
@config_options(StoreConfig)
def revoke(key_id: str, as_json: bool, config: StoreConfig) -> None:
    """Revoke a key, which cannot be undone. Running servers refuse the key within seconds."""
    from penstock.gateway.tenants.directory import Actor

    key = in_directory(config, lambda directory: directory.revoke_key(Actor(actor_name()), key_id))
    if as_json:
        print_json(_shown(key))
    else:
        click.echo(f"Revoked the key {key.id} ({key.name}) {place(config)}.")


def _changes(
    *,
    name: str | None,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    every_model: bool,
    tier: str | None,
    expires_in: str | None,
    never_expires: bool,
    caches_responses: bool | None,
) -> dict[str, Any]:
    """Return the fields for which flags were given."""
    if models and every_model:
        raise ConfigError("--model and --every-model exclude each other.")
    if expires_in and never_expires:
        raise ConfigError("--expires-in and --never-expires exclude each other.")
    changes: dict[str, Any] = {}
    if name is not None:
        changes["name"] = name
    if scopes:
        changes["scopes"] = tuple(map(Scope, scopes))
    if models or every_model:
        changes["allowed_models"] = models or None
    if tier is not None:
        changes["best_tier"] = Tier(tier)
    if expires_in or never_expires:
        changes["expires_at"] = _expiry(expires_in)
    if caches_responses is not None:
        changes["caches_responses"] = caches_responses
    return changes


def _expiry(expires_in: str | None) -> float | None:
    if expires_in is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhdw])", expires_in)
    if match is None:
        raise ConfigError(
            f"'{expires_in}' is not a duration.",
            hint="Write minutes, hours, days or weeks: 90m, 12h, 30d, 8w.",
        )
    return time.time() + int(match[1]) * _SECONDS[match[2]]


def _shown(key: Key) -> dict[str, Any]:
    return {**msgspec.to_builtins(key), "status": key.status(time.time())}


def _row(key: Key) -> tuple[str, ...]:
    return (
        key.id,
        key.name,
        f"{key.prefix}…",
        key.workspace_id,
        ",".join(key.scopes),
        key.best_tier,
        key.status(time.time()),
        shown_time(key.expires_at, "never"),
        shown_time(key.last_used_at, "never"),
    )


def _facts(key: Key) -> list[tuple[str, str]]:
    return [
        ("id", key.id),
        ("name", key.name),
        ("key", f"{key.prefix}…"),
        ("workspace", key.workspace_id),
        ("status", key.status(time.time())),
        ("scopes", ", ".join(key.scopes)),
        ("models", ", ".join(key.allowed_models) if key.allowed_models else "every model"),
        ("tier", key.best_tier),
        ("response cache", "on" if key.caches_responses else "off"),
        ("made", f"{shown_time(key.created_at)} by {key.created_by}"),
        ("expires", shown_time(key.expires_at, "never")),
        ("revoked", shown_time(key.revoked_at, "no")),
        ("last used", shown_time(key.last_used_at, "never")),
    ]
