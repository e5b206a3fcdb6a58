"""Log-probabilities of prompt tokens against transformers: random models of every architecture, and the real one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.build import Engine, build_engine
from penstock.models.gguf_file import GGUFFile
from penstock.models.load import load_tokenizer, open_checkpoint
from tests.engine.tiny import request, run, unpacked
from tests.models.checkpoints import MODELS, make_reference
from tests.models.conftest import random_prompt

TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. Water boils at one hundred degrees. "
    "def add(a, b):\n    return a + b\n"
)


def engine_of(path: Path, max_num_batched_tokens: int) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(path), device="cpu", dtype="float32"),
            cache=CacheConfig(num_kv_blocks=64),
            scheduler=SchedulerConfig(
                itl_target_ms=None, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8
            ),
        ),
        path,
    )


def expected_logprobs(logits: torch.Tensor, prompt: list[int]) -> NDArray[np.float32]:
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    found: NDArray[np.float32] = logprobs.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1).numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_random_models(name: str, tmp_path: Path) -> None:
    reference = make_reference(name, tmp_path)
    prompt = random_prompt(50, seed=11)
    engine = engine_of(reference.folder, max_num_batched_tokens=17)
    values, _ = unpacked(run(engine, [request("scored", prompt, 0, prompt_logprobs=1)])["scored"])
    assert values[:, 0] == pytest.approx(expected_logprobs(reference.logits(prompt), prompt), abs=1e-3)


def transformers_model(path: Path) -> LlamaForCausalLM:
    """The default model in transformers. Its own reader of GGUF files takes a minute; the weights are decoded by the
    gguf package here."""
    file = GGUFFile(path)
    config = open_checkpoint(path).config
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(settings)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    weights = {}
    for name in model.state_dict():
        base, _, kind = name.rpartition(".")
        stored = names.get_name(base)
        if stored == "output" and "output.weight" not in file.tensors:
            stored = "token_embd"
        info = file.tensors[f"{stored}.{kind}"]
        raw = np.frombuffer(file.buffers[0], np.uint8, info.num_bytes, info.offset).reshape(
            *info.shape[:-1], -1
        )
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.format.name]).copy()
        weight = torch.from_numpy(values).reshape(info.shape)
        if (part := str(stored).rpartition(".")[2]) in heads:  # rotary pairs lie side by side in the file
            weight = weight.view(heads[part], -1, 2, config.hidden_size).transpose(1, 2).reshape(info.shape)
        weights[name] = weight
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.e2e
def test_the_real_model() -> None:
    path = fetch_model("smollm2-135m")
    files = load_tokenizer(path)
    assert files is not None
    prompt = Tokenizer.from_buffer(files.tokenizer_json).encode(TEXT, add_special_tokens=False).ids
    with torch.inference_mode():
        logits = transformers_model(path)(torch.tensor([prompt])).logits[0]
    engine = engine_of(path, max_num_batched_tokens=24)
    values, ids = unpacked(run(engine, [request("scored", prompt, 0, prompt_logprobs=1)])["scored"])
    assert values[:, 0] == pytest.approx(expected_logprobs(logits, prompt), abs=1e-3)
    assert (ids[:, 1] == logits[:-1].argmax(dim=-1).numpy()).all()
