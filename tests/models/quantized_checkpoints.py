"""Tiny quantized checkpoints in the layouts that are published, written here from their descriptions and not with the
code that reads them. Each comes with what its weights stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Quantized:
    """The tensors of one matrix as stored, and the matrix."""

    tensors: dict[str, Tensor]
    dense: Tensor


@dataclass
class Layout:
    settings: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]
    parts: dict[str, Layout] = field(
        default_factory=dict
    )  # other layouts, by the last part of a matrix's name

    def of(self, name: str) -> Layout:
        return self.parts.get(name.removesuffix(".weight").rpartition(".")[2], self)


def pack_rows(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """[n, w] → int32 [n, w × bits / 32]; nibble i of a word is element places[i] of its eight."""
    if 32 % bits:  # codes go on in the next word
        codes = nn.functional.pad(codes, (0, -codes.shape[1] % 32))
        flags = np.unpackbits(codes.numpy().astype(np.uint8)[:, :, None], axis=2, bitorder="little")
        stream = flags[:, :, :bits].reshape(len(codes), -1)
        return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    codes = nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    grouped = codes.numpy().astype(np.uint32).reshape(codes.shape[0], -1, per_word)
    words = np.zeros(grouped.shape[:2], dtype=np.uint32)
    for position, element in enumerate(places):
        words |= grouped[:, :, element] << np.uint32(bits * position)
    return torch.from_numpy(words.view(np.int32).copy())


def asymmetric(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups]. The last group may be smaller."""
    rows, columns = weight.shape
    grouped = nn.functional.pad(weight, (0, -columns % group)).view(rows, -1, group)
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).clamp_min(1e-5).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 2**bits - 1)
    return codes.view(rows, -1)[:, :columns].contiguous(), scales, zeros


def spread(table: Tensor, group: int, columns: int | None = None) -> Tensor:
    return table.repeat_interleave(group, dim=1)[:, :columns]


def awq(group: int) -> Layout:
    def quantize(weight: Tensor) -> Quantized:
        codes, scales, zeros = asymmetric(weight, group, 4)
        return Quantized(
            {
                "qweight": pack_rows(codes.T, 4, AWQ_NIBBLES),
                "qzeros": pack_rows(zeros.T, 4, AWQ_NIBBLES),
                "scales": scales.T.half().contiguous(),
            },
            (codes - spread(zeros, group, codes.shape[1])) * spread(scales, group, codes.shape[1]),
        )

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Layout(settings, quantize)


def gptq(bits: int, group: int, *, act_order: bool, version: str = "gptq") -> Layout:
    def quantize(weight: Tensor) -> Quantized:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        # All matrices of one width get one order, as those do that see the same inputs.
        generator = torch.Generator().manual_seed(columns)
        order = torch.randperm(columns, generator=generator) if act_order else torch.arange(columns)
        codes_in_order, scales, zeros = asymmetric(weight[:, order].contiguous(), size, bits)
        group_of_input = torch.empty(columns, dtype=torch.int32)
        group_of_input[order] = (torch.arange(columns) // size).int()
        codes = torch.empty_like(codes_in_order)
        codes[:, order] = codes_in_order
        stored_zeros = zeros - 1 if version == "gptq" else zeros
        own = group_of_input.long()
        return Quantized(
            {
                "qweight": pack_rows(codes, bits).T.contiguous(),
                "qzeros": pack_rows(stored_zeros.T, bits),
                "scales": scales.T.half().contiguous(),
                "g_idx": group_of_input,
            },
            (codes - zeros[:, own]) * scales[:, own],
        )

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": version,
    }
    return Layout(settings, quantize)


def compressed(format_name: str, weights: dict[str, Any], quantize: Callable[[Tensor], Quantized]) -> Layout:
    settings = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Layout(settings, quantize)


def compressed_packed(bits: int, group: int, *, symmetric: bool) -> Layout:
    def quantize(weight: Tensor) -> Quantized:
        codes, scales, zeros = asymmetric(weight, group, bits)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            "weight_packed": pack_rows(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T.contiguous()
        columns = weight.shape[1]
        dense = (codes - spread(zeros, group, columns)) * spread(scales.bfloat16().float(), group, columns)
        return Quantized(tensors, dense)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    return compressed("pack-quantized", weights, quantize)


def smooth_int8(*, rounds_inputs: bool = True) -> Layout:
    def quantize(weight: Tensor) -> Quantized:
        scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127)
        return Quantized({"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float())

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    layout = compressed("int-quantized", weights, quantize)
    if rounds_inputs:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        layout.settings["config_groups"]["group_0"]["input_activations"] = activations
    return layout


def float8(kind: str) -> Layout:
    """`kind`: compressed (a scale for each row), tensor, or blocks."""

    def quantize(weight: Tensor) -> Quantized:
        if kind == "blocks":
            return quantize_blocks(weight)
        largest = weight.abs().amax(dim=1, keepdim=True) if kind == "compressed" else weight.abs().max()
        scales = largest / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        return Quantized({"weight": values, "weight_scale": scales}, values.float() * scales)

    def quantize_blocks(weight: Tensor) -> Quantized:
        rows, columns = weight.shape
        height, width = -(-rows // 48), -(-columns // 32)
        padded = torch.zeros(height * 48, width * 32)
        padded[:rows, :columns] = weight
        scales = padded.view(height, 48, width, 32).abs().amax(dim=(1, 3)) / 448
        full = scales.repeat_interleave(48, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
        values = (weight / full).to(torch.float8_e4m3fn)
        return Quantized({"weight": values, "weight_scale_inv": scales}, values.float() * full)

    if kind == "compressed":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        return compressed("float-quantized", weights, quantize)
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "blocks":
        settings["weight_block_size"] = [48, 32]
    return Layout(settings, quantize)


def mxfp8(kind: str) -> Layout:
    """`kind`: transformers, modelopt or compressed. Scales are powers of two for 32 inputs each, stored as bytes."""

    def quantize(weight: Tensor) -> Quantized:
        grouped = weight.unflatten(1, (-1, 32))
        exponents = (grouped.abs().amax(2) / 448).log2().ceil() + 127
        scales = torch.exp2(exponents - 127)
        values = (grouped / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if kind == "transformers" else "weight_scale"
        return Quantized(
            {"weight": values, name: exponents.to(torch.uint8)}, values.float() * spread(scales, 32)
        )

    if kind == "compressed":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        return compressed("mxfp8-quantized", weights, quantize)
    if kind == "modelopt":
        return Layout({"quant_method": "modelopt", "quant_algo": "MXFP8"}, quantize)
    return Layout({"quant_method": "mxfp8", "scale_fmt": "ue8m0"}, quantize)


def scaled_groups(kind: str, group: int) -> Layout:
    """Plain int8 or float8 codes (`kind`: int, float) with a scale for each group of a row."""

    def quantize(weight: Tensor) -> Quantized:
        grouped = weight.unflatten(1, (-1, group))
        scales = grouped.abs().amax(2) / (127 if kind == "int" else 448)
        codes = (grouped / scales[:, :, None]).flatten(1)
        codes = codes.round().to(torch.int8) if kind == "int" else codes.to(torch.float8_e4m3fn)
        return Quantized({"weight": codes, "weight_scale": scales}, codes.float() * spread(scales, group))

    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "group", "group_size": group}
    return compressed(f"{kind}-quantized", weights, quantize)


def mixed(parts: dict[str, Layout]) -> Layout:
    """A format for each kind of matrix, by the last part of its name."""
    groups = {}
    for index, (name, layout) in enumerate(parts.items()):
        own = layout.settings["config_groups"]["group_0"]
        groups[f"group_{index}"] = {**own, "targets": [f"re:.*{name}"], "format": layout.settings["format"]}
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return Layout(settings, lambda weight: Quantized({"weight": weight}, weight), parts)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4_codes(values: Tensor) -> Tensor:
    """The nearest codes of four-bit floats: the sign is the highest bit."""
    magnitudes = (values.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    return (magnitudes + 8 * (values < 0)).to(torch.uint8)


def float4(kind: str) -> Layout:
    """`kind`: nvfp4 or mxfp4 of compressed-tensors, or modelopt."""
    group = 32 if kind == "mxfp4" else 16

    def quantize(weight: Tensor) -> Quantized:
        rows, columns = weight.shape
        grouped = weight.view(rows, -1, group)
        wanted = grouped.abs().amax(2) / 6
        overall = wanted.max() / 448
        if kind == "mxfp4":
            stored = (wanted.log2().ceil() + 127).to(torch.uint8)
            scales = torch.exp2(stored.float() - 127)
        else:
            stored = (wanted / overall).to(torch.float8_e4m3fn)
            scales = stored.float() * overall
        codes = fp4_codes(grouped / scales.unsqueeze(2)).view(rows, columns)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        signs = torch.where(codes >= 8, -1.0, 1.0)
        dense = FP4[(codes & 7).long()] * signs * spread(scales, group)
        tensors = {"weight_packed": packed, "weight_scale": stored}
        if kind == "nvfp4":
            tensors["weight_global_scale"] = (1 / overall).view(1)
        if kind == "modelopt":
            tensors = {"weight": packed, "weight_scale": stored, "weight_scale_2": overall}
        return Quantized(tensors, dense)

    if kind == "modelopt":
        return Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, quantize)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    return compressed(f"{kind}-pack-quantized", weights, quantize)


def bitsandbytes(kind: str) -> Layout:
    """`kind`: nf4, nf4 nested, or int8."""
    levels = torch.tensor(
        [-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]
    )

    def as_int8(weight: Tensor) -> Quantized:
        largest = weight.abs().amax(dim=1)
        codes = (weight * 127 / largest[:, None]).round()
        return Quantized({"weight": codes.to(torch.int8), "SCB": largest}, codes * largest[:, None] / 127)

    def quantize(weight: Tensor) -> Quantized:
        blocks = weight.flatten().view(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        beside = {"absmax": absmax}
        if kind == "nf4 nested":
            offset, nested_levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
            outer = torch.cat([part.abs().amax(keepdim=True) for part in (absmax - offset).split(32)])
            wide = outer.repeat_interleave(32)[: len(absmax)]
            codes = ((absmax - offset)[:, None] / wide[:, None] - nested_levels).abs().argmin(1)
            absmax = nested_levels[codes] * wide + offset
            state |= {"nested_blocksize": 32, "nested_offset": offset}
            beside = {
                "absmax": codes.to(torch.uint8),
                "nested_absmax": outer,
                "nested_quant_map": nested_levels,
            }
        codes = (blocks / absmax[:, None])[:, :, None].sub(levels).abs().argmin(2)
        flat = codes.flatten().to(torch.uint8)
        beside["quant_map"] = levels.clone()
        beside["quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        tensors = {"weight": (flat[::2] << 4 | flat[1::2]).view(-1, 1)}
        tensors |= {f"weight.{name}": tensor for name, tensor in beside.items()}
        return Quantized(tensors, (levels[codes] * absmax[:, None]).view(weight.shape))

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
    }
    return Layout(settings, as_int8 if kind == "int8" else quantize)


HQQ_PACKINGS = {
    8: ("8bit_u8", 1),
    4: ("4bit_u8", 2),
    3: ("3bit_32", 10),
    2: ("2bit_u8", 4),
    1: ("1bit_u8", 8),
}


def hqq(bits: int, group: int, axis: int) -> Layout:
    """The matrix is cut into groups; then the first part of the groups' rows is in the highest bits of all words."""
    packing, per_word = HQQ_PACKINGS[bits]

    def quantize(weight: Tensor) -> Quantized:
        cut = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = cut.amin(axis, keepdim=True), cut.amax(axis, keepdim=True)
        scales = ((high - low) / (2**bits - 1)).half()
        zeros = (-low / scales.float()).half()  # seldom a whole number
        codes = (cut / scales.float() + zeros.float()).round().clamp(0, 2**bits - 1)
        dense = ((codes - zeros.float()) * scales.float()).reshape(weight.shape)
        missing = -len(codes) % per_word
        padded = torch.cat([codes, torch.zeros(missing, codes.shape[1])]).int()
        words = torch.zeros(len(padded) // per_word, codes.shape[1], dtype=torch.int32)
        for index, rows in enumerate(padded.chunk(per_word)):
            words |= rows << (bits * (per_word - 1 - index))
        tensors = {
            "W_q": words if bits == 3 else words.to(torch.uint8),
            "scale": scales,
            "zero": zeros,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "shape": torch.tensor(weight.shape),
            "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        }
        return Quantized(tensors, dense)

    params = {"nbits": bits, "group_size": group, "axis": axis}
    return Layout({"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}, quantize)


def modelopt_float8() -> Layout:
    return Layout({"quant_method": "modelopt", "quant_algo": "FP8"}, float8("tensor").quantize)


def modelopt_mixed() -> Layout:
    """Attention in float8, and everything else in NVFP4."""
    parts = {f"{part}_proj": modelopt_float8() for part in "qkvo"}
    layers = {f"model.layers.0.self_attn.{part}": {"quant_algo": "FP8"} for part in parts}
    layers |= {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return Layout(settings, float4("modelopt").quantize, parts)


LAYOUTS: dict[str, Layout] = {
    "AWQ": awq(32),
    "AWQ of groups of 16": awq(16),
    "GPTQ": gptq(4, 32, act_order=False),
    "GPTQ act-order": gptq(4, 16, act_order=True),
    "GPTQ act-order, larger groups": gptq(4, 32, act_order=True),
    "GPTQ 8 bits": gptq(8, 32, act_order=False),
    "GPTQ 8 bits act-order": gptq(8, 32, act_order=True),
    "GPTQ 3 bits act-order": gptq(3, 32, act_order=True),
    "GPTQ 2 bits": gptq(2, 16, act_order=False, version="gptq_v2"),
    "GPTQ of whole rows": gptq(4, -1, act_order=False),
    "GPTQ version 2": gptq(4, 32, act_order=False, version="gptq_v2"),
    "compressed int4": compressed_packed(4, 32, symmetric=True),
    "compressed int4 with zero points": compressed_packed(4, 32, symmetric=False),
    "compressed int8, packed": compressed_packed(8, 32, symmetric=True),
    "SmoothQuant int8": smooth_int8(),
    "int8 by rows": smooth_int8(rounds_inputs=False),
    "compressed float8": float8("compressed"),
    "float8 with one scale": float8("tensor"),
    "float8 in blocks": float8("blocks"),
    "ModelOpt float8": modelopt_float8(),
    "ModelOpt NVFP4": float4("modelopt"),
    "ModelOpt, both": modelopt_mixed(),
    "MXFP8": mxfp8("transformers"),
    "ModelOpt MXFP8": mxfp8("modelopt"),
    "compressed MXFP8": mxfp8("compressed"),
    "compressed NVFP4": float4("nvfp4"),
    "compressed MXFP4": float4("mxfp4"),
    "bitsandbytes int8": bitsandbytes("int8"),
    "bitsandbytes nf4": bitsandbytes("nf4"),
    "bitsandbytes nf4, nested": bitsandbytes("nf4 nested"),
    "HQQ": hqq(4, 32, 1),
    "HQQ 8 bits": hqq(8, 32, 1),
    "HQQ 3 bits": hqq(3, 16, 1),
    "HQQ 2 bits": hqq(2, 16, 1),
    "HQQ 1 bit": hqq(1, 32, 1),
    "HQQ, unpacked": hqq(4, 64, 0),
    "HQQ 3 bits, unpacked": hqq(3, 64, 0),
}


def quantize_folder(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Rewrites a checkpoint in the layout; what its weights then stand for, by their plain names."""
    path = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if "_proj.weight" not in name and ".experts." not in name:
            stored[name] = dense[name] = tensor
            continue
        made = layout.of(name).quantize(tensor.float())
        dense[name] = made.dense
        for suffix, part in made.tensors.items():
            stored[f"{name.removesuffix('.weight')}.{suffix}"] = part.contiguous()
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.settings}))
    return dense
