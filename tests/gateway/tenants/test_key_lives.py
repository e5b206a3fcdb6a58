"""Random lives of keys: whatever order things happen in, a key signs in if and only if it is alive."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from penstock.core.errors import AuthenticationFailed
from penstock.core.identity import Scope
from penstock.gateway.tenants.keyring import TRUST_S
from penstock.gateway.tenants.records import WORKSPACES, KeyChanges, NewKey
from tests.gateway.store.ready_made import ready_made_database
from tests.gateway.tenants.conftest import ACTOR, Time, World

T = TypeVar("T")


@dataclass
class Life:
    """What we know about a key without asking."""

    key_id: str
    secret: str
    workspace: str
    scopes: frozenset[Scope]
    expires_at: float | None
    is_revoked: bool = False


class KeyLives(RuleBasedStateMachine):
    """Two gateways on one database. Before each sign-in the time in which changes may go unnoticed has passed."""

    lives = Bundle("lives")
    workspaces = Bundle("workspaces")

    @initialize(target=workspaces)
    def start(self) -> str:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(ready_made_database(Path(self.folder.name)), Time())
        self.rings = [self.world.ring(), self.world.ring()]
        self.archived: set[str] = set()
        return "default"

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(target=workspaces)
    def make_workspace(self) -> str:
        return self.wait(self.world.directory.create_workspace(ACTOR, "W")).id

    @rule(workspace=workspaces)
    def archive_workspace(self, workspace: str) -> None:
        if workspace != "default" and workspace not in self.archived:
            self.wait(self.world.directory.archive(ACTOR, WORKSPACES, workspace))
            self.archived.add(workspace)

    @rule(target=lives, workspace=workspaces, lifetime_s=st.none() | st.integers(1, 60))
    def make_key(self, workspace: str, lifetime_s: int | None) -> Life | None:
        if workspace in self.archived:
            return None
        expires_at = None if lifetime_s is None else self.world.time.wall() + lifetime_s
        request = NewKey(name="k", workspace_id=workspace, expires_at=expires_at)
        issued = self.wait(self.world.directory.create_key(ACTOR, request))
        return Life(issued.key.id, issued.secret, workspace, frozenset({Scope.INFERENCE}), expires_at)

    @rule(life=lives)
    def revoke(self, life: Life | None) -> None:
        if life is not None and not life.is_revoked:
            self.wait(self.world.directory.revoke_key(ACTOR, life.key_id))
            life.is_revoked = True

    @rule(life=lives, lifetime_s=st.none() | st.integers(1, 60), scope=st.sampled_from(Scope))
    def change(self, life: Life | None, lifetime_s: int | None, scope: Scope) -> None:
        if life is not None and not life.is_revoked:
            expires_at = None if lifetime_s is None else self.world.time.wall() + lifetime_s
            changes = KeyChanges(expires_at=expires_at, scopes=(scope,))
            self.wait(self.world.directory.update_key(ACTOR, life.key_id, changes))
            life.expires_at, life.scopes = expires_at, frozenset({scope})

    @rule(seconds=st.integers(1, 40))
    def let_time_pass(self, seconds: int) -> None:
        self.world.time.pass_s(seconds)

    @rule(life=lives, gateway=st.integers(0, 1))
    def sign_in(self, life: Life | None, gateway: int) -> None:
        if life is None:
            return
        self.world.time.pass_s(TRUST_S)
        is_alive = (
            not life.is_revoked
            and life.workspace not in self.archived
            and (life.expires_at is None or self.world.time.wall() < life.expires_at)
        )
        ring = self.rings[gateway]
        try:
            principal = self.wait(ring.identify(life.secret))
        except AuthenticationFailed:
            assert not is_alive
        else:
            assert is_alive
            assert (principal.key_id, principal.workspace_id) == (life.key_id, life.workspace)
            assert principal.scopes == life.scopes

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for ring in self.rings:
                self.wait(ring.close())
            self.loop.close()
            self.world.database.close()
            self.folder.cleanup()


TestKeyLives = KeyLives.TestCase
TestKeyLives.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
