"""The default model, from its GGUF file alone: tokenizer, template and weights together."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from penstock.cli.console import fetch_model
from penstock.kernels.select import select_ops
from penstock.models.load import load_model, load_tokenizer
from penstock.models.tokenizer import TokenizerFiles
from tests.models.paged import PagedRunner

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch_model("smollm2-135m")


@pytest.fixture(scope="module")
def files(path: Path) -> TokenizerFiles:
    files = load_tokenizer(path)
    assert files is not None
    return files


def test_the_capital_of_france(path: Path, files: TokenizerFiles) -> None:
    assert files.chat_template is not None
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = jinja2.Template(files.chat_template).render(messages=question, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    ops = select_ops("cpu", torch.float32)
    answer = PagedRunner(load_model(path, ops), ops).greedy(prompt, 8)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in files.eos_token_ids


def test_tokens_as_the_model_was_trained_on(files: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)

    def pieces(text: str) -> list[str]:
        return tokenizer.encode(text, add_special_tokens=False).tokens

    assert pieces("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert pieces("<|im_start|>user\nhi<|im_end|>") == ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]
    for text in ["def f(x):\n    return x", "naïve café", "👩‍👩‍👧 🇫🇷", "  two  spaces ", "你好"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_what_the_file_says_of_its_tokens(files: TokenizerFiles) -> None:
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert files.eos_token_ids[0] == 2
    assert not files.add_bos_token
