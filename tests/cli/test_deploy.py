"""The manifests name what exists: flags, variables, paths, metrics. Whether a cluster takes them is not seen here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.authenticate import OPEN_PATHS
from penstock.gateway.metrics.table import METRICS
from penstock.serve import environment
from penstock.serve.config import settings

yaml = pytest.importorskip("yaml")
KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents() -> dict[str, dict[str, Any]]:
    found = {}
    for path in KUBERNETES.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            found[document["kind"]] = document
    return found


def container() -> dict[str, Any]:
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    container: dict[str, Any] = found
    return container


def test_every_manifest_is_listed() -> None:
    listed = set(documents()["Kustomization"]["resources"])
    assert listed == {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_server_is_started_with_flags_and_variables_that_exist() -> None:
    flags = {argument for argument in container()["args"] if argument.startswith("--")}
    assert flags <= {setting.flag for setting in settings().values()}
    known = {value for name, value in vars(environment).items() if name.endswith("_VARIABLE")}
    assert {variable["name"] for variable in container()["env"]} <= known


def test_probes_need_no_key() -> None:
    probes = (container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert {probe["httpGet"]["path"] for probe in probes} <= OPEN_PATHS


def test_a_pod_has_the_time_to_drain() -> None:
    arguments = container()["args"]
    drain_s = float(arguments[arguments.index("--drain-timeout") + 1])
    assert documents()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


def test_keda_scales_by_a_metric_that_is_exported() -> None:
    (trigger,) = documents()["ScaledObject"]["spec"]["triggers"]
    names = re.findall(r"penstock_(\w+)", trigger["metadata"]["query"])
    assert names
    assert set(names) <= METRICS.keys()
