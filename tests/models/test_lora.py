"""Adapters as PEFT writes them: read, refused, and the same logits as the merged checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from penstock.core.engine_config import LoRAConfig
from penstock.core.errors import InvalidRequest
from penstock.core.hashing import adapter_digest
from penstock.core.request import Adapter
from penstock.engine.adapters import LoRAModel
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.load import load_model
from penstock.models.lora import CONFIG_FILE, read_lora_config
from penstock.models.model import Model
from tests.models.adapters import ATTENTION, EVERYTHING, write_adapter
from tests.models.checkpoints import Reference, make_reference
from tests.models.conftest import random_prompt
from tests.models.gguf_files import write_model
from tests.models.paged import PagedRunner, Sequence
from tests.models.test_architectures import TOLERANCE
from tests.models.test_gguf_weights import with_weights

# One of each kind of layer: plain, with biases, with head norms, with sandwiched norms, with experts.
TARGETS = {
    "llama": EVERYTHING,
    "qwen2": EVERYTHING,
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "gemma3": EVERYTHING,
    "mixtral": ATTENTION,
}


class AdaptedRunner(PagedRunner):
    """Runs every step with the adapters in `digests`, one for each chunk."""

    def __init__(self, model: Model, ops: Ops, lora: LoRAModel) -> None:
        super().__init__(model, ops)
        self._base = model
        self._lora = lora
        self.digests: list[str | None] = []
        self.model = self  # type: ignore[assignment]

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch, kv: KVStore) -> torch.Tensor:
        starts = batch.query_starts.numpy().astype(np.int32)
        return self._lora.forward(token_ids, batch, kv, self._lora.token_slots(self.digests, starts))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._base.logits(hidden)


def lora_model(
    reference: Reference, ops: Ops, adapters: list[Reference], max_rank: int = 16
) -> AdaptedRunner:
    model = load_model(reference.folder, ops)
    limits = LoRAConfig(max_loras=4, max_lora_rank=max_rank)
    lora = LoRAModel(model, ops, Staging(ops.device, 1 << 20), limits)
    for adapter in adapters:
        read_lora_config(adapter.folder)
        named = Adapter(adapter.name, str(adapter.folder), adapter_digest(adapter.folder))
        lora.load(msgspec.structs.replace(named, digest=adapter.name), lora.read(named))
    return AdaptedRunner(model, ops, lora)


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_logits_as_the_merged_model(name: str, ops: Ops, tmp_path: Path) -> None:
    reference = make_reference(name, tmp_path / "model")
    merged = write_adapter(reference, tmp_path / "adapter", seed=1, targets=TARGETS[name])
    runner = lora_model(reference, ops, [merged])
    runner.digests = [merged.name]
    prompt = random_prompt(30, seed=2)
    expected = merged.logits(prompt)
    assert not torch.allclose(expected, reference.logits(prompt), atol=0.1)
    torch.testing.assert_close(runner.prompt_logits(prompt), expected, **TOLERANCE)
    torch.testing.assert_close(runner.prompt_logits(prompt, chunk_size=7), expected, **TOLERANCE)


def test_on_quantized_weights_of_a_gguf_file(ops: Ops, tmp_path: Path) -> None:
    """Whose queries and keys are stored in another order than PEFT knows them in."""
    reference = make_reference("llama", tmp_path / "folder")
    stored = write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.Q8_0)
    rounded = with_weights(reference, {key: torch.from_numpy(value) for key, value in stored.items()})
    merged = write_adapter(rounded, tmp_path / "adapter", seed=8)
    runner = lora_model(Reference("gguf", tmp_path / "model.gguf", None), ops, [merged])
    runner.digests = [merged.name]
    prompt = random_prompt(20, seed=9)
    torch.testing.assert_close(runner.prompt_logits(prompt), merged.logits(prompt), atol=1e-3, rtol=1e-3)


SETTINGS: list[dict[str, Any]] = [
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.self_attn.k_proj": 40}},
    {"target_modules": r".*layers\.1\.mlp\.(gate|down)_proj"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_settings_that_change_scales_and_targets(
    llama: Reference, settings: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    merged = write_adapter(llama, tmp_path / "adapter", seed=3, **settings)
    runner = lora_model(llama, ops, [merged])
    runner.digests = [merged.name]
    prompt = random_prompt(20, seed=4)
    torch.testing.assert_close(runner.prompt_logits(prompt), merged.logits(prompt), **TOLERANCE)


def test_patterns_name_modules_as_a_vision_language_model_does(
    llama: Reference, ops: Ops, tmp_path: Path
) -> None:
    pattern = {"alpha_pattern": {"layers.1.self_attn.k_proj": 40}}
    merged = write_adapter(llama, tmp_path, seed=3, **pattern)
    path = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("model.layers", "model.language_model.layers"): tensor
               for name, tensor in load_file(path).items()}, path)  # fmt: skip
    settings = json.loads((tmp_path / CONFIG_FILE).read_text())
    settings["alpha_pattern"] = {r"model\.language_model\.layers\.1\.self_attn\.k_proj": 40}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    runner = lora_model(llama, ops, [merged])
    runner.digests = [merged.name]
    prompt = random_prompt(20, seed=4)
    torch.testing.assert_close(runner.prompt_logits(prompt), merged.logits(prompt), **TOLERANCE)


def test_a_mixed_batch_gives_each_what_it_gets_alone(llama: Reference, ops: Ops, tmp_path: Path) -> None:
    merged = [write_adapter(llama, tmp_path / str(seed), seed=seed) for seed in (5, 6)]
    models = [merged[0], llama, merged[1], merged[0]]
    prompts = [random_prompt(length, seed=length) for length in (9, 1, 17, 4)]
    runner = lora_model(llama, ops, merged)
    runner.digests = [None if model is llama else model.name for model in models]
    together = runner.step([(Sequence(), prompt) for prompt in prompts])
    digests = runner.digests
    for model, prompt, digest, logits in zip(models, prompts, digests, together, strict=True):
        torch.testing.assert_close(logits, model.logits(prompt), **TOLERANCE)
        runner.digests = [digest]
        (alone,) = runner.step([(Sequence(), prompt)])
        if ops.name == "torch":  # which promises independence from the batch up to rounding only
            torch.testing.assert_close(logits, alone, **TOLERANCE)
        else:
            assert torch.equal(logits, alone)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
        ({"use_dora": True}, "uses use_dora"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save"),
        ({"alora_invocation_tokens": [7, 8]}, "uses alora_invocation_tokens"),
        ({"use_qalora": True}, "uses use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "begun with pissa_niter_4"),
        ({"bias": "all"}, "trains biases"),
        ({"r": None}, "usable rank"),
        ({"r": 0}, "usable rank"),
        ({"rank_pattern": {"(q_proj": 3}}, "usable rank"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    llama: Reference, ops: Ops, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    merged = write_adapter(llama, tmp_path, seed=1)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidRequest, match=complaint):
        lora_model(llama, ops, [merged])


def test_adapters_that_do_not_fit(llama: Reference, ops: Ops, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="rank 4, more than the 2"):
        lora_model(llama, ops, [write_adapter(llama, tmp_path / "rank", seed=1)], max_rank=2)
    with pytest.raises(InvalidRequest, match="lm_head"):
        lora_model(llama, ops, [write_adapter(llama, tmp_path / "head", seed=1, targets=("lm_head",))])
    other = make_reference("qwen3", tmp_path / "model")  # with larger heads
    with pytest.raises(InvalidRequest, match="was made for another model"):
        lora_model(llama, ops, [write_adapter(other, tmp_path / "other", seed=1)])
    with pytest.raises(InvalidRequest, match="is no LoRA adapter"):
        lora_model(llama, ops, [Reference("none", tmp_path / "none", None)])
    (tmp_path / "rank" / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        lora_model(llama, ops, [Reference("broken", tmp_path / "rank", None)])


def test_an_experts_adapter_is_refused(ops: Ops, tmp_path: Path) -> None:
    reference = make_reference("mixtral", tmp_path / "model")
    merged = write_adapter(reference, tmp_path / "adapter", seed=1, targets=("q_proj",))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    for end, shape in (("A", (4, 64)), ("B", (6, 4))):
        name = f"base_model.model.model.layers.0.block_sparse_moe.gate.lora_{end}.weight"
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path)
    with pytest.raises(InvalidRequest, match=r"block_sparse_moe\.gate, which this model does not allow"):
        lora_model(reference, ops, [merged])
