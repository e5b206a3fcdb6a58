"""Servers for clients, and which clients run: the quick ones always, all of them with `--all-clients`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.console import fetch_model
from tests.clients.agent_server import AgentServer
from tests.clients.catalogue import AGENT, CLIENTS, DEFAULT_MODEL, Client
from tests.clients.environments import INSTALL_TIMEOUT_S, CannotInstall, prepare
from tests.clients.outcome import Outcome, read_outcome, write_table
from tests.e2e.conftest import START_TIMEOUT_S, RunningServer, start_server, write_chat_model

API_KEY = "key-for-clients"
LONG_CONTEXT = 131_072


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-clients", action="store_true", help="Run every client, not only the quick ones.")
    parser.addoption("--client-model", help="Serve this model instead of the default one.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    clients = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("clients"))}
    for item, client in clients.items():
        limit_s = INSTALL_TIMEOUT_S + START_TIMEOUT_S + client.timeout_s
        item.add_marker(pytest.mark.timeout(limit_s), append=False)  # before that of all tests of servers
    if config.getoption("--all-clients", False):
        return
    left_out = [item for item, client in clients.items() if not client.quick]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny"), LONG_CONTEXT)


@pytest.fixture(scope="session")
def client_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Client], RunningServer | AgentServer]]:
    """A server for a client, shared with the clients that want the same one."""
    running: dict[tuple[str, ...], RunningServer | AgentServer] = {}

    def serve(client: Client) -> RunningServer | AgentServer:
        if client.model == AGENT:
            if (AGENT,) not in running:
                running[(AGENT,)] = AgentServer(API_KEY)
            return running[(AGENT,)]
        arguments = [client.model, *client.serve, "--api-key", API_KEY]
        if client.model == "tiny":
            arguments[:1] = [str(tiny_model), "--served-model-name", "tiny", "--load-format", "random"]
            arguments += ["--max-output-tokens", "64"]  # random weights never end an answer
        else:
            fetch_model(client.model)
        key = tuple(arguments)
        if key not in running:
            running[key] = start_server(tmp_path_factory.mktemp("server"), *arguments)
        return running[key]

    yield serve
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, client_server: Callable[[Client], RunningServer | AgentServer]
) -> Iterator[Callable[[Client], Outcome]]:
    """What came of a client's script, which runs once for all its capabilities."""
    outcomes: dict[str, Outcome | str] = {}

    def run_client(client: Client) -> Outcome:
        if client.name not in outcomes:
            try:
                outcomes[client.name] = _run(client)
            except CannotInstall as reason:
                outcomes[client.name] = str(reason)
        found = outcomes[client.name]
        if isinstance(found, str):
            pytest.skip(found)
        return found

    def _run(client: Client) -> Outcome:
        chosen = request.config.getoption("--client-model", None)
        if chosen and client.model == DEFAULT_MODEL:
            client = replace(client, model=chosen)
        environment = prepare(client)
        variables = {
            "BASE_URL": client_server(client).url,
            "API_KEY": API_KEY,
            "MODEL": "bytes" if client.model == AGENT else client.model,
        }
        return read_outcome(client, environment.version, environment.run(client, variables))

    yield run_client
    if request.config.getoption("--write-table", False):
        write_table(CLIENTS, {name: found for name, found in outcomes.items() if isinstance(found, Outcome)})
