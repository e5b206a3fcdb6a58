"""Prometheus takes the rules and the configuration, and fires alerts where it should: `promtool`, from the PATH
or from Debian's package `prometheus`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.monitoring_files import MONITORING, RULE_FILES

APT_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("promtool") or _from_debian(tmp_path_factory.mktemp("prometheus"))
    if found is None:
        pytest.skip("no promtool: neither on the PATH, nor from Debian's package prometheus")
    return found


def _from_debian(folder: Path) -> str | None:
    """Unpack the package without installing it: nothing is started, and nothing stays."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None or os.geteuid() != 0:
        return None
    try:
        for command in (
            ["apt-get", "download", "prometheus"],
            ["sh", "-c", "dpkg-deb -x prometheus_*.deb ."],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=APT_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        return None
    return str(folder / "usr" / "bin" / "promtool")


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid(promtool: str) -> None:
    run(promtool, "check", "rules", *RULE_FILES)


def test_alerts_fire_when_they_should(promtool: str, tmp_path: Path) -> None:
    for path in (*RULE_FILES, Path(__file__).with_name("rules_test.yaml")):
        shutil.copy(path, tmp_path)
    run(promtool, "test", "rules", tmp_path / "rules_test.yaml")


def test_the_example_configuration_is_valid(promtool: str, tmp_path: Path) -> None:
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    (tmp_path / "key").write_text("secret")
    config = tmp_path / "monitoring" / "prometheus.yaml"
    text = config.read_text()
    assert "/etc/prometheus/penstock-key" in text
    config.write_text(text.replace("/etc/prometheus/penstock-key", str(tmp_path / "key")))
    run(promtool, "check", "config", config)
