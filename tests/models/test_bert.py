"""BERT encoders against transformers' own, with random weights; and the real MiniLM where it can be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from penstock.cli.console import fetch_model
from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ModelLoadError
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import build_engine
from penstock.kernels.select import select_ops
from penstock.models.load import is_encoder, load_encoder

TEXTS = [[101, 7, 102], list(range(20, 90)), [101], [5, 6, 7, 8]]


def write_bert(folder: Path, **settings: object) -> Path:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=120,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=96,
        initializer_range=0.3,
        **settings,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def pooled(model: BertModel, text: list[int], pooling: str = "mean") -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([text])).last_hidden_state[0]
    vector = states.mean(dim=0) if pooling == "mean" else states[0]
    return vector / vector.norm()


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, activation: str) -> None:
    folder = write_bert(tmp_path, hidden_act=activation)
    theirs = BertModel.from_pretrained(folder).eval()
    ours = load_encoder(folder, select_ops("cpu", torch.float32))
    with torch.inference_mode():
        found = ours.hidden_states(TEXTS)
        for text, states in zip(TEXTS, found, strict=True):
            expected = theirs(torch.tensor([text])).last_hidden_state[0]
            torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-4)
            (alone,) = ours.hidden_states([text])
            assert torch.equal(alone, states), "a text's states depend on its batch"


def embed(folder: Path, texts: list[list[int]], **scheduler: int) -> list[torch.Tensor]:
    config = EngineConfig(
        model=ModelConfig(model="bert", device="cpu"),
        scheduler=SchedulerConfig(itl_target_ms=None, **scheduler),
    )
    engine = build_engine(config, folder)
    for index, text in enumerate(texts):
        engine.loop.add(
            Request(
                id=str(index),
                prompt_token_ids=tuple(text),
                sampling=SamplingParams(max_tokens=1),
                pooling=engine.ready.model.pooling,
            )
        )
    found: dict[str, bytes] = {}
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.embedding is not None, event
            found[event.request_id] = event.embedding
        engine.loop.scheduler.check_integrity()
    engine.close()
    return [
        torch.frombuffer(bytearray(found[str(index)]), dtype=torch.float32) for index in range(len(texts))
    ]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_through_the_scheduler(tmp_path: Path, pooling: str) -> None:
    folder = write_bert(tmp_path)
    (folder / "1_Pooling").mkdir()
    mode = "pooling_mode_mean_tokens" if pooling == "mean" else "pooling_mode_cls_token"
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({mode: True, "word_embedding_dimension": 48})
    )
    theirs = BertModel.from_pretrained(folder).eval()
    longest = [*range(96)]
    whole = embed(folder, [*TEXTS, longest])
    for text, vector in zip([*TEXTS, longest], whole, strict=True):
        torch.testing.assert_close(vector, pooled(theirs, text, pooling), atol=1e-5, rtol=1e-4)
    in_chunks = embed(folder, [*TEXTS, longest], max_num_batched_tokens=17, max_num_seqs=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, in_chunks, strict=True))


def test_what_makes_an_encoder(tmp_path: Path) -> None:
    assert is_encoder(write_bert(tmp_path / "bert"))
    assert not is_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not is_encoder(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
        ("config.json", {"architectures": ["BertModel"], "hidden_act": "relu6"}),
        ("sentence_bert_config.json", []),
    ],
)
def test_settings_that_cannot_be_served_are_refused(tmp_path: Path, file: str, content: object) -> None:
    folder = write_bert(tmp_path)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=file.rpartition("/")[2]):
        load_encoder(folder, select_ops("cpu", torch.float32))


@pytest.mark.e2e
def test_minilm_means_what_it_should() -> None:
    from tokenizers import Tokenizer

    folder = fetch_model("all-minilm-l6-v2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell sharply today."]
    texts = [tokenizer.encode(sentence).ids for sentence in sentences]
    cat, kitten, market = vectors = embed(folder, texts)
    theirs = BertModel.from_pretrained(folder).eval()
    for text, vector in zip(texts, vectors, strict=True):
        torch.testing.assert_close(vector, pooled(theirs, text), atol=1e-6, rtol=1e-4)
    assert float(cat @ kitten) > 0.5 > 0.2 > float(cat @ market)
