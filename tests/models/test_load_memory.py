"""Loading takes little host memory beside the packed weights: tensors are mapped, read one after the other, and let
go. (`python -m bench.load_memory` measures it with larger files.)"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from penstock.core.engine_config import ModelImplementation
from penstock.kernels.interface import WeightData
from penstock.kernels.reference import TorchLinear, TorchOps
from penstock.models.load import load_model
from penstock.models.safetensors_source import ReadAhead
from penstock.models.transformers_probe import Recording

STATUS = Path("/proc/self/status")
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class DroppingOps(TorchOps):
    """Keeps no weights, like a GPU that has copied them: what stays in host memory is the loader's."""

    def pack_linear(self, parts: list[WeightData], bias: torch.Tensor | None = None) -> TorchLinear:  # type: ignore[override]
        super().pack_linear(parts, bias)  # reads all of the weights
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return TorchLinear(torch.zeros(1, dtype=self.dtype).expand(rows, columns), None)


def own_bytes() -> int:
    """The memory of this process: its own, and pages of mapped files."""
    lines = [line.split() for line in STATUS.read_text().splitlines()]
    return sum(int(words[1]) << 10 for words in lines if words and words[0] in ("RssAnon:", "RssFile:"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.float16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)  # what memory held before may be no number
    model.save_pretrained(folder, max_shard_size="36MB")
    return folder


@pytest.fixture
def large_blocks_go_back() -> Iterator[None]:
    """By default glibc keeps up to 64 MB of freed blocks, depending on what the process freed before."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("sets glibc's mallopt")
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    yield
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc chooses by itself


@pytest.mark.usefixtures("large_blocks_go_back")
@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_the_peak_is_near_the_largest_shard(
    folder: Path, implementation: ModelImplementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(shards) >= 4
    # The probe would run the model, whose weights are gone.
    monkeypatch.setattr("penstock.models.transformers_load.probe", lambda *_: Recording(64))
    before = own_bytes()
    seen: list[int] = []
    load_model(
        folder,
        DroppingOps("cpu", torch.float16),
        implementation=implementation,
        on_progress=lambda *_: seen.append(own_bytes() - before),
    )
    assert len(seen) >= 28
    assert max(seen) < 1.2 * max(shards)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs hints to the page cache")
def test_the_file_that_is_read_and_the_next_are_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for file in files:
        file.write_bytes(b"weights")
    asked: list[Path] = []

    def note(descriptor: int, *_: int) -> None:
        asked.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "posix_fadvise", note)
    ahead = ReadAhead(files)
    for opened, expected in ((files[0], 2), (files[0], 2), (files[1], 3), (files[2], 3), (files[0], 3)):
        ahead.opened(opened)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and thread.name.startswith("read-ahead"):
                thread.join()
        assert asked == files[:expected]
