"""Settings as they are spelt in the wild, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig, RopeScaling
from penstock.models.families import FAMILIES
from penstock.models.families.class_defaults import with_class_defaults
from penstock.models.load import architecture_for_huggingface, open_checkpoint

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def read(**changes: Any) -> ArchitectureConfig:
    fields = Fields({**BASE, **changes}, "config.json")
    family = architecture_for_huggingface(fields)
    return family.config_from_huggingface(with_class_defaults(fields, family.name))


def test_defaults_of_an_old_llama() -> None:
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rope == RopeConfig(10000.0)
    assert config.windows == (None,) * 4
    assert config.attention_scale == 0.25
    assert not config.tie_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_in_the_old_style(key: str) -> None:
    config = read(rope_theta=500.0, rope_scaling={key: "linear", "factor": 4.0})
    assert config.rope == RopeConfig(500.0, RopeScaling(kind="linear", factor=4.0))


def test_rope_parameters_in_the_new_style() -> None:
    config = read(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    )
    assert config.rope.theta == 500000.0
    assert config.rope.scaling is not None
    assert (config.rope.scaling.kind, config.rope.scaling.original_max_positions) == ("llama3", 8192)


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=scaling).max_positions == 2048


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_in_both_styles(key: str) -> None:
    assert read(**{key: "bfloat16"}).checkpoint_dtype == "bfloat16"


def test_several_ends() -> None:
    assert read(eos_token_id=[5, 7]).eos_token_ids == (5, 7)


def test_by_model_type_when_no_class_is_named() -> None:
    assert read(architectures=None, model_type="qwen2", num_key_value_heads=2).architecture == "qwen2"


def test_mistral_without_a_window() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert read(**mistral, sliding_window=None).windows == (None,) * 4
    assert read(**mistral, sliding_window=9).windows == (9,) * 4


def test_qwen_windows_only_when_switched_on() -> None:
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    qwen |= {"sliding_window": 9, "max_window_layers": 3}
    assert read(**qwen).windows == (None,) * 4
    assert read(**qwen, use_sliding_window=True).windows == (None, None, None, 9)


def test_gemma3_as_first_published() -> None:
    """A multimodal config.json of the first release: most settings left out, rope in the old style."""
    fields = Fields(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        "config.json",
    )
    family = architecture_for_huggingface(fields)
    config = family.config_from_huggingface(with_class_defaults(fields, family.name))
    assert config.head_dim == 256
    assert config.attention_scale == 1 / 16
    assert config.rope == RopeConfig(1_000_000.0, RopeScaling(kind="linear", factor=8.0))
    assert config.local_rope == RopeConfig(10_000.0)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.tie_embeddings
    assert config.eos_token_ids == (1, 106)
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["OtherForCausalLM"]},
            "OtherForCausalLM is not known; known are .*llama, .*qwen3",
        ),
        (
            {"architectures": ["HYV4ForCausalLM"]},
            "needs several residual streams, and attention sinks beside latents",
        ),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "needs an encoder of sound, which"),
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            "needs an encoder of texts, and attention to what",
        ),
        ({"architectures": ["MarianMTModel"]}, "needs an encoder of texts, and attention to what"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3 drafts for another model"),
        ({"architectures": None}, "neither architectures nor a model_type"),
        ({"hidden_size": None}, r"config\.json has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size = '64', which is not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers = "),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be divided by 3"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope scaling of kind 'spiral'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "no short_factor"),
        ({"rope_scaling": {"rope_type": "su", "short_factor": [1, "a"]}}, "not a list of positive numbers"),
        ({"rope_scaling": [1]}, "rope_scaling that is not an object"),
        ({"partial_rotary_factor": 0.33}, "rotates 5 of the 16 numbers of a head"),
        ({"partial_rotary_factor": 2.0}, "rotates 32 of the 16 numbers of a head"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, which is not true or false"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**changes)


def test_attention_in_both_directions_is_not_ignored() -> None:
    with pytest.raises(ModelLoadError, match="in both directions"):
        read(architectures=["Gemma3ForCausalLM"], sliding_window=8, use_bidirectional_attention=True)


def test_an_unknown_architecture_names_the_flag_that_may_help() -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(architectures=["OtherForCausalLM"])
    assert "--model-implementation transformers" in str(caught.value.hint)


def test_no_two_architectures_share_a_name() -> None:
    huggingface_names = [name for kind in FAMILIES for name in kind.huggingface_names]
    assert len(huggingface_names) == len(set(huggingface_names))
    gguf_names = [name for kind in FAMILIES for name in kind.gguf_names]
    assert len(gguf_names) == len(set(gguf_names))


def test_experts_of_qwen3_vl_always_normalize_their_weights(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3VLMoeConfig(architectures=["Qwen3VLMoeForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    experts = open_checkpoint(tmp_path).config.experts
    assert experts is not None
    assert experts.normalizes
