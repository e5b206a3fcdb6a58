"""Network namespaces for real partitions on one machine: every node has an address of its own, and can be cut off.

Needs Linux, root, `ip`, `nft` and `nsenter`. All nodes are on one bridge. The machine itself has an address on the
bridge too, and a cut never separates it from a node: clients on the machine watch what happens. Packets are dropped
on arrival, without an answer to the sender, as a network drops them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "nft", "nsenter")
TIMEOUT_S = 30.0
LOST_OF_HUNDRED = 8  # packets on a bad line: most connections wait for several of them in a second


def why_not() -> str | None:
    """Return the reason why this machine has no network namespaces for us, or None."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)}"
    try:
        with network() as made:
            node = made.node("probe")
            node.cut()
            node.join()
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"network namespaces are not allowed here: {said.strip().splitlines()[-1]}"
    return None


@dataclass(frozen=True, slots=True)
class Node:
    """One namespace. `host` is its address."""

    network: Network
    namespace: str
    interface: str  # the machine's end of the node's cable
    host: str

    @property
    def prefix(self) -> list[str]:
        """What goes before a command that is to run in this node. The command keeps its process id."""
        return ["nsenter", f"--net={self.file}"]

    @property
    def file(self) -> Path:
        return Path("/var/run/netns", self.namespace)

    def cut(self, *, sends: bool = False, receives: bool = False) -> None:
        """Drop all packets between this node and other nodes, except those that it still `sends` or `receives`."""
        self.join()
        if not sends:
            _drop(self.namespace, self.interface, f"ip daddr != {self.network.host}")
        if not receives:
            _drop(self.namespace, "eth0", f"ip saddr != {self.network.host}", self.prefix)

    def join(self) -> None:
        """End the cut."""
        for prefix in ([], self.prefix):
            tables = _run([*prefix, "nft", "list", "tables", "netdev"])
            if f"table netdev {self.namespace}\n" in f"{tables}\n":
                _run([*prefix, "nft", "delete", "table", "netdev", self.namespace])

    def lose_some(self) -> None:
        """Drop some of the packets that come from other nodes, at random, until `join`."""
        self.join()
        packets = f"ip saddr != {self.network.host} numgen random mod 100 < {LOST_OF_HUNDRED}"
        _drop(self.namespace, "eth0", packets, self.prefix)


class Network:
    def __init__(self) -> None:
        self._name = f"ps{secrets.token_hex(3)}"  # names of interfaces have at most 15 characters
        self._subnet = f"10.{213 + secrets.randbelow(40)}.{secrets.randbelow(250)}"
        self.host = f"{self._subnet}.1"
        self._nodes: list[Node] = []

    def create(self) -> None:
        _run(["ip", "link", "add", self._name, "type", "bridge"])
        _run(["ip", "address", "add", f"{self.host}/24", "dev", self._name])
        _run(["ip", "link", "set", self._name, "up"])

    def node(self, name: str) -> Node:
        number = len(self._nodes)
        node = Node(self, f"{self._name}-{name}", f"{self._name}-{number}", f"{self._subnet}.{number + 2}")
        _run(["ip", "netns", "add", node.namespace])
        self._nodes.append(node)
        peer = ["peer", "name", "eth0", "netns", node.namespace]
        _run(["ip", "link", "add", node.interface, "type", "veth", *peer])
        _run(["ip", "link", "set", node.interface, "master", self._name, "up"])
        inside = ["ip", "-netns", node.namespace]
        _run([*inside, "address", "add", f"{node.host}/24", "dev", "eth0"])
        _run([*inside, "link", "set", "lo", "up"])
        _run([*inside, "link", "set", "eth0", "up"])
        return node

    def remove(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(subprocess.SubprocessError):
                node.join()
            with contextlib.suppress(subprocess.SubprocessError):
                _run(["ip", "netns", "delete", node.namespace])
        with contextlib.suppress(subprocess.SubprocessError):
            _run(["ip", "link", "delete", self._name])


@contextlib.contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.create()
        yield made
    finally:
        made.remove()


def _drop(table: str, interface: str, packets: str, prefix: list[str] | None = None) -> None:
    rules = f"""
add table netdev {table}
add chain netdev {table} arriving {{ type filter hook ingress device "{interface}" priority 0; }}
add rule netdev {table} arriving {packets} drop
"""
    _run([*(prefix or []), "nft", "-f", "-"], rules)


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, input=text, timeout=TIMEOUT_S)
    return done.stdout
