"""gpt-oss as published: experts in MXFP4, everything else plain."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import GroupQuantWeight, Ops
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, open_checkpoint
from penstock.models.weight_parts import Part
from tests.models.checkpoints import Reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.ranks import run_ranks
from tests.models.tiny_families import save_tiny

FLOAT4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PROMPT = random_prompt(30, seed=1)
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}


def random_mxfp4(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed pairs, exponents, and the values that they stand for, [experts, rows, columns]."""
    codes = torch.randint(0, 16, (experts, rows, columns // 32, 16, 2))
    exponents = torch.randint(120, 125, (experts, rows, columns // 32))
    values = FLOAT4[codes].flatten(3) * torch.exp2(exponents.float() - 127).unsqueeze(-1)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
    return packed, exponents.to(torch.uint8), values.flatten(2)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("mxfp4")
    reference = save_tiny("gpt_oss", folder)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    parameters = dict(reference.model.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        packed, exponents, values = random_mxfp4(experts, rows, columns)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed, exponents
        with torch.no_grad():
            parameters[name].copy_(values.transpose(1, 2))
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return reference


def test_the_logits_are_those_of_the_values(published: Reference, ops: Ops) -> None:
    made = PagedRunner(load_model(published.folder, ops), ops).prompt_logits(PROMPT)
    torch.testing.assert_close(made, published.logits(PROMPT), **TOLERANCE)


def test_ranks_cut_between_and_within_groups(published: Reference) -> None:
    made = run_ranks(published.folder, TorchOps(), 2, lambda runner: runner.prompt_logits(PROMPT))
    torch.testing.assert_close(made, published.logits(PROMPT), **TOLERANCE)


def test_experts_stay_exact_in_eight_bits(published: Reference) -> None:
    source = open_checkpoint(published.folder).source()
    experts = published.model.model.layers[1].mlp.experts
    name = "model.layers.1.mlp.experts.4.{}_proj.weight"
    gate, up = (source.matrix(name.format(part), 96, 64) for part in ("gate", "up"))
    down = source.matrix(name.format("down"), 64, 96, Part(range(8, 16), range(32, 96)))
    for weight in (gate, up, down):
        assert isinstance(weight, GroupQuantWeight)
        assert (weight.bits, weight.group) == (8, 32)
    assert torch.equal(gate.dequantize(), experts.gate_up_proj[4, :, ::2].T)
    assert torch.equal(up.dequantize(), experts.gate_up_proj[4, :, 1::2].T)
    assert torch.equal(down.dequantize(), experts.down_proj[4].T[8:16, 32:96])


def test_the_log_says_when_experts_are_unpacked(
    published: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """The plain torch backend keeps all weights in the compute type."""
    with caplog.at_level(logging.WARNING):
        load_model(published.folder, TorchOps())
    assert "experts are not kept in the form they come in" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_model(save_plain(published.folder.parent / "plain"), TorchOps())
    assert "experts" not in caplog.text


def save_plain(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return save_tiny("mixtral", folder).folder


def test_damaged_experts_are_refused_by_name(published: Reference, tmp_path: Path) -> None:
    tensors = load_file(published.folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published.folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="down_proj_scales of shape"):
        load_model(tmp_path, TorchOps())
