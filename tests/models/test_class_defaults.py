"""Files leave out settings that the class of their maker has. What is read from a file with sizes alone equals what
is read from a file that states every setting of transformers' class."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.encoders.bert import Bert, DistilBert, Electra, MPNet, Roberta
from penstock.models.encoders.deberta import DebertaV2
from penstock.models.encoders.eurobert import EuroBert
from penstock.models.encoders.gte import Gte, JinaV3
from penstock.models.encoders.modernbert import ModernBert
from penstock.models.encoders.nomic_bert import NomicBert
from penstock.models.families import FAMILIES
from penstock.models.families.class_defaults import CLASS_DEFAULTS, with_class_defaults
from penstock.models.load import architecture_for_huggingface

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# The class alone makes no model: every file states these, too.
STATED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"num_attention_heads": 32},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
}
# Their sizes depend on each other, or on the number of layers.
OF_ONE_SIZE = {"gpt_neo", "mamba2", "zamba2", "nemotron_h", "lfm2", "lfm2_moe"}
# Decided elsewhere: end tokens by all files of a folder, a layer for drafts only by a file that counts it.
LEFT_OUT = {"eos_token_ids": (), "bos_token_id": None, "num_mtp_layers": 0, "checkpoint_dtype": None}
# Transformers reads InternLM 3 with its class of Llama, and files of several parts with nested settings.
MODEL_TYPES = [
    name
    for family in FAMILIES
    for name in family.huggingface_names
    if name in CONFIG_MAPPING
    and name not in ("internlm3", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4")
]
OUTER = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
         "gemma4_unified": "gemma4_unified_text", "llama4": "llama4_text"}  # fmt: skip


def understood(settings: dict[str, Any]) -> ArchitectureConfig:
    fields = Fields(json.loads(json.dumps(settings)), "config.json")
    family = architecture_for_huggingface(fields)
    config = family.config_from_huggingface(with_class_defaults(fields, family.name))
    return dataclasses.replace(config, **LEFT_OUT)


def stated_and_left_out(model_type: str, factor: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all settings of the class, with sizes that are so many times its own, and the sizes alone."""
    stated = STATED.get(model_type, {})
    own = AutoConfig.for_model(model_type, **stated)
    found = {size: getattr(own, size) for size in SIZES if isinstance(getattr(own, size, None), int)}
    if factor > 1:  # a head of another size, too
        found = {name: size * factor * (1 + (name == "hidden_size")) for name, size in found.items()}
    sizes = stated | {own.attribute_map.get(name, name): size for name, size in found.items()}
    whole = json.loads(AutoConfig.for_model(model_type, **sizes).to_json_string(use_diff=False))
    kind = {"model_type": model_type}
    return {**whole, **kind, "architectures": None}, {**sizes, **kind}


def cases() -> Iterator[tuple[str, int]]:
    for name in MODEL_TYPES:
        yield name, 1
        if name not in OF_ONE_SIZE:
            yield name, 2  # tells a number from one that follows from sizes


@pytest.mark.parametrize(("model_type", "factor"), list(cases()))
def test_what_a_file_leaves_out_is_what_its_class_has(model_type: str, factor: int) -> None:
    whole, sizes = stated_and_left_out(model_type, factor)
    assert understood(sizes) == understood(whole)


@pytest.mark.parametrize("model_type", OUTER)
def test_nested_settings_leave_out_the_same(model_type: str) -> None:
    whole, sizes = stated_and_left_out(OUTER[model_type], 2)
    assert understood({"model_type": model_type, "text_config": sizes}) == understood(whole)


@pytest.mark.parametrize(("model_type", "head_dim"), [("qwen3", 128), ("qwen3_moe", 32)])
def test_only_some_classes_have_a_head_size_of_their_own(model_type: str, head_dim: int) -> None:
    sizes = dict(zip(SIZES, (320, 256, 4, 8, 96), strict=True))
    assert understood({**sizes, "model_type": model_type, "num_key_value_heads": 4}).head_dim == head_dim


def test_a_null_is_no_default() -> None:
    _, sizes = stated_and_left_out("mistral", 1)
    assert set(understood(sizes).windows) == {4096}
    assert set(understood({**sizes, "sliding_window": None}).windows) == {None}


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_any_name_of_a_setting_wins_over_a_default(key: str) -> None:
    _, sizes = stated_and_left_out("qwen3_moe", 1)
    experts = understood({**sizes, key: 24}).experts
    assert experts is not None
    assert experts.count == 24


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_stated_rope_wins_over_a_default(key: str) -> None:
    _, sizes = stated_and_left_out("apertus", 1)
    assert understood(sizes).rope.scaling is not None
    rope = understood({**sizes, key: {"rope_type": "default", "rope_theta": 5000.0}}).rope
    assert (rope.theta, rope.scaling) == (5000.0, None)


def test_exceptions_for_single_layers_may_have_zeros_in_front() -> None:
    whole, sizes = stated_and_left_out("gemma4_text", 1)
    assert "05" in whole["per_layer_config"]
    assert understood(whole) == understood({**sizes, "per_layer_config": {"5": {"head_dim": 512}}})


ENCODER_TYPES = {
    "bert": Bert,
    "ernie": Bert,
    "electra": Electra,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "camembert": Roberta,
    "distilbert": DistilBert,
    "mpnet": MPNet,
    "deberta-v2": DebertaV2,
    "modernbert": ModernBert,
    "nomic_bert": NomicBert,
    "eurobert": EuroBert,
    "gte": Gte,
    "jina_embeddings_v3": JinaV3,
}


@pytest.mark.parametrize("model_type", ENCODER_TYPES)
def test_encoders_leave_out_the_same(model_type: str) -> None:
    encoder, own = ENCODER_TYPES[model_type], AutoConfig.for_model(model_type)
    whole = json.loads(own.to_json_string(use_diff=False))
    stated = (*SIZES, "hidden_dim", "bos_token_id", "eos_token_id")
    names = {own.attribute_map.get(name, name) for name in stated} & whole.keys()
    sizes = {name: whole[name] for name in names}
    assert encoder.read_config(Fields(sizes, "config.json")) == encoder.read_config(
        Fields(whole, "config.json")
    )


def test_defaults_are_of_families() -> None:
    assert {family.name for family in FAMILIES} >= CLASS_DEFAULTS.keys()
