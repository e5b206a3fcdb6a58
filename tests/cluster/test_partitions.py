"""Real partitions, with network namespaces: what is cut off is noticed, and streams go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.network_namespaces import Network, network, why_not

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
pytestmark = pytest.mark.slow

# An engine's end of a connection. It says when the gateway counts as gone.
ENGINE = """
import sys, time, zmq
from penstock.cluster.transport import bind
socket = zmq.Context().socket(zmq.ROUTER)
socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
socket.setsockopt(zmq.LINGER, 0)
bind(socket, sys.argv[1], None)
print("bound", flush=True)
gateway = socket.recv_multipart()[0]
print("heard", flush=True)
try:
    while True:
        socket.send_multipart([gateway, b"a heartbeat"])
        time.sleep(0.2)
except zmq.ZMQError as error:
    print("gone" if error.errno == zmq.EHOSTUNREACH else error, flush=True)
"""
GATEWAY = """
import sys, time, zmq
from penstock.cluster.transport import connect
socket = zmq.Context().socket(zmq.DEALER)
connect(socket, sys.argv[1])
socket.send(b"hello")
time.sleep(600)
"""


# A server that begins an answer, and sends no more of it.
SERVER = """
import socket, sys, time
host, _, port = sys.argv[1].rpartition("/")[2].rpartition(":")
listener = socket.create_server((host, int(port)))
print("bound", flush=True)
connected, _ = listener.accept()
connected.recv(1 << 16)
connected.sendall(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n2\\r\\nhi\\r\\n")
time.sleep(600)
"""

CLIENT = """
import asyncio, sys
from penstock.cluster.external.connection import AnswerBroken
from penstock.cluster.external.http import HttpClient
async def ask():
    client = HttpClient(sys.argv[1], {})
    answer = await client.send("POST", "/v1/completions", b"{}")
    try:
        await answer.deliver(lambda piece: print("heard", flush=True))
    except AnswerBroken as error:
        print(error, flush=True)
asyncio.run(ask())
"""


@pytest.fixture
def made() -> Iterator[Network]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network() as made:
        yield made


def run(code: str, prefix: list[str], address: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", code, address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_engines_notice_gateways_behind_a_cut_network(made: Network) -> None:
    """One gateway hears nothing and is not heard, one still receives, and one still sends. All are cut off together,
    because noticing takes a while."""
    engines, gateways = [], []
    try:
        for kept in ("nothing", "receives", "sends"):
            here, there = made.node(f"engine-{kept}"), made.node(f"gateway-{kept}")
            address = f"tcp://{here.host}:5555"
            engine = run(ENGINE, here.prefix, address)
            engines.append(engine)
            gateways.append(run(GATEWAY, there.prefix, address))
            assert engine.stdout is not None
            assert [engine.stdout.readline() for _ in range(2)] == ["bound\n", "heard\n"]
            there.cut(sends=kept == "sends", receives=kept == "receives")
        assert [engine.communicate(timeout=WAIT_S)[0] for engine in engines] == ["gone\n"] * 3
    finally:
        for process in (*engines, *gateways):
            process.kill()
            process.wait()


def test_gateways_notice_external_servers_behind_a_cut_network(made: Network) -> None:
    """The stream could be silent for ten minutes otherwise: nobody says that the connection is gone."""
    there, here = made.node("server"), made.node("gateway")
    url = f"http://{there.host}:5555"
    server = run(SERVER, there.prefix, url)
    client = None
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "bound\n"
        client = run(CLIENT, here.prefix, url)
        assert client.stdout is not None
        assert client.stdout.readline() == "heard\n"
        there.cut()
        assert "timed out" in client.communicate(timeout=WAIT_S)[0]
    finally:
        for process in (server, client):
            if process is not None:
                process.kill()
                process.wait()


@pytest.mark.timeout(900)
def test_a_gateway_that_hears_nothing_for_a_while_loses_no_token(made: Network) -> None:
    """The fault that once ended answers: the gateway loses one replica after the other, and both come back."""
    command = [sys.executable, "-m", "bench.shared_faults", "--streams", "8", "--fault-s", "12"]
    command += ["--pause-s", "0.25"]  # clients without a pause take all cores for half a minute
    command += ["--only", "gateway receives nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
