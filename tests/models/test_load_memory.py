"""Loading takes little host memory beside the packed weights: tensors are mapped, and read one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from penstock.core.engine_config import ModelImplementation
from penstock.kernels.interface import WeightData
from penstock.kernels.reference import TorchLinear, TorchOps
from penstock.models.load import load_model
from penstock.models.transformers_probe import Recording

STATUS = Path("/proc/self/status")


class DroppingOps(TorchOps):
    """Keeps no weights, like a GPU that has copied them: what stays in host memory is the loader's."""

    def pack_linear(self, parts: list[WeightData], bias: torch.Tensor | None = None) -> TorchLinear:  # type: ignore[override]
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return TorchLinear(torch.zeros(1, dtype=self.dtype).expand(rows, columns), None)


def own_bytes() -> int:
    """The memory of this process that is no mapped file."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


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
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="36MB")
    return folder


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
