from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.models.gguf_file import FORMATS, BlockFormat
from penstock.models.gguf_source import DECODERS, decode_matrix

QUANTIZED = [(kind, format) for kind, format in FORMATS.items() if format.name in DECODERS]


def random_blocks(format: BlockFormat, rows: int, columns: int, seed: int) -> np.ndarray:
    """Any bytes are valid blocks, as long as their float16 factors are finite."""
    raw = np.random.default_rng(seed).integers(
        0, 256, (rows, columns // format.block_size, format.block_bytes)
    )
    raw = raw.astype(np.uint8)
    high_bytes_of_factors = {
        "Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3),
        "Q4_K": (1, 3), "Q5_K": (1, 3), "TQ1_0": (53,), "TQ2_0": (65,), "IQ1_M": (55,), "MXFP4": (0,),
    }.get(format.name, (1,))  # fmt: skip
    for index in high_bytes_of_factors:
        raw[:, :, index] &= 0xBF
    return raw.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "format"), QUANTIZED, ids=[format.name for _, format in QUANTIZED])
def test_decodes_exactly_as_the_gguf_package(kind: int, format: BlockFormat) -> None:
    # More elements than are decoded at a time, and not a multiple of that.
    raw = random_blocks(format, rows=301, columns=1024, seed=kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert np.isfinite(expected).all()
    weight = decode_matrix(raw, format)
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize(("kind", "format"), QUANTIZED, ids=[format.name for _, format in QUANTIZED])
def test_takes_the_form_that_kernels_expect(kind: int, format: BlockFormat) -> None:
    weight = decode_matrix(random_blocks(format, rows=3, columns=512, seed=kind), format)
    assert weight.shape == (3, 512)
    assert weight.scales.shape == (3, 512 // weight.group)
    assert weight.offsets is None or weight.offsets.shape == weight.scales.shape
    if weight.bits == 4:
        assert weight.codes.dtype == torch.uint8
        assert int(weight.codes.max()) <= 15
    else:
        assert weight.codes.dtype == torch.int8


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, format in FORMATS.items():
        theirs = gguf.GGMLQuantizationType(kind)
        assert theirs.name == format.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (format.block_size, format.block_bytes)
