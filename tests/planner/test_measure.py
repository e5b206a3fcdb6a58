"""`penstock plan --measure` fits the costs of steps with the engine on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock
from tests.models.tiny_families import save_tiny


@pytest.mark.timeout(240)
def test_costs_are_fitted_on_this_machine(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model").folder
    command = ["plan", str(model), "--measure", "--rate", "1", "--input-len", "40", "--output-len", "8"]
    targets = [
        "--ttft-ms",
        "1000000",
        "--itl-ms",
        "1000000",
        "--price",
        "this machine=0.5",
        "--json",
    ]  # for any machine
    result = CliRunner().invoke(penstock, [*command, *targets, "--simulate", "none"])
    assert result.exit_code == 0, result.stderr
    assert "steps measured; fitted costs are off by" in result.stderr
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["hardware"] == "this machine"
    assert plan["dollars_per_hour"] == 0.5 * plan["replicas"]
    assert plan["kv_bytes_per_token"] == 256  # 2 layers x keys and values x 2 heads x 16 numbers of 2 bytes
    assert 0 < plan["itl_s"] < 1000
    assert plan["requests_per_s_per_replica"] > 0
