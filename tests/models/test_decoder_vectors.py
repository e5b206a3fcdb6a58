"""Decoders that make vectors, labels and scores, against transformers: pooling from the model's files, checkpoints
without a head, classifiers, and rerankers that answer yes or no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ModelLoadError
from penstock.core.messages import ModelCard
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import build_engine
from penstock.models.load import open_checkpoint, pooling_settings
from penstock.models.overrides import overridden
from tests.models.checkpoints import Reference
from tests.models.gguf_files import write_model
from tests.models.test_encoders import add_modules, write_dense

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXTS = [[5, 6, 7], [(7 * n) % 119 + 1 for n in range(90)], [9]]


def vectors(folder: Path, texts: list[list[int]] = TEXTS, **request: Any) -> tuple[ModelCard, torch.Tensor]:
    """Return one vector for each text, computed in small chunks."""
    config = EngineConfig(
        model=ModelConfig(model="tiny", device="cpu", dtype="float32"),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_batched_tokens=24),
        num_threads=1,
    )
    engine = build_engine(config, folder)
    card = engine.ready.model
    for index, text in enumerate(texts):
        wanted = Request(
            id=str(index),
            prompt_token_ids=tuple(text),
            sampling=SamplingParams(max_tokens=1),
            pooling=card.pooling,
        )
        engine.loop.add(msgspec.structs.replace(wanted, **request))
    found: dict[str, bytes] = {}
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.embedding is not None, event
            found[event.request_id] = event.embedding
    engine.close()
    rows = [
        torch.frombuffer(bytearray(found[str(index)]), dtype=torch.float32) for index in range(len(texts))
    ]
    return card, torch.stack(rows)


def states(model: Any, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
    return found


def write_qwen3(folder: Path, model_class: Any = Qwen3Model, **settings: Any) -> Any:
    torch.manual_seed(4)
    model = model_class(Qwen3Config(**SIZES, **settings)).eval()
    model.save_pretrained(folder)
    return model


def pooled(found: torch.Tensor, pooling: str) -> torch.Tensor:
    weights = torch.arange(1, len(found) + 1)[:, None]
    by_mode = {
        "mean": found.mean(dim=0),
        "cls": found[0],
        "lasttoken": found[-1],
        "weightedmean": (found * weights).sum(dim=0) / weights.sum(),
        "max": found.amax(dim=0),
    }
    return by_mode[pooling]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Qwen3 without a head, and without the embedding tied: as the larger Qwen3-Embedding models are."""
    folder = tmp_path_factory.mktemp("bare")
    model = write_qwen3(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    return folder, model


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls", "weightedmean", "max"])
def test_the_pooling_of_the_files_is_used(bare: tuple[Path, Any], pooling: str) -> None:
    folder, model = bare
    add_modules(folder, "Pooling", "Normalize", pooling=pooling)
    card, found = vectors(folder)
    assert (card.pooler.source, card.generates) == ("1_Pooling/config.json", False)
    for text, vector in zip(TEXTS, found, strict=True):
        expected = pooled(states(model, text), pooling)
        torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-5, rtol=1e-4)


def test_older_files_of_poolings_and_vectors_that_are_not_normalized(bare: tuple[Path, Any]) -> None:
    folder, model = bare
    add_modules(folder, "Pooling", "Dense")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    weight = write_dense(folder / "2_Dense", 64, 40)
    settings = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    card, found = vectors(folder)
    assert (card.embedding_size, card.pooler.normalizes, card.max_model_len) == (40, False, 101)
    expected = weight @ states(model, TEXTS[1])[-1]
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)
    _, found = vectors(folder, normalizes=True)
    torch.testing.assert_close(found[1], expected / expected.norm(), atol=1e-5, rtol=1e-4)
    _, found = vectors(folder, [TEXTS[1]], pooling="all")
    assert found.shape == (1, 90 * 40)
    torch.testing.assert_close(found[0, -40:], expected, atol=1e-4, rtol=1e-4)


def test_without_a_file_a_decoder_takes_its_last_token(tmp_path: Path) -> None:
    model = write_qwen3(tmp_path, tie_word_embeddings=False)
    card, found = vectors(tmp_path)
    assert (card.pooling, card.pooler.source, card.generates) == ("last", "", False)
    expected = states(model, TEXTS[1])[-1]
    torch.testing.assert_close(found[1], expected / expected.norm(), atol=1e-5, rtol=1e-4)
    write_qwen3(tmp_path, Qwen3ForCausalLM)
    pooling = pooling_settings(tmp_path)
    assert (pooling.pooling, pooling.only_pools) == ("last", False)


CLASSIFIERS: dict[str, type[PreTrainedConfig]] = {
    "Llama": transformers.LlamaConfig,
    "Mistral": transformers.MistralConfig,
    "Qwen2": transformers.Qwen2Config,
    "Qwen3": Qwen3Config,
    "Gemma3Text": transformers.Gemma3TextConfig,
    "GPT2": transformers.GPT2Config,
}


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_give_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(4)
    settings = SIZES | {"num_labels": 3}
    other_names = {"Qwen2": ["head_dim"], "GPT2": ["head_dim", "num_key_value_heads", "intermediate_size"]}
    for name in other_names.get(family, []):
        settings.pop(name)
    model = getattr(transformers, f"{family}ForSequenceClassification")(
        CLASSIFIERS[family](**settings)
    ).eval()
    model.save_pretrained(tmp_path)
    card, found = vectors(tmp_path)
    assert card.pooler.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert not card.pooler.scores_pairs
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


def write_words(folder: Path, *words: str) -> None:
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("told_by", ["name", "config", "overrides", "modules", "modules, true only"])
def test_rerankers_compare_two_tokens(tmp_path: Path, told_by: str) -> None:
    folder = tmp_path / ("Qwen3-Reranker-0.6B" if told_by == "name" else "model")
    model = write_qwen3(folder, Qwen3ForCausalLM, tie_word_embeddings=False)
    write_words(folder, "yes", "no")
    config = json.loads((folder / "config.json").read_text())
    false: int | None = 2
    named = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    if told_by == "config":
        (folder / "config.json").write_text(json.dumps(config | named))
    elif told_by == "overrides":  # as vLLM is told
        given = json.dumps({**named, "is_original_qwen3_reranker": True})
        folder = overridden(folder, ModelConfig(hf_overrides=given))
    elif told_by != "name":
        add_modules(folder, "LogitScore")
        false = None if "only" in told_by else 2
        score = {"true_token_id": 1, "false_token_id": false}
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    card, found = vectors(folder)
    assert (card.pooler.scores_pairs, card.pooler.asks_yes_or_no, card.embedding_size) == (True, True, 1)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1]
        expected = logits[1] if false is None else logits[1] - logits[2]
        assert float(vector[0]) == pytest.approx(float(expected), abs=1e-4)


def write_gguf_reranker(path: Path, folder: Path, pooling: gguf.PoolingType, labels: list[str]) -> Any:
    """Write a file that holds two rows of the head, as converters make it of Qwen3-Reranker."""
    model = write_qwen3(folder, Qwen3ForCausalLM, tie_word_embeddings=True)
    reference = Reference("qwen3", folder, model)

    def add_rows(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(pooling)
        writer.add_classifier_output_labels(labels)
        rows = model.get_input_embeddings().weight.detach()[[1, 2]]
        writer.add_tensor("cls.output.weight", rows.numpy())

    write_model(path, reference, gguf.GGMLQuantizationType.F32, also=add_rows)
    return model


def test_rerankers_in_gguf_files_compare_two_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf_reranker(path, tmp_path / "folder", gguf.PoolingType.RANK, ["yes", "no"])
    card, found = vectors(path)
    assert (card.pooler.scores_pairs, card.pooler.asks_yes_or_no, card.embedding_size) == (True, True, 1)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1]
        assert float(vector[0]) == pytest.approx(float(logits[1] - logits[2]), abs=1e-4)
    write_gguf_reranker(path, tmp_path / "other", gguf.PoolingType.RANK, ["good", "bad"])
    with pytest.raises(ModelLoadError, match="known are"):
        pooling_settings(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "tokens behind them"),
        ({"is_causal": False}, "tokens behind them"),
        ({"matryoshka_dimensions": "many"}, "matryoshka_dimensions"),
        ({"classifier_from_token": ["no"]}, "classifier_from_token"),
        ({"classifier_from_token": ["no", "maybe"]}, "'maybe'"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"1": "x"}}, "gaps"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"a": "x"}}, "id2label"),
        (
            {
                "architectures": ["Qwen3ForSequenceClassification"],
                "sbert_ce_default_activation_function": "x.Y",
            },
            "activation",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    config = Qwen3Config(**SIZES).to_dict() | {"architectures": ["Qwen3ForCausalLM"]} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_words(tmp_path, "yes", "no")
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(tmp_path)


def test_what_the_files_say_besides(tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES).to_dict() | {"architectures": ["Qwen3Model"], "is_matryoshka": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentences = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    sentences |= {"similarity_fn_name": "dot", "truncate_dim": 32}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77, "do_lower_case": true}')
    pooling = pooling_settings(tmp_path)
    card = pooling.card
    assert (card.matryoshka, card.prompts, card.default_prompt) == (
        (),
        {"query": "Q: ", "document": ""},
        "query",
    )
    assert (card.similarity, card.cut_to, card.lower_cases, pooling.max_text_len) == ("dot", 32, True, 77)
