"""The chart: what Helm renders is valid for Kubernetes, hangs together, and names only what exists."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.api.http.authenticate import OPEN_PATHS
from penstock.cluster.kubernetes_registry import NUM_PARTS
from penstock.core.config import ServeConfig
from penstock.gateway.settings.settings import parse_settings
from penstock.serve import environment
from penstock.serve.config import external_servers_of, settings
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    FLEET,
    Manifest,
    Refused,
    container,
    example,
    of_kind,
    pod_spec,
    render,
    rules_of,
    workloads,
)
from tests.deploy.monitoring_files import reader, rules

EVERYTHING: dict[str, Any] = FLEET | {
    "settings": "[limits.key]\nrequests_per_minute = 600\n",
    "external": '[[external]]\nurl = "http://vllm.models"\ndiscover = "kubernetes"\n',
    "discovery": {"enabled": True, "namespaces": ["models"]},
    "imagePullSecrets": [{"name": "registry"}],
    "tls": {"secretName": "penstock-tls"},
    "gateway": {"autoscaling": {"enabled": True}, "nodeSelector": {"disk": "ssd"}},
    "engines": [
        {"name": "small", "model": "echo", "gpus": 1, "autoscaling": {"enabled": True}},
        {"name": "pd", "model": "echo", "servedName": "split", "prefillEngines": 1, "decodeEngines": 1},
    ],
    "ingress": {"enabled": True, "className": "nginx", "tlsSecretName": "edge"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}]},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "keySecret": {"name": "penstock-metrics"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
}
CASES = {"defaults": {}, "everything": EVERYTHING, **{path.stem: example(path) for path in EXAMPLES}}
# The fields without which the operators that own these kinds refuse an object.
OTHERS = {
    "ScaledObject": {"scaleTargetRef", "triggers"},
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "HTTPRoute": {"parentRefs", "rules"},
}


@pytest.fixture(params=CASES, scope="module")
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(CASES[request.param])


class TestManifests:
    @pytest.mark.parametrize("version", ["1.29", "1.37"])
    def test_kubernetes_takes_them(self, manifests: list[Manifest], version: str) -> None:
        for manifest in manifests:
            if manifest["kind"] in OTHERS:
                assert OTHERS[manifest["kind"]] <= manifest["spec"].keys()
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kubernetes_validate.validate(manifest, version, strict=True)

    def test_no_two_objects_have_one_name(self, manifests: list[Manifest]) -> None:
        names = [
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in manifests
        ]
        assert len(names) == len(set(names))
        assert all(len(name) <= 63 for *_, name in names)

    def test_selectors_find_their_pods_and_no_others(self, manifests: list[Manifest]) -> None:
        pods = {
            name: each["spec"]["template"]["metadata"]["labels"]
            for name, each in workloads(manifests).items()
        }
        for name, each in workloads(manifests).items():
            wanted = each["spec"]["selector"]["matchLabels"].items()
            assert [pod for pod, labels in pods.items() if wanted <= labels.items()] == [name]
        for service in of_kind(manifests, "Service").values():
            assert any(service["spec"]["selector"].items() <= labels.items() for labels in pods.values())
        for budget in of_kind(manifests, "PodDisruptionBudget").values():
            wanted = budget["spec"]["selector"]["matchLabels"].items()
            assert any(wanted <= labels.items() for labels in pods.values())

    def test_volumes_and_secrets_exist(self, manifests: list[Manifest]) -> None:
        known = {(each["kind"], each["metadata"]["name"]) for each in manifests}
        theirs = {"penstock", "penstock-tls", "models"}  # that the values name as the user's own
        for workload in workloads(manifests).values():
            volumes = {volume["name"]: volume for volume in pod_spec(workload)["volumes"]}
            mounts = container(workload)["volumeMounts"]
            assert {mount["name"] for mount in mounts} == volumes.keys()
            for volume in volumes.values():
                if claim := volume.get("persistentVolumeClaim"):
                    assert ("PersistentVolumeClaim", claim["claimName"]) in known or claim[
                        "claimName"
                    ] in theirs
                if config := volume.get("configMap"):
                    assert ("ConfigMap", config["name"]) in known
            for source in container(workload).get("envFrom", ()):
                name = source["secretRef"]["name"]
                assert ("Secret", name) in known or name in theirs

    def test_flags_and_variables_exist(self, manifests: list[Manifest]) -> None:
        flags = {setting.flag for setting in settings().values()} | {"--config"}
        for workload in workloads(manifests).values():
            role, *arguments = container(workload)["args"]
            assert role in ("serve", "gateway", "engine", "control")
            named = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
            assert named <= flags
            variables = {variable["name"] for variable in container(workload).get("env", ())}
            used = set(re.findall(r"\$\((\w+)\)", " ".join(arguments)))
            assert used <= variables

    def test_every_pod_reads_the_secret(self, manifests: list[Manifest]) -> None:
        for workload in workloads(manifests).values():
            if container(workload)["args"][0] != "serve":
                assert container(workload)["envFrom"] == [{"secretRef": {"name": "penstock"}}]

    def test_probes_need_no_key(self, manifests: list[Manifest]) -> None:
        for workload in workloads(manifests).values():
            one = container(workload)
            probes = [one[key] for key in ("startupProbe", "readinessProbe", "livenessProbe") if key in one]
            assert probes
            paths = {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe}
            assert paths <= OPEN_PATHS

    def test_pods_have_the_time_to_drain(self, manifests: list[Manifest]) -> None:
        for workload in workloads(manifests).values():
            one = container(workload)
            values = dict(argument.split("=", 1) for argument in one["args"] if "=" in argument)
            stop = one.get("lifecycle", {}).get("preStop")
            waits_s = float(stop["exec"]["command"][1]) if stop else 0.0
            needs_s = waits_s + float(values.get("--lame-duck-s", 0)) + float(values["--drain-timeout"])
            assert pod_spec(workload)["terminationGracePeriodSeconds"] > needs_s

    def test_several_gateways_share_their_data(self, manifests: list[Manifest]) -> None:
        gateway = of_kind(manifests, "Deployment").get("penstock-gateway")
        claims = list(of_kind(manifests, "PersistentVolumeClaim").values())
        if gateway is None:
            (server,) = of_kind(manifests, "StatefulSet").values()
            assert server["spec"]["replicas"] == 1
        elif any(argument.startswith("--files-url=s3://") for argument in container(gateway)["args"]):
            assert not claims
        else:
            assert [claim["spec"]["accessModes"] for claim in claims] == [["ReadWriteMany"]]
        for claim in claims:
            assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"

    def test_pods_have_no_rights_that_they_do_not_need(self, manifests: list[Manifest]) -> None:
        for workload in workloads(manifests).values():
            assert pod_spec(workload)["securityContext"]["runAsNonRoot"]
            may_discover = "serviceAccountName" in pod_spec(workload)
            assert pod_spec(workload)["automountServiceAccountToken"] == may_discover
            may_register = "PENSTOCK_REGISTRY" in {
                each["name"] for each in container(workload).get("env", ())
            }
            assert not may_discover or may_register or container(workload)["args"][0] in ("serve", "gateway")
            assert container(workload)["securityContext"]["readOnlyRootFilesystem"]
            assert container(workload)["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_scaling_reads_metrics_that_exist_and_no_utilisation_of_gpus(
        self, manifests: list[Manifest]
    ) -> None:
        deployments = of_kind(manifests, "Deployment")
        for scaled in of_kind(manifests, "ScaledObject").values():
            target = deployments[scaled["spec"]["scaleTargetRef"]["name"]]
            assert "replicas" not in target["spec"], "two would fight over the number of pods"
            for trigger in scaled["spec"]["triggers"]:
                if trigger["type"] == "prometheus":
                    assert reader().labels(trigger["metadata"]["query"]) == frozenset()
                else:
                    assert trigger["type"] == "cpu"


def test_pools_become_engines() -> None:
    deployments = of_kind(render(EVERYTHING), "Deployment")
    small, pd = (container(deployments[f"penstock-engine-{name}"]) for name in ("small", "pd"))
    assert small["args"][:2] == ["engine", "echo"]
    assert small["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "--replicas=1" in small["args"]
    assert {"--prefill-replicas=1", "--decode-replicas=1", "--served-model-name=split"} <= set(pd["args"])
    assert "nvidia.com/gpu" not in pd["resources"].get("limits", {})
    scaled = of_kind(render(EVERYTHING), "ScaledObject")["penstock-engine-small"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert all('model_name="echo", namespace="llm"' in query for query in queries)


def test_rules_and_dashboards_are_those_of_the_monitoring_kit() -> None:
    manifests = render(EVERYTHING)
    groups = [
        group for each in of_kind(manifests, "PrometheusRule").values() for group in each["spec"]["groups"]
    ]
    assert [rule for group in groups for rule in group["rules"] if "alert" in rule] == rules("alert")
    found = [each["data"] for each in of_kind(manifests, "ConfigMap").values()]
    boards = {
        name: json.loads(text) for data in found for name, text in data.items() if name.endswith(".json")
    }
    assert len(boards) == 3
    assert all(board["uid"] == name.removesuffix(".json") for name, board in boards.items())


def test_external_servers_reach_the_server(tmp_path: Path) -> None:
    manifests = render(EVERYTHING)
    gateway = container(workloads(manifests)["penstock-gateway"])
    assert "--config=/etc/penstock/penstock.toml" in gateway["args"]
    file = tmp_path / "penstock.toml"
    file.write_text(of_kind(manifests, "ConfigMap")["penstock-settings"]["data"]["penstock.toml"])
    (server,) = external_servers_of(ServeConfig(external_file=str(file)))
    assert (server.url, server.discover) == ("http://vllm.models", "kubernetes")


def test_pods_that_answer_may_list_endpoint_slices_and_nothing_else_if_asked_for() -> None:
    manifests = render(EVERYTHING)
    roles = [each for each in manifests if each["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in roles} == {"llm", "models"}
    for role in roles:
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
        ]
    bindings = [each for each in manifests if each["kind"] == "RoleBinding"]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"llm", "models"}
    for binding in bindings:
        assert binding["roleRef"]["name"] == roles[0]["metadata"]["name"]
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "llm")
        assert subject["name"] in of_kind(manifests, "ServiceAccount")
    accounts = {name: pod_spec(each).get("serviceAccountName") for name, each in workloads(manifests).items()}
    assert accounts.pop("penstock-gateway") == bindings[0]["subjects"][0]["name"]
    assert set(accounts.values()) == {None}
    assert not {"Role", "RoleBinding", "ServiceAccount"} & {each["kind"] for each in render(FLEET)}


def test_parts_that_find_each_other_in_kubernetes_may_use_leases_and_nothing_else() -> None:
    manifests = render(EVERYTHING | example(CHART / "examples" / "kubernetes-registry.yaml"))
    rules = {
        name.removeprefix("penstock-"): [
            (rule["resources"], set(rule["verbs"]), len(rule.get("resourceNames", ())))
            for rule in rules_of(manifests, workload) or ()
            if "endpointslices" not in rule["resources"]
        ]
        for name, workload in workloads(manifests).items()
    }
    reads, writes = {"list", "watch"}, {"list", "watch", "create"}
    assert rules == {
        "gateway": [(["leases"], reads, 0)],
        "engine-small": [(["leases"], writes | {"patch", "delete"}, 0)],
        "control": [(["leases"], writes, 0), (["leases"], {"get", "patch"}, NUM_PARTS + 1)],
    }
    for workload in workloads(manifests).values():
        urls = {each["name"]: each.get("value") for each in container(workload)["env"]}
        assert urls["PENSTOCK_REGISTRY"] == "kubernetes://llm/penstock"


def test_settings_reach_the_server() -> None:
    manifests = render(EVERYTHING)
    text = of_kind(manifests, "ConfigMap")["penstock-settings"]["data"]["settings.toml"]
    assert text == EVERYTHING["settings"]
    gateway = container(of_kind(manifests, "Deployment")["penstock-gateway"])
    assert "--settings=/etc/penstock/settings.toml" in gateway["args"]
    for path in EXAMPLES:
        parse_settings(example(path).get("settings", ""), path.name)


def test_servers_with_a_certificate_are_asked_by_https() -> None:
    manifests = render(EVERYTHING)
    gateway = container(of_kind(manifests, "Deployment")["penstock-gateway"])
    assert {"--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"} <= set(gateway["args"])
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (monitor,) = of_kind(manifests, "ServiceMonitor").values()
    assert monitor["spec"]["endpoints"][0]["scheme"] == "https"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "flet"}, 'mode must be one of the following: "standalone", "fleet"'),
        ({"gatway": {}}, "Additional property gatway is not allowed"),
        ({"gateway": {"replicas": 0}}, "gateway.replicas: Must be greater than or equal to 1"),
        ({"service": {"port": 70000}}, "service.port: Must be less than or equal to 65535"),
        ({"engines": [{"name": "Big One", "model": "echo"}]}, "engines.0.name: Does not match pattern"),
        ({"engines": [{"name": "a"}]}, "model is required"),
        (
            {"engines": [{"name": "a", "model": "m", "autoscaling": {"kvUsage": 3}}]},
            "kvUsage: Must be less than",
        ),
        ({"standalone": {"args": ["api-workers"]}}, "standalone.args.0: Does not match pattern"),
        ({"shutdown": {"drainSeconds": 1.5}}, "shutdown.drainSeconds: Invalid type"),
        (FLEET | {"engines": []}, "at least one pool in engines"),
        ({"mode": "fleet", "engines": FLEET["engines"]}, "name their Secret in secret.name"),
        (FLEET | {"secret": {"values": {"PENSTOCK_REDIS_URL": "redis://r"}}}, "needs PENSTOCK_DATABASE_URL"),
        (FLEET | {"registry": "kubernetes"}, "leave one of the two out"),
        ({"registry": "kubernetes"}, "is for the mode fleet"),
        ({"registry": "redis://r"}, 'registry must be one of the following: "secret", "kubernetes"'),
        (FLEET | {"engines": [FLEET["engines"][0]] * 2}, "Two pools of engines have the name small"),  # type: ignore[index]
        (
            FLEET | {"engines": [{"name": "a", "model": "m", "prefillEngines": 1}]},
            "both prefillEngines and decodeEngines",
        ),
        (
            FLEET | {"engines": [{"name": "a", "model": "m", "gpus": 3, "enginesPerPod": 2}]},
            "does not come out even",
        ),
        (FLEET | {"gateway": {"data": {"accessMode": "ReadWriteOnce"}}}, "must be ReadWriteMany"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "a key with the scope metrics"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"external": EVERYTHING["external"]}, "need discovery.enabled"),
        ({"discovery": {"namespaces": ["Models"]}}, "discovery.namespaces.0: Does not match pattern"),
    ],
)
def test_values_out_of_range_are_refused_with_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        render(changes)


def test_the_schema_knows_every_value_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(properties: dict[str, Any], found: dict[str, Any], place: str) -> None:
        assert properties.keys() - {"global"} == found.keys(), place
        for name, value in found.items():
            if isinstance(value, dict) and "properties" in properties[name] and value:
                compare(properties[name]["properties"], value, f"{place}.{name}")

    compare(schema["properties"], values, "values")


class TestImage:
    """What the Dockerfile says. Its steps are carried out by `make test-image`."""

    text = (CHART.parents[1] / "Dockerfile").read_text()

    def test_what_it_copies_exists(self) -> None:
        root = CHART.parents[2]
        for line in self.text.splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                *sources, _ = shlex.split(line)[1:]
                assert all((root / source).exists() for source in sources)

    def test_it_has_the_extras_and_the_compiler_that_servers_need(self) -> None:
        (extras,) = re.findall(r"'\.\[([\w,]+)\]'", self.text)
        assert {"redis", "postgres"} <= set(extras.split(","))
        final = self.text.split("FROM ")[-1]
        assert 'ARG COMPILER="gcc libc6-dev"' in final

    def test_volumes_are_mounted_where_it_looks_for_them(self) -> None:
        variables = dict(re.findall(r"(\w+)=(/\S+)", self.text.split("\nENV ")[1].splitlines()[0]))
        assert environment.DATA_DIR_VARIABLE in variables
        for workload in [*workloads(render()).values(), *workloads(render(EVERYTHING)).values()]:
            mounts = {Path(mount["mountPath"]) for mount in container(workload)["volumeMounts"]}
            for name, path in variables.items():
                if name != "PATH":
                    assert any(Path(path).is_relative_to(mount) for mount in mounts), (name, path)
