"""Real partitions, with network namespaces: what is cut off is noticed, and streams go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.network_namespaces import Network, network, why_not

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
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


@pytest.fixture
def made() -> Iterator[Network]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network() as made:
        yield made


def run(code: str, prefix: list[str], address: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", code, address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.parametrize("direction", ["both", "receives", "sends"])
def test_an_engine_notices_a_gateway_behind_a_cut_network(made: Network, direction: str) -> None:
    here, there = made.node("engine"), made.node("gateway")
    address = f"tcp://{here.host}:5555"
    engine, gateway = run(ENGINE, here.prefix, address), run(GATEWAY, there.prefix, address)
    try:
        assert engine.stdout is not None
        assert [engine.stdout.readline() for _ in range(2)] == ["bound\n", "heard\n"]
        there.cut(sends=direction == "sends", receives=direction == "receives")
        assert engine.communicate(timeout=WAIT_S)[0] == "gone\n"
    finally:
        for process in (engine, gateway):
            process.kill()
            process.wait()


@pytest.mark.timeout(900)
def test_a_gateway_that_hears_nothing_for_a_while_loses_no_token(made: Network) -> None:
    """The fault that once ended answers: the gateway loses one replica after the other, and both come back."""
    command = [sys.executable, "-m", "bench.shared_faults", "--streams", "8", "--fault-s", "12"]
    command += ["--only", "gateway receives nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
