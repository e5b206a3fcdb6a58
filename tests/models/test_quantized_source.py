"""Quantized checkpoints as published: each layout read through the whole loader and run, against transformers with
the weights that the checkpoint stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, Ops
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, open_checkpoint
from penstock.models.quantized_source import QuantizedSource
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.stored_quantization import AWQ
from penstock.models.weight_parts import Part
from tests.models.checkpoints import Reference, make_reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.quantized_checkpoints import (
    LAYOUTS,
    Layout,
    awq,
    compressed_packed,
    float4,
    float8,
    gptq,
    mixed,
    quantize_folder,
    scaled_groups,
    smooth_int8,
)

PROMPT = random_prompt(30, seed=8)
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(llama: Reference, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.folder, tmp_path / "copy"))


def expected_logits(folder: Path, dense: dict[str, torch.Tensor]) -> torch.Tensor:
    """From transformers, with the weights themselves."""
    model = make_reference("llama", folder / "again").model
    missing = model.load_state_dict(dense, strict=False)
    assert not missing.unexpected_keys
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, folder: Path, ops: Ops) -> None:
    expected = expected_logits(folder, quantize_folder(folder, LAYOUTS[name]))
    got = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
    # The native backend keeps float8 as bfloat16, which rounds what one code and its scale multiply to.
    rounds = ops.name == "native" and "float8" in name
    tolerance = 0.02 * float(expected.abs().max()) if rounds else 5e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=5e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_decode_without_loss_and_stay_packed(name: str, folder: Path) -> None:
    dense = quantize_folder(folder, LAYOUTS[name])
    source = open_checkpoint(folder).source()
    for stem, rows, columns in ((UP, 96, 64), ("model.layers.1.mlp.down_proj", 64, 96)):
        weight = source.matrix(f"{stem}.weight", rows, columns)
        assert isinstance(
            weight, DenseWeight if "nf4" in name or "unpacked" in name else GroupQuantWeight | Float8Weight
        )
        assert weight.shape == (rows, columns)
        values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        torch.testing.assert_close(values, dense[f"{stem}.weight"], rtol=1e-5, atol=1e-6)
    assert isinstance(source.matrix("lm_head.weight", 320, 64), DenseWeight)


@pytest.mark.parametrize(("name", "rounds_inputs"), [("SmoothQuant int8", True), ("int8 by rows", False)])
def test_only_checkpoints_made_for_it_have_their_inputs_rounded(
    name: str, rounds_inputs: bool, folder: Path
) -> None:
    quantize_folder(folder, LAYOUTS[name])
    weight = open_checkpoint(folder).source().matrix(f"{UP}.weight", 96, 64)
    assert isinstance(weight, GroupQuantWeight)
    assert weight.rounds_inputs == rounds_inputs


def test_stacked_parts_in_different_orders(folder: Path, ops: Ops) -> None:
    """Then no reordering of the input serves all of them."""
    dense = quantize_folder(folder, gptq(4, 32, act_order=True))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # Swapping two inputs of different groups in one matrix alone gives it an order of its own.
    groups = tensors[f"{UP}.g_idx"]
    first, second = int((groups == 0).nonzero()[0]), int((groups == 1).nonzero()[0])
    swap = torch.arange(64)
    swap[[first, second]] = swap[[second, first]]
    words = tensors[f"{UP}.qweight"]
    codes = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], 1).view(64, 96)[swap]
    packed = sum(codes.view(8, 8, 96)[:, place].long() << (4 * place) for place in range(8))
    tensors[f"{UP}.qweight"] = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    tensors[f"{UP}.g_idx"] = groups[swap]
    save_file(tensors, path)
    dense[f"{UP}.weight"] = dense[f"{UP}.weight"][:, swap]
    got = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
    torch.testing.assert_close(got, expected_logits(folder, dense), atol=5e-4, rtol=5e-4)


def test_experts_of_a_mixture(tmp_path: Path, ops: Ops) -> None:
    make_reference("qwen3-moe", tmp_path / "quantized")
    plain = Path(shutil.copytree(tmp_path / "quantized", tmp_path / "plain"))
    dense = quantize_folder(tmp_path / "quantized", gptq(8, 32, act_order=True))
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, plain / "model.safetensors")
    got, expected = (
        PagedRunner(load_model(tmp_path / name, ops), ops).prompt_logits(PROMPT)
        for name in ("quantized", "plain")
    )
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize(
    ("name", "own_file", "own_settings"),
    [
        (
            "GPTQ act-order",
            "quantize_config.json",
            {"bits": 4, "group_size": 16, "desc_act": True, "sym": True, "model_file_base_name": "model"},
        ),
        ("AWQ", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        (
            "ModelOpt NVFP4",
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt", "version": "0.23.0"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": "FP8",
                    "group_size": 16,
                    "exclude_modules": ["lm_head"],
                },
            },
        ),
    ],
)
def test_settings_in_a_file_of_their_own(
    name: str, own_file: str, own_settings: dict[str, Any], folder: Path
) -> None:
    quantize_folder(folder, LAYOUTS[name])
    expected = open_checkpoint(folder).quantization
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / own_file).write_text(json.dumps(own_settings))
    assert open_checkpoint(folder).quantization == expected


def test_a_quantized_cache_alone_leaves_weights_plain(folder: Path) -> None:
    own = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert open_checkpoint(folder).quantization is None


@pytest.mark.parametrize(
    "layout",
    [
        awq(40),
        awq(128),
        gptq(4, 40, act_order=True),
        gptq(8, 128, act_order=False),
        gptq(3, 24, act_order=True),
        compressed_packed(4, 40, symmetric=False),
        compressed_packed(8, 128, symmetric=True),
    ],
    ids=lambda layout: str(layout.settings)[:60],
)
def test_groups_that_do_not_divide_a_row(layout: Layout, folder: Path, ops: Ops) -> None:
    """The last group of a row is smaller then."""
    expected = expected_logits(folder, quantize_folder(folder, layout))
    got = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("group", [16, 24, 128])
def test_rows_of_awq_that_fill_no_word(group: int, tmp_path: Path) -> None:
    made = awq(group).quantize(torch.randn(13, 40, generator=torch.Generator().manual_seed(1)))
    save_file({f"x.{name}": tensor for name, tensor in made.tensors.items()}, tmp_path / "model.safetensors")
    source = QuantizedSource(SafetensorsSource(tmp_path), AWQ(group))
    assert source.shape("x.weight") == (13, 40)
    for part in (None, Part(range(3, 13), range(40)), Part(range(2, 9), range(24, 40))):
        found = source.matrix("x.weight", 13, 40, part)
        values = found.values if isinstance(found, DenseWeight) else found.dequantize()
        expected = made.dense if part is None else made.dense[_slice(part.rows), _slice(part.columns)]
        torch.testing.assert_close(values, expected)


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_plain_codes_with_scales_for_groups(kind: str, folder: Path, ops: Ops) -> None:
    expected = expected_logits(folder, quantize_folder(folder, scaled_groups(kind, 32)))
    got = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
    tolerance = 0.02 * float(expected.abs().max()) if (ops.name, kind) == ("native", "float") else 5e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=5e-4)


def test_layers_in_different_formats(folder: Path, ops: Ops) -> None:
    """compressed-tensors calls such checkpoints `mixed-precision`: each group of layers has a format."""
    parts = {
        "q_proj": compressed_packed(4, 32, symmetric=False), "k_proj": compressed_packed(8, 16, symmetric=True),
        "v_proj": smooth_int8(), "o_proj": scaled_groups("int", 16), "gate_proj": float4("nvfp4"),
        "up_proj": float4("mxfp4"), "down_proj": float8("compressed"),
    }  # fmt: skip
    layout = mixed(parts)
    expected = expected_logits(folder, quantize_folder(folder, layout))
    got = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
    rounds = ops.name == "native"
    tolerance = 0.02 * float(expected.abs().max()) if rounds else 5e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=5e-4)


def test_auto_round_writes_the_layout_of_another_tool(folder: Path) -> None:
    quantize_folder(folder, LAYOUTS["GPTQ"])
    expected = open_checkpoint(folder).quantization
    settings_of(
        folder,
        quant_method="auto-round",
        bits=4,
        group_size=32,
        sym=True,
        data_type="int",
        packing_format="auto_round:auto_gptq",
        autoround_version="0.5.1",
    )
    assert open_checkpoint(folder).quantization == expected


def test_models_for_mlx_are_refused_by_name(folder: Path) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(ModelLoadError, match="quantized by MLX, which cannot be read"):
        open_checkpoint(folder)


def settings_of(folder: Path, **quantization: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized by AQLM, which cannot"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ', which cannot be read",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ"}},
            },
            "b of .* has quant_algo 'W4A16_AWQ', which cannot be read; known: FP8 and NVFP4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers of "),
        ({"quant_method": "sorcery"}, "quantized by 'sorcery', which cannot be read; known are AWQ, GPTQ"),
        ({"bits": 4}, "quantized by 'unknown'"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv', which cannot be read; known: gemm"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5, which cannot be read; known: 2, 3, 4, 8"),
        (
            {"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:exllamav2"},
            "packing_format 'auto_round:exllamav2', which cannot be read",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not two sizes"),
        *(
            (
                {
                    "quant_method": "compressed-tensors",
                    "format": form,
                    "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}},
                    "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
                },
                "rotated weights",
            )
            for form in ("pack-quantized", "nvfp4-pack-quantized")
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 2, "type": "int"}}},
            },
            "int weights of 2 bits",
        ),
    ],
)
def test_unknown_kinds_are_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    settings_of(folder, **settings)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, TorchOps())


def damage(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "message"),
    [
        ("AWQ", f"{UP}.scales", None, r"no tensor model\.layers\.0\.mlp\.up_proj\.scales"),
        ("AWQ", f"{UP}.qweight", torch.zeros(64, 3, dtype=torch.int32), r"qweight of shape \[64, 3\]"),
        ("GPTQ", f"{UP}.g_idx", torch.zeros(64, dtype=torch.int32), "does not share out its 64 inputs"),
        ("GPTQ", f"{UP}.g_idx", torch.full((64,), -1, dtype=torch.int32), "does not share out"),
        ("GPTQ act-order", f"{UP}.g_idx", None, "has no g_idx, which desc_act"),
        ("GPTQ", f"{UP}.qweight", torch.zeros(8, 96), r"torch\.float32; codes are packed in int32"),
        ("GPTQ", f"{UP}.scales", torch.ones(2, 96, dtype=torch.int32), r"scales in torch\.int32"),
        ("AWQ", f"{UP}.scales", torch.full((2, 96), torch.nan), "scales of .* are not finite"),
        ("compressed NVFP4", f"{UP}.weight_global_scale", None, "no tensor"),
        ("compressed NVFP4", f"{UP}.weight_global_scale", torch.ones(0), "cannot be read: max"),
        ("compressed int4", f"{UP}.weight_scale", torch.ones(97, 2), "96 rows has 194 scales"),
        ("bitsandbytes nf4", f"{UP}.weight.absmax", torch.full((96,), torch.inf), "are not finite"),
        ("HQQ, unpacked", f"{UP}.scale", torch.full((1, 96), torch.nan), "are not finite"),
        ("AWQ", "model.norm.weight", torch.full((64,), torch.inf), "model.norm.weight are not finite"),
        ("float8 in blocks", f"{UP}.weight_scale_inv", torch.ones(2, 3), r"\[2, 3\], which blocks of 48"),
        ("compressed float8", f"{UP}.weight_scale", torch.ones(5), "96 rows has 5 scales"),
        ("ModelOpt NVFP4", f"{UP}.weight_scale", torch.ones(96, 5), r"\[96, 5\], which groups of 16 or 32"),
        (
            "bitsandbytes nf4",
            f"{UP}.weight.absmax",
            torch.ones(5),
            "5 blocks of 64, which 96 × 64 do not fill",
        ),
        (
            "bitsandbytes nf4",
            f"{UP}.weight.quant_state.bitsandbytes__nf4",
            torch.zeros(3),
            "does not describe",
        ),
        (
            "HQQ",
            f"{UP}.W_q",
            torch.zeros(5, 32, dtype=torch.uint8),
            r"W_q of shape \[5, 32\] does not hold 6144",
        ),
        ("HQQ", f"{UP}.scale", torch.ones(5, 1), "zero points of shape"),
        ("HQQ", f"{UP}.packing", torch.tensor([65, 66], dtype=torch.uint8), "packed as 'AB'"),
        ("HQQ", f"{UP}.zero", None, "no tensor"),
        ("SmoothQuant int8", f"{UP}.weight", torch.zeros(96, 64, dtype=torch.int16), r"torch\.int16"),
    ],
)
def test_damaged_checkpoints_name_the_tensor(
    folder: Path, layout: str, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    quantize_folder(folder, LAYOUTS[layout])
    damage(folder, name, tensor)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, TorchOps())
