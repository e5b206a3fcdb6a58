"""Runs pods of rendered manifests as processes of this machine: same arguments, same environment, same probes.

A container's paths lie below a folder of its own, because nothing here may write to `/data`. Claims are folders that
pods share, as their volumes would be.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.chart import Manifest, container, of_kind, pod_spec

PROBE_TIMEOUT_S = 240.0
PENSTOCK = [sys.executable, "-m", "penstock.main"]
# What the image sets, see the Dockerfile. Models stay where this machine has them.
FIELDS = {"status.podIP": "127.0.0.1", "metadata.name": "pod", "metadata.uid": "uid"}
IMAGE_ENV = {"PENSTOCK_DATA_DIR": "/data"}


class Pod:
    def __init__(
        self,
        manifests: list[Manifest],
        workload: Manifest,
        folder: Path,
        claims: Path,
        port: int,
        cluster: dict[str, str] | None = None,
    ) -> None:
        """`cluster`: how the pod reaches the API server, if it has a token."""
        self._spec = pod_spec(workload)
        self._container = container(workload)
        self._port = port
        self._folder = folder
        folder.mkdir(parents=True)
        self._paths = {
            mount["mountPath"]: self._volume(manifests, mount["name"], claims)
            for mount in self._container["volumeMounts"]
        }
        self.environment = self._environment(manifests) | (cluster or {})
        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*PENSTOCK, *self._arguments()],
                env=os.environ | self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while not self.is_ready():
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        probe = self._container["readinessProbe"]
        if "exec" in probe:
            command = [self._here(word) for word in probe["exec"]["command"]]
            return subprocess.run(command, check=False).returncode == 0
        assert probe["httpGet"]["port"] == self._container["ports"][0]["name"]
        try:
            return httpx.get(self.url + probe["httpGet"]["path"], timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def run(self, *command: str) -> str:
        """What `kubectl exec POD -- COMMAND` prints."""
        assert command[0] == "penstock"
        done = subprocess.run(
            [*PENSTOCK, *command[1:]],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def end(self) -> int:
        """End the pod as the kubelet does. Fails if the grace period is not enough."""
        stop = self._container.get("lifecycle", {}).get("preStop")
        if stop:
            subprocess.run(stop["exec"]["command"], check=True)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=self._spec["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _volume(self, manifests: list[Manifest], name: str, claims: Path) -> Path:
        (volume,) = (each for each in self._spec["volumes"] if each["name"] == name)
        if "persistentVolumeClaim" in volume:
            path = claims / volume["persistentVolumeClaim"]["claimName"]
        else:
            path = self._folder / name
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            data: dict[str, str] = of_kind(manifests, "ConfigMap")[volume["configMap"]["name"]]["data"]
            for file, text in data.items():
                (path / file).write_text(text)
        return path

    def _environment(self, manifests: list[Manifest]) -> dict[str, str]:
        found = {name: self._here(path) for name, path in IMAGE_ENV.items()}
        for source in self._container.get("envFrom", ()):
            secret = of_kind(manifests, "Secret")[source["secretRef"]["name"]]
            found |= secret["stringData"]
        for variable in self._container.get("env", ()):
            if "valueFrom" in variable:
                found[variable["name"]] = FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                found[variable["name"]] = variable["value"]
        return found

    def _arguments(self) -> list[str]:
        """The arguments with their variables, paths of this machine, and a port of its own."""
        arguments: list[Any] = self._container["args"]
        known = [re.sub(r"\$\((\w+)\)", lambda match: self.environment[match[1]], each) for each in arguments]
        known = [each.replace("--host=0.0.0.0", "--host=127.0.0.1") for each in known]
        return [re.sub(r"^--port=\d+$", f"--port={self._port}", self._here(each)) for each in known]

    def _here(self, text: str) -> str:
        """A text with the container's paths, with those of this machine."""
        paths = "|".join(map(re.escape, self._paths))
        return re.sub(rf"(^|=)({paths})(?=/|$)", lambda match: f"{match[1]}{self._paths[match[2]]}", text)
