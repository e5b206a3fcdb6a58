"""Real clients against a real server, each capability as a test. `make test-clients` runs all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import INSTALL_TIMEOUT_S
from tests.clients.outcome import Outcome


def _cases() -> list[object]:
    return [
        pytest.param(
            client,
            capability,
            marks=[pytest.mark.clients(client), pytest.mark.e2e],
            id=f"{client.name}-{capability}",
        )
        for client in CLIENTS
        for capability in client.capabilities
    ]


@pytest.mark.parametrize(("client", "capability"), _cases())
def test_client(
    client: Client,
    capability: str,
    outcome_of: Callable[[Client], Outcome],
    request: pytest.FixtureRequest,
) -> None:
    limit = request.node.get_closest_marker("timeout")
    assert limit.args[0] > INSTALL_TIMEOUT_S + client.timeout_s, "the client's own limit must come first"
    outcome = outcome_of(client)
    report = outcome.reports[capability]
    if report.ok is None:
        pytest.skip(f"{client.title}: {capability}: {report.note}")
    assert report.ok, f"{report.note}\n{outcome.finished.stderr[-3000:]}"
    undeclared = set(outcome.reports) - set(client.capabilities)
    assert not undeclared, "the catalogue does not name what the script reports"
