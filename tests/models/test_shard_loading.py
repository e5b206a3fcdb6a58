"""A rank reads its own part of a checkpoint, and gets of each matrix what the whole one holds there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.kernels.interface import DenseWeight, WeightData
from penstock.kernels.reference import TorchOps
from penstock.models.load import Checkpoint, open_checkpoint
from penstock.models.rounding import quantize
from penstock.models.sharding import WHOLE, Shard
from penstock.models.weight_parts import Part, take_part
from penstock.models.weights import WeightLoader
from tests.models.checkpoints import Reference
from tests.models.gguf_files import write_model
from tests.models.quantized_checkpoints import LAYOUTS, quantize_folder


def dense(weight: WeightData) -> torch.Tensor:
    return weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()


def bytes_read(checkpoint: Checkpoint, shard: Shard) -> int:
    source = checkpoint.source()
    checkpoint.architecture(checkpoint.config, WeightLoader(source, TorchOps(), shard=shard), 64)
    return source.bytes_read


def assert_same_part(checkpoint: Checkpoint, name: str, rows: int, columns: int, part: Part) -> None:
    source = checkpoint.source()
    whole = dense(source.matrix(name, rows, columns))
    expected = whole[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
    assert torch.equal(dense(source.matrix(name, rows, columns, part)), expected)


PARTS = [
    Part(range(16, 48), range(64)),
    Part(range(64), range(32)),
    Part(range(64), range(32, 64)),
    Part(range(16, 32), range(16, 64)),
    Part(range(64), range(8, 24)),  # across groups of a quantized weight
]


@pytest.fixture(scope="module", params=["folder", "F16", "Q8_0", "Q4_1", "Q5_0"])
def checkpoint(
    request: pytest.FixtureRequest, llama: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    if request.param == "folder":
        return open_checkpoint(llama.folder)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_model(path, llama, GGMLQuantizationType[request.param])
    return open_checkpoint(path)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_that_of_the_whole(checkpoint: Checkpoint, part: Part) -> None:
    # Of the queries, whose rows GGUF stores in another order.
    assert_same_part(checkpoint, "model.layers.0.self_attn.q_proj.weight", 64, 64, part)


def test_tensor_parallel_ranks_read_their_share(checkpoint: Checkpoint) -> None:
    whole = bytes_read(checkpoint, WHOLE)
    # Norms are everybody's. With four ranks, so is each of the two key-value heads for two of them, blocks of 32 hold
    # the inputs of two heads, and the cut of 96 into four is not even.
    for size, most in ((2, 0.55), (4, 0.36)):
        for rank in range(size):
            assert bytes_read(checkpoint, Shard(tensor_rank=rank, tensor_size=size)) < most * whole


def test_stages_read_their_layers(checkpoint: Checkpoint) -> None:
    read = [bytes_read(checkpoint, Shard(stage=stage, num_stages=2)) for stage in range(2)]
    assert sum(read) == bytes_read(checkpoint, WHOLE)
    assert max(read) < 0.6 * sum(read)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_published_quantized_layouts(name: str, llama: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(llama.folder, folder)
    quantize_folder(folder, LAYOUTS[name])
    checkpoint, matrix = open_checkpoint(folder), "model.layers.0.self_attn.q_proj.weight"
    for part in PARTS:
        assert_same_part(checkpoint, matrix, 64, 64, part)
    half, whole = checkpoint.source(), checkpoint.source()
    half.matrix(matrix, 64, 64, Part(range(32), range(64)))
    whole.matrix(matrix, 64, 64)
    if name.startswith("HQQ"):  # whose words hold codes of rows that are far apart
        return
    assert half.bytes_read < 0.7 * whole.bytes_read, "scales and orders of inputs are small"


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_parts_of_rounded_weights_keep_their_scales(method: str) -> None:
    weight = quantize(DenseWeight(torch.randn(24, 128)), method)  # type: ignore[arg-type]
    part = Part(range(8, 24), range(32, 96))
    taken = take_part(weight, part)
    assert type(taken) is type(weight)
    assert torch.equal(dense(taken), dense(weight)[8:24, 32:96])
