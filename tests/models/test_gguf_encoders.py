"""Encoders in GGUF files, which the `gguf` package wrote, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from penstock.core.errors import ModelLoadError
from penstock.kernels.select import select_ops
from penstock.models.encoders.gguf import open_gguf_encoder
from penstock.models.encoders.load import is_encoder, load_encoder
from penstock.models.gguf_file import GGUFFile
from tests.models.gguf_files import Vocabulary, finish
from tests.models.test_encoders import (
    LONG,
    NOMIC_NAMES,
    TEXTS,
    SecondNomic,
    embed,
    make_embedding_gemma,
    run_encoder,
    write_encoder,
)

ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "nomic": gguf.MODEL_ARCH.NOMIC_BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "eurobert": gguf.MODEL_ARCH.EUROBERT,
}
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"▁{number}" for number in range(116))]


TYPES = [3] * 4 + [1] * 116
BYTE_LEVEL = [*TOKENS[:-3], "a", "b", "ab"]
VOCABULARIES = {
    "xlm-roberta": Vocabulary(
        "t5",
        "default",
        ["<s>", "<pad>", "</s>", "<unk>", *TOKENS[4:]],
        [3, 3, 3, 2, *TYPES[4:]],
        merges=None,
        scores=[0.0] * 4 + [-float(number) for number in range(116)],
    ),
    "modernbert": Vocabulary("gpt2", "modern-bert", BYTE_LEVEL, TYPES, merges=["a b"]),
    "eurobert": Vocabulary("gpt2", "llama-bpe", BYTE_LEVEL, TYPES, merges=["a b"]),
}


def write_gguf_encoder(
    path: Path, family: str, model: Any, kind: GGMLQuantizationType, labels: list[str] | None = None
) -> Path:
    config, architecture = model.config, ARCHITECTURES[family]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    offset = 1 + config.pad_token_id if family == "xlm-roberta" else 0
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "eurobert":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    else:
        writer.add_layer_norm_eps(config.norm_eps if family == "modernbert" else config.layer_norm_eps)
    writer.add_causal_attention(False)
    is_classifier = type(model).__name__.endswith("Classification")
    writer.add_pooling_type(gguf.PoolingType.RANK if is_classifier else gguf.PoolingType.CLS)
    if labels:
        writer.add_classifier_output_labels(labels)
    if family == "nomic":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "modernbert":
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    usual = Vocabulary(kind="bert", pre=None, tokens=TOKENS, types=TYPES, merges=None)
    VOCABULARIES.get(family, usual).write(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _stored(family, model).items():
        values = tensor.float().numpy()
        if "position_embeddings" in name:
            values = values[offset:]  # the converter drops the rows that no text has
        stored_name = names.get_name(
            name.removeprefix("roberta.").removeprefix("bert."), (".weight", ".bias")
        )
        assert stored_name is not None, name
        values = np.atleast_1d(values.squeeze())  # as older converters do
        if values.ndim == 1 or "embeddings" in name or "classifier" in name:
            writer.add_tensor(stored_name, values)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(stored_name, packed, raw_dtype=kind)
    return finish(writer, path)


def _stored(family: str, model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by the names from which llama.cpp's converter translates."""
    tensors = {name: each for name, each in model.state_dict().items() if "pooler" not in name}
    if family != "nomic":
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
    # Files do not say which token is padding.
    texts = [[max(token, 2) for token in text] for text in (*TEXTS, LONG)]
    for text, states in zip(texts, ours.model.hidden_states(texts), strict=True):
        expected = run_encoder(theirs, text).last_hidden_state[0]
        torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)
    (vector,) = embed(path, [texts[-1]])
    expected = torch.nn.functional.normalize(run_encoder(theirs, texts[-1]).last_hidden_state[0, 0], dim=0)
    torch.testing.assert_close(torch.nn.functional.normalize(vector, dim=0), expected, atol=1e-4, rtol=1e-4)


def test_a_bert_without_kinds_of_tokens(tmp_path: Path) -> None:
    """DistilBERT, as the converter writes it."""
    theirs = write_encoder("bert", tmp_path / "folder", "Model")
    theirs.embeddings.token_type_embeddings.weight.data.zero_()
    tensors = theirs.state_dict()
    del tensors["embeddings.token_type_embeddings.weight"]
    stripped = SimpleNamespace(config=theirs.config, state_dict=lambda: tensors)
    path = write_gguf_encoder(tmp_path / "model.gguf", "bert", stripped, GGMLQuantizationType.F32)
    (states,) = load_encoder(path, select_ops("cpu", torch.float32)).model.hidden_states([LONG])
    expected = run_encoder(theirs, LONG).last_hidden_state[0]
    torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "nomic"])
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


@pytest.mark.parametrize("labels", [["LABEL_0"], ["bad", "so-so", "good"]])
def test_classifiers_give_the_logits_of_transformers(tmp_path: Path, labels: list[str]) -> None:
    theirs = write_encoder(
        "xlm-roberta", tmp_path / "folder", "ForSequenceClassification", num_labels=len(labels)
    )
    kind = GGMLQuantizationType.F32
    path = write_gguf_encoder(tmp_path / "model.gguf", "xlm-roberta", theirs, kind, labels)
    card = load_encoder(path, select_ops("cpu", torch.float32)).settings.card
    assert (card.labels, card.scores_pairs) == (tuple(labels), len(labels) == 1)
    text = [max(token, 2) for token in LONG]
    (found,) = embed(path, [text])
    torch.testing.assert_close(found, run_encoder(theirs, text).logits[0], atol=1e-4, rtol=1e-4)


def test_the_second_nomic_with_its_experts(tmp_path: Path) -> None:
    theirs, path = SecondNomic(), tmp_path / "model.gguf"
    theirs.tensors["encoder.layers.1.mlp.experts.bias"].zero_()  # which converters leave out
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NOMIC_BERT_MOE])
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_rope_freq_base(10000.0)
    writer.add_moe_every_n_layers(2)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    VOCABULARIES["xlm-roberta"].write(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT_MOE, 2)
    for name, tensor in theirs.tensors.items():
        if name.endswith("experts.bias"):
            continue
        values, part = tensor, name.rpartition(".")[2]
        if part in ("w1", "w2"):
            values = tensor.view(4, 80, 48)
            values = values.transpose(1, 2) if part == "w2" else values
        stored_name = names.get_name(name, (".weight", ".bias"))
        if part in ("w1", "w2"):
            stored_name = f"blk.1.ffn_{'up' if part == 'w1' else 'down'}_exps.weight"
        assert stored_name is not None, name
        writer.add_tensor(stored_name, values.contiguous().numpy())
    finish(writer, path)
    ours = load_encoder(path, select_ops("cpu", torch.float32))
    (states,) = ours.model.hidden_states([LONG])
    torch.testing.assert_close(states, theirs(LONG), atol=1e-4, rtol=1e-4)


def test_other_classifiers_are_refused(tmp_path: Path) -> None:
    theirs = write_encoder("bert", tmp_path / "folder", "ForSequenceClassification", num_labels=1)
    path = write_gguf_encoder(tmp_path / "model.gguf", "bert", theirs, GGMLQuantizationType.F32)
    with pytest.raises(ModelLoadError, match="layers that are not known"):
        load_encoder(path, select_ops("cpu", torch.float32))


def test_an_encoder_without_a_table_is_refused_by_name(tmp_path: Path) -> None:
    theirs = write_encoder("bert", tmp_path / "folder", "Model")
    path = write_gguf_encoder(tmp_path / "model.gguf", "bert", theirs, GGMLQuantizationType.F32)
    file = GGUFFile(path)
    del file.tensors["position_embd.weight"]
    with pytest.raises(ModelLoadError, match=r"no tensor position_embd\.weight"):
        open_gguf_encoder(file)


def test_embedding_gemma_with_the_layers_behind_its_pooling(tmp_path: Path) -> None:
    theirs, path = make_embedding_gemma(), tmp_path / "model.gguf"
    config = theirs.config
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GEMMA_EMBEDDING])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(16)  # as the makers write it: half of it lies before a token
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    Vocabulary(kind="bert", pre=None, tokens=TOKENS, types=TYPES, merges=None).write(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, config.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        values = tensor.float().numpy() + (1.0 if name.endswith("norm.weight") else 0.0)
        stored_name = names.get_name(f"model.{name}", (".weight",))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, values.astype(np.float32))
    dense = [torch.randn(96, config.hidden_size), torch.randn(config.hidden_size, 96)]
    for name, weight in zip(("dense_2", "dense_3"), dense, strict=True):
        writer.add_dense_features_dims(name, weight.shape[1], weight.shape[0])
        writer.add_tensor(f"{name}.weight", weight.numpy())
    finish(writer, path)
    assert is_encoder(path)
    (vector,) = embed(path, [LONG])
    made = run_encoder(theirs, LONG).last_hidden_state[0].mean(dim=0)
    for weight in dense:
        made = weight @ made
    expected = torch.nn.functional.normalize(made, dim=0)
    torch.testing.assert_close(torch.nn.functional.normalize(vector, dim=0), expected, atol=1e-4, rtol=1e-4)
    file = GGUFFile(path)
    file.metadata.pop("gemma-embedding.attention.sliding_window")
    with pytest.raises(ModelLoadError, match=r"has no gemma-embedding\.attention\.sliding_window"):
        open_gguf_encoder(file)
