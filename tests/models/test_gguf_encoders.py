"""Encoders in GGUF files, which the `gguf` package wrote, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from penstock.core.errors import ModelLoadError
from penstock.kernels.select import select_ops
from penstock.models.encoders.load import is_encoder, load_encoder
from tests.models.gguf_files import Vocabulary, finish
from tests.models.test_encoders import LONG, NOMIC_NAMES, TEXTS, embed, run_encoder, write_encoder

ARCHITECTURES = {"bert": gguf.MODEL_ARCH.BERT, "nomic": gguf.MODEL_ARCH.NOMIC_BERT}
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"▁{number}" for number in range(116))]


def write_gguf_encoder(
    path: Path, family: str, model: Any, kind: GGMLQuantizationType, tokenizer: str = "bert"
) -> Path:
    config, architecture = model.config, ARCHITECTURES[family]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    if family == "nomic":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    types = [3] * 4 + [1] * 116
    Vocabulary(kind=tokenizer, pre=None, tokens=TOKENS, types=types, merges=None).write(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _stored(family, model).items():
        values = tensor.float().numpy()
        stored_name = names.get_name(name, (".weight", ".bias"))
        assert stored_name is not None, name
        if values.ndim == 1 or "embeddings" in name:
            writer.add_tensor(stored_name, values)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(stored_name, packed, raw_dtype=kind)
    return finish(writer, path)


def _stored(family: str, model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by the names from which llama.cpp's converter translates."""
    tensors = {name: each for name, each in model.state_dict().items() if "pooler" not in name}
    if family == "bert":
        return tensors
    stored = {}
    for name, tensor in tensors.items():
        for new, old in NOMIC_NAMES.items():
            name = name.replace(new, old)
        stored[name] = tensor
    for index in range(model.config.num_hidden_layers):
        prefix = f"encoder.layers.{index}"
        parts = [stored.pop(f"{prefix}.self_attn.{part}_proj.weight") for part in "qkv"]
        stored[f"{prefix}.attn.Wqkv.weight"] = torch.cat(parts)
    return stored


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_hidden_states_and_vectors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = write_encoder(family, tmp_path / "folder", "Model")
    path = write_gguf_encoder(tmp_path / "model.gguf", family, theirs, GGMLQuantizationType.F32)
    assert is_encoder(path)
    ours = load_encoder(path, select_ops("cpu", torch.float32))
    assert ours.settings.pooling == "first"
    texts = [*TEXTS, LONG]
    for text, states in zip(texts, ours.model.hidden_states(texts), strict=True):
        expected = run_encoder(theirs, text).last_hidden_state[0]
        torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)
    (vector,) = embed(path, [LONG])
    expected = torch.nn.functional.normalize(run_encoder(theirs, LONG).last_hidden_state[0, 0], dim=0)
    torch.testing.assert_close(torch.nn.functional.normalize(vector, dim=0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_quantized_encoders_compute_with_the_rounded_weights(tmp_path: Path, family: str) -> None:
    sizes, kind = {"hidden_size": 64, "intermediate_size": 96}, GGMLQuantizationType.Q8_0
    theirs = write_encoder(family, tmp_path / "folder", "Model", **sizes)
    path = write_gguf_encoder(tmp_path / "model.gguf", family, theirs, kind)
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 2 and "embeddings" not in name:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(rounded)
    (states,) = load_encoder(path, select_ops("cpu", torch.float32)).model.hidden_states([LONG])
    expected = run_encoder(theirs, LONG).last_hidden_state[0]
    torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-3)


def test_encoders_with_other_tokenizers_are_refused(tmp_path: Path) -> None:
    theirs = write_encoder("bert", tmp_path / "folder", "Model")
    path = write_gguf_encoder(tmp_path / "model.gguf", "bert", theirs, GGMLQuantizationType.F32, "t5")
    with pytest.raises(ModelLoadError, match="tokenizer of kind 't5'; known is bert"):
        load_encoder(path, select_ops("cpu", torch.float32))
