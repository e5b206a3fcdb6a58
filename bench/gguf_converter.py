#!/usr/bin/env python3
"""Whether GGUF files of llama.cpp's own converter give the logits of transformers, family by family.

    python -m bench.gguf_converter LLAMA_CPP [--only qwen3_moe,olmo3]

LLAMA_CPP is a folder with llama.cpp's sources (`conversion/` and `gguf-py/`); those inside the source package of
llama-cpp-python on PyPI will do. The tiny models of the tests are saved with transformers, with the settings that the
makers' files have and transformers' do not, converted to float32, and read by Penstock. Results are:

    equal           logits differ by less than 0.2 % of their spread
    not converted   the converter does not know the family, or not in transformers' present form
    refused         Penstock says why it does not read the file
    WRONG           other logits

With each result come the keys of the metadata that nobody has read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from penstock.core.errors import PenstockError
from penstock.engine.echo import byte_tokenizer_json
from penstock.kernels.reference import TorchOps
from penstock.models import load
from penstock.models.config import Fields
from penstock.models.gguf_file import GGUFFile
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.tiny_families import TINY, save_tiny

VOCAB_SIZE = 320
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_EVERY_SECOND = ["linear_attention", "full_attention"] * 2
# Published models of these families have no other values, which files therefore do not hold.
_USUAL: dict[str, dict[str, Any]] = {
    **{name: {"tie_word_embeddings": True} for name in ("cohere", "gemma", "gemma2", "gemma4", "lfm2_moe")},
    "cohere2": {"tie_word_embeddings": True, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "dots1-windows": {"sliding_window": None},
    "ernie4_5_moe": {"intermediate_size": 64},
    "falcon_h1-norm": {"mamba_norm_before_gate": False},
    "falcon_mamba": {"intermediate_size": 128},
    "lfm2": {"tie_word_embeddings": True, "conv_bias": False},
    "llama4": {"floor_scale": 8192, "attention_chunk_size": 8192},
    "olmoe": {"clip_qkv": None},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256},
    **{name: {"layer_types": _EVERY_SECOND} for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")},
    "starcoder2": {"sliding_window": 512},
    "afmoe": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "attention_bias": False,
    },
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}
_USUAL["lfm2_moe"] |= {"routed_scaling_factor": 1.0}
# What the makers' files say, and transformers does not write.
_SAID: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "solar_open": {"partial_rotary_factor": 1.0},
    "cohere2": {"rotary_pct": 1.0},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1], "moe_topk": [2, 2]},
    "falcon_h1": {"head_dim": 16},
    "gpt2": {"n_ctx": 256},
    "minimax_m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    "qwen3_5": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
}


class _Watched(dict[str, Any]):
    """Metadata that remember which keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)


def say_as_makers_do(name: str, folder: Path) -> None:
    """Add to the folder what its maker's has: settings, and a tokenizer for the whole vocabulary."""
    tokenizer = Tokenizer.from_str(byte_tokenizer_json().decode())
    tokenizer.add_tokens([f"<{number}>" for number in range(tokenizer.get_vocab_size(), VOCAB_SIZE)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    for family, said in _SAID.items():
        if name.startswith(family):
            settings |= said
    if name.startswith("lfm2"):
        settings.setdefault("block_ff_dim", settings["intermediate_size"])
    if name.startswith("granite-"):
        settings["layer_types"] = [_KINDS.get(kind, kind) for kind in settings["layer_types"]]
    path.write_text(json.dumps(settings))


def convert(converter: Any, folder: Path, made: Path) -> None:
    """Run the converter, with a vocabulary of names where it wants files that a folder of ours does not have."""
    import gguf

    settings = converter.ModelBase.load_hparams(folder, False)
    name = converter.get_model_architecture(settings, converter.ModelType.TEXT)
    model_class = converter.get_model_class(name)
    model_class.no_mtp = True

    def set_vocab(self: Any) -> None:
        writer = self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"<{number}>" for number in range(VOCAB_SIZE)])
        writer.add_token_types([1] * VOCAB_SIZE)
        writer.add_token_merges([])

    model_class.set_vocab = set_vocab
    with torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
        model_class(folder, gguf.LlamaFileType.ALL_F32, made, eager=True).write()


def compare(converter: Any, name: str, folder: Path) -> tuple[str, str]:
    """Return the result for one tiny model, and what there is to say of it."""
    tiny = TINY[name]
    TINY[name] = replace(tiny, changes={**tiny.changes, **_USUAL.get(name, {})})
    reference = save_tiny(name, folder / "saved")
    say_as_makers_do(name, folder / "saved")
    path = folder / "model.gguf"
    try:
        convert(converter, folder / "saved", path)
    except Exception as error:  # whatever the converter runs into
        return "not converted", f"{type(error).__name__}: {str(error)[:90]}"
    prompt, ops = random_prompt(50, seed=1), TorchOps()
    try:
        logits = PagedRunner(load.load_model(path, ops), ops).prompt_logits(prompt)
    except PenstockError as error:
        return "refused", str(error)[:140]
    expected = reference.logits(prompt)
    difference = float((logits - expected).abs().max() / expected.std())
    return "equal" if difference < 2e-3 else "WRONG", ", ".join(unread_keys(path)) or "all keys are read"


def unread_keys(path: Path) -> list[str]:
    """Return the keys below the architecture's name that its family does not look at."""
    file = GGUFFile(path)
    watched = _Watched(file.metadata)
    file.metadata = watched
    raw = Fields.raw

    def seen_raw(self: Fields, key: str) -> Any:
        watched.seen.add(self._prefix + key)
        return raw(self, key)

    Fields.raw = seen_raw  # type: ignore[method-assign]
    try:
        load.architecture_for_gguf(file).config_from_gguf(file)
    finally:
        Fields.raw = raw  # type: ignore[method-assign]
    prefix = f"{file.architecture}."
    return [key for key in file.metadata if key.startswith(prefix) and key not in watched.seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--only", help="names of tiny models, with commas between them")
    options = parser.parse_args()
    sys.path.insert(0, str(options.llama_cpp / "gguf-py"))
    sys.path.append(str(options.llama_cpp))
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        del sys.modules[name]  # the converter needs the package beside it
    conversion = importlib.import_module("conversion")

    logging.disable(logging.WARNING)
    for name in options.only.split(",") if options.only else list(TINY):
        with tempfile.TemporaryDirectory() as folder:
            result, remark = compare(conversion, name, Path(folder))
        print(f"{name:24} {result:14} {remark}", flush=True)


if __name__ == "__main__":
    main()
