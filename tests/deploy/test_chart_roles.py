"""The roles of a rendered chart as processes: engines and gateways find each other through the Kubernetes API, with
the rights that the chart gives them, a key is made, a chat passes, and pods leave when they are told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.machine import free_port
from tests.cluster.kubernetes_server import KubernetesServer, running_kubernetes
from tests.deploy.chart import render, rules_of, workloads
from tests.deploy.pods import Pod
from tests.gateway.ratelimits.redis_server import running_redis

pytestmark = pytest.mark.slow

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
SETTINGS = "[limits.key]\nrequests_per_minute = 1\n"
SHUTDOWN = {"preStopSeconds": 0, "lameDuckSeconds": 0, "drainSeconds": 20}


def start(values: dict[str, Any], folder: Path, kubernetes: KubernetesServer | None = None) -> dict[str, Pod]:
    manifests = render(values)
    pods = {}
    for name, workload in workloads(manifests).items():
        rules = rules_of(manifests, workload)
        cluster = None if kubernetes is None or rules is None else kubernetes.environment(name, rules)
        pods[name] = Pod(manifests, workload, folder / name, folder / "claims", free_port(), cluster)
    return pods


def new_key(pod: Pod) -> dict[str, str]:
    """A key for a client, made in a pod."""
    key = pod.run("penstock", "keys", "create", "--name", "first").strip()
    assert key.startswith("sk-")
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[dict[str, Pod]]:
    with running_redis() as redis, running_kubernetes(tmp_path / "cluster", is_encrypted=True) as kubernetes:
        values = {
            "mode": "fleet",
            "settings": SETTINGS,
            "registry": "kubernetes",
            "shutdown": SHUTDOWN,
            "secret": {
                "values": {
                    # One file stands in for PostgreSQL, which has tests of its own.
                    "PENSTOCK_DATABASE_URL": f"sqlite:///{tmp_path / 'penstock.db'}",
                    "PENSTOCK_REDIS_URL": redis.url,
                    "PENSTOCK_JOIN_TOKEN": "a token for the test of the chart",
                }
            },
            "engines": [{"name": "small", "model": "echo"}],
        }
        pods = start(values, tmp_path, kubernetes)
        try:
            yield pods
        finally:
            for pod in pods.values():
                pod.kill()


def test_a_fleet_serves(fleet: dict[str, Pod]) -> None:
    engine, gateway, control = (fleet[f"penstock-{name}"] for name in ("engine-small", "gateway", "control"))
    for pod in (engine, gateway, control):
        pod.wait_ready()
    url = f"{gateway.url}/v1/chat/completions"
    assert httpx.post(url, json=CHAT, timeout=60).status_code == 401, "nobody comes in without a key"
    key = new_key(gateway)
    statuses = [httpx.post(url, json=CHAT, headers=key, timeout=60).status_code for _ in range(2)]
    assert statuses == [200, 429], "limits of the ConfigMap, counted in the Redis of the Secret"
    assert gateway.end() == 0
    assert control.end() == 0
    assert engine.end() == 0
    assert not engine.is_ready()
    for pod in fleet.values():
        lines = [json.loads(line) for line in pod.log.read_text().splitlines() if line.startswith("{")]
        assert any(line["message"] == "stopped" for line in lines), "logs are for programs"


def test_one_server_alone_keeps_its_keys_on_its_volume(tmp_path: Path) -> None:
    ((_, pod),) = start({"shutdown": SHUTDOWN, "standalone": {"model": "echo"}}, tmp_path).items()
    try:
        pod.wait_ready()
        answer = httpx.post(f"{pod.url}/v1/chat/completions", json=CHAT, headers=new_key(pod), timeout=60)
        assert answer.status_code == 200
        assert pod.end() == 0
        assert (tmp_path / "claims" / "penstock-data" / "penstock.db").exists()
    finally:
        pod.kill()
