"""Every family answers as transformers does, to the token: alone, batched, in chunks, from a cached prefix and
preempted; and gives the same logits on two ranks, from GGUF, and nearly the same when rounded to int8.

A token is right when transformers, given the prompt and the answer before the token, finds it most likely. So one
pass of transformers checks a whole answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import select_ops
from penstock.kvcache.cache import blocks_of_context
from penstock.models.alibi import alibi_slopes
from penstock.models.load import load_model, open_checkpoint
from penstock.models.quantization.folder import require_writable
from penstock.models.rope import pair_order
from tests.engine.tiny import request, run, teach_short_answers, tokens
from tests.models.adapters import EVERYTHING, write_adapter
from tests.models.checkpoints import Reference, make_reference
from tests.models.conftest import random_prompt
from tests.models.family_table import Shows
from tests.models.gguf_files import ARCHITECTURES, write_model
from tests.models.paged import PagedRunner
from tests.models.ranks import run_ranks
from tests.models.test_lora import lora_model
from tests.models.test_published import RENAMED
from tests.models.tiny_families import PROMPTS, TINY, Tiny, answers, family_engine, save_tiny

# The cache of `small` is too small for two answers that long. With states, answers must be longer for that.
LENGTH, LENGTH_WITH_STATES = 24, 32
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}
# Of the second, files cannot say that norms come before gates. Those of the third name Granite 3, those of
# the fourth have no windows, and those of the fifth are not converted.
UNREAD = ("falcon-alibi", "falcon_h1-norm", "granite-attention", "dots1-windows", "gpt_bigcode-heads")
QUANTIZED_MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoehybrid")


# Families without a tiny model in the list, which have tests of their own. They run here for the table in the docs.
OTHERS: dict[str, Callable[[Path], Reference]] = {
    "gemma3": partial(save_tiny, "gemma3", tiny=Tiny("gemma3_text", {"query_pre_attn_scalar": 16})),
    "qwen2": partial(make_reference, "qwen2"),
    "qwen3": partial(make_reference, "qwen3"),
    **RENAMED,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        others = OTHERS if metafunc.config.getoption("write_table") else ()
        metafunc.parametrize("family", [*TINY, *others], indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder) if request.param in TINY else OTHERS[request.param](folder)


def family_name(reference: Reference) -> str:
    return open_checkpoint(reference.folder).architecture.name


def is_mixture(reference: Reference) -> bool:
    return any(".experts." in name for name in reference.model.state_dict())


def test_the_same_tokens_however_they_are_computed(family: Reference, shows: Shows) -> None:
    shows(family_name(family), "folder")
    engine = family_engine(family.folder, 64)
    cache = engine.loop.scheduler.cache
    length, num_spare = (LENGTH, 1) if cache.states is None else (LENGTH_WITH_STATES, 2)
    alone = tokens(run(engine, [request("alone", PROMPTS[0], length // 3)])["alone"])
    together = answers(engine, "together", length)  # the first prompt is cached now
    for prompt, answer in zip(PROMPTS, together, strict=True):
        expected = family.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(dim=1)
        assert answer == expected.tolist()
    assert together[0][: len(alone)] == alone
    assert len({token for answer in together for token in answer}) > 5, "answers that repeat prove little"

    longest = max(map(len, PROMPTS)) + length
    num_blocks = blocks_of_context(longest, cache.block_size, cache.window_layout) + num_spare
    small = family_engine(family.folder, num_blocks, max_num_batched_tokens=13)
    teach_short_answers(small)
    assert answers(small, "preempted", length) == together
    if cache.windows is None:  # windows give blocks back: requests may fit after all
        assert small.loop.stats().num_preemptions > 0, "the cache was meant to be too small"


def test_two_ranks_give_what_one_gives(family: Reference, shows: Shows) -> None:
    shows(family_name(family), "TP")
    ops = TorchOps()
    made = run_ranks(family.folder, ops, 2, lambda runner: runner.prompt_logits(PROMPTS[0], 17))
    torch.testing.assert_close(made, family.logits(PROMPTS[0]), **TOLERANCE)


def test_rounded_weights_stay_close(family: Reference, shows: Shows) -> None:
    shows(family_name(family), "int8")
    ops = select_ops("cpu", torch.float32)
    runner = PagedRunner(load_model(family.folder, ops, quantization="int8"), ops)
    similarity = torch.nn.functional.cosine_similarity(
        runner.prompt_logits(PROMPTS[0]), family.logits(PROMPTS[0]), dim=1
    )
    assert similarity.median() > 0.99
    # A token near a tie between experts may take another one.
    assert is_mixture(family) or similarity.min() > 0.9


def test_an_adapter_gives_the_logits_of_the_merged_model(
    family: Reference, tmp_path: Path, shows: Shows, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(family.folder)
    shows(checkpoint.architecture.name, "LoRA")
    is_usual = checkpoint.architecture.layout(checkpoint.config).is_usual
    writes_table = request.config.getoption("write_table")
    if is_usual and family.name not in ("gemma3n", "gemma4") and not writes_table:
        pytest.skip("adapters of families with Llama's matrices have a test of their own")
    if family.name in ("internlm2", "exaone", "deepseek"):
        pytest.skip("PEFT would need the makers' code")
    # Experts have no adapters, and neither have matrices that are absorbed into queries and values.
    is_limited = is_mixture(family) or any("kv_b_proj" in name for name in family.model.state_dict())
    targets: Any = r".*\.(q|k|v|o|q_a|q_b)_proj|.*kv_a_proj_with_mqa" if is_limited else "all-linear"
    if "mamba" in str(family.model.config.to_dict()):  # PEFT does not change the outputs of Mamba's layers
        targets = (*EVERYTHING, "in_proj")
    if family.name == "gemma3n":  # nor are there adapters of the streams
        targets = EVERYTHING
    if family.name.startswith("zamba"):  # nor what several layers share
        targets = ("in_proj",)
    merged = write_adapter(family, tmp_path, seed=1, targets=targets)
    runner = lora_model(family, TorchOps(), [merged])
    runner.digests = [merged.name]
    expected = merged.logits(PROMPTS[0])
    assert not torch.allclose(expected, family.logits(PROMPTS[0]), atol=0.1)
    torch.testing.assert_close(runner.prompt_logits(PROMPTS[0]), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_gives_the_logits_of_the_folder(
    family: Reference, kind: str, tmp_path: Path, shows: Shows
) -> None:
    if family.name in RENAMED:
        pytest.skip("test_gguf_weights.py has them")
    shows(family_name(family), "GGUF")
    if family.model.config.model_type not in ARCHITECTURES or family.name in UNREAD:
        pytest.skip("llama.cpp does not know this family, or stores it in a form that is not read")
    if kind != "F32" and family.model.config.model_type not in QUANTIZED_MIXTURES:
        pytest.skip("one mixture of each form of stacked experts is enough")
    path, ops = tmp_path / "model.gguf", TorchOps()
    write_model(path, family, GGMLQuantizationType[kind])
    made = PagedRunner(load_model(path, ops), ops).prompt_logits(PROMPTS[0])
    expected = family.logits(PROMPTS[0])
    if kind == "F32":
        torch.testing.assert_close(made, expected, **TOLERANCE)
    else:
        # A token near a tie between experts may take the other one.
        similarity = torch.nn.functional.cosine_similarity(made, expected, dim=1)
        assert (similarity > 0.98).float().mean() > 0.8


def test_quantized_matrices_that_are_stored_as_one_are_cut(tmp_path: Path) -> None:
    """Of Phi 3, whose heads are also rotated in part, on one and on two ranks."""
    reference, path, ops = save_tiny("phi3", tmp_path / "folder"), tmp_path / "model.gguf", TorchOps()
    write_model(path, reference, GGMLQuantizationType.Q8_0)
    one = PagedRunner(load_model(path, ops), ops).prompt_logits(PROMPTS[0])
    expected = reference.logits(PROMPTS[0])
    assert torch.nn.functional.cosine_similarity(one, expected, dim=1).min() > 0.98
    two = run_ranks(path, ops, 2, lambda runner: runner.prompt_logits(PROMPTS[0]))
    torch.testing.assert_close(two, one, **TOLERANCE)


def test_longrope_takes_the_factors_of_the_context_it_was_loaded_for(tmp_path: Path) -> None:
    reference, ops = save_tiny("phi3-longrope", tmp_path), TorchOps()
    model = load_model(tmp_path, ops, max_model_len=32)
    prompt = random_prompt(30, seed=9)
    made = PagedRunner(model, ops).prompt_logits(prompt)
    torch.testing.assert_close(made, reference.logits(prompt), **TOLERANCE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(prompt), made)


def test_matrices_in_another_form_cannot_be_written_quantized(tmp_path: Path) -> None:
    save_tiny("phi3", tmp_path)
    with pytest.raises(ModelLoadError, match="a model of kind phi3, whose matrices"):
        require_writable(open_checkpoint(tmp_path))


def test_latents_with_biases_and_queries_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**TINY["deepseek_v2"].changes, "attention_bias": True}
    monkeypatch.setitem(TINY, "biased", Tiny("deepseek_v2", changes))
    reference, ops = save_tiny("biased", tmp_path), TorchOps()
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)


def test_short_contexts_need_no_indexer(tmp_path: Path) -> None:
    reference, prompt = save_tiny("deepseek_v32", tmp_path), PROMPTS[0][:16]
    for length, width in ((16, 40), (17, 52)):
        model = load_model(tmp_path, TorchOps(), max_model_len=length)
        assert (model.head_dim, model.records_graphs) == (width, length == 16)
        made = PagedRunner(model, TorchOps()).prompt_logits(prompt)
        torch.testing.assert_close(made, reference.logits(prompt), **TOLERANCE)
    with pytest.raises(ConfigError, match="cannot hold the keys of this model's indexer"):
        load_model(tmp_path, TorchOps(kv_dtype=torch.int8))


def test_schedules_of_shared_indexers(tmp_path: Path) -> None:
    save_tiny("glm_moe_dsa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("indexer_types")

    def shared(settings: dict[str, Any]) -> set[int]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
        latent = open_checkpoint(tmp_path).config.latent
        assert latent is not None
        assert latent.index is not None
        return set(latent.index.shared_layers)

    assert shared({}) == set()
    assert shared({"index_topk_pattern": "FSSF"}) == {1, 2}
    assert shared({"index_topk_freq": 2}) == {2}
    assert shared({"index_topk_freq": 3, "index_skip_topk_offset": 1}) == {1, 2}
    with pytest.raises(ModelLoadError, match="unknown kind 'X'"):
        shared({"index_topk_pattern": "FSXF"})


def test_heads_that_are_too_large_for_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 has heads of 512, which torch attends with on a CPU."""
    changes = {**TINY["gemma4"].changes, "global_head_dim": 512}
    monkeypatch.setitem(TINY, "large", Tiny("gemma4_text", changes))
    reference = save_tiny("large", tmp_path)
    (answer, _) = answers(family_engine(tmp_path, 64), "large", 16)
    expected = reference.logits(PROMPTS[0] + answer)[len(PROMPTS[0]) - 1 : -1].argmax(dim=1)
    assert answer == expected.tolist()


def test_the_text_part_of_gemma3n_is_read_alone(tmp_path: Path) -> None:
    reference, ops = save_tiny("gemma3n", tmp_path), TorchOps()
    tensors = load_file(tmp_path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    settings = {**outer, "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)


def test_chunks_and_rope_of_llama4_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["chunked_attention", "full_attention"] * 2
    monkeypatch.setitem(TINY, "mixed", Tiny("llama4_text", {**TINY["llama4"].changes, "layer_types": kinds}))
    save_tiny("mixed", tmp_path)
    with pytest.raises(ModelLoadError, match="attend in chunks without rope"):
        load_model(tmp_path, TorchOps())


def test_older_names_and_patterns_of_nemotron_h(tmp_path: Path) -> None:
    reference, ops = save_tiny("nemotron_h", tmp_path), TorchOps()
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "backbone.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layers_block_type", "layer_types"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "hybrid_override_pattern": "M-*-M"}))
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)
    (tmp_path / "config.json").write_text(json.dumps({**config, "hybrid_override_pattern": "MX*-M"}))
    with pytest.raises(ModelLoadError, match="unknown kind"):
        load_model(tmp_path, ops)


def test_kinds_of_mlps_that_do_not_match_the_layers_are_refused(tmp_path: Path) -> None:
    save_tiny("glm4_moe_lite", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for kinds, said in ((["dense"], "mlp_layer_types that do not match"), (["dense", "wide"] * 2, "'wide'")):
        changed = {**config, "mlp_layer_types": kinds, "num_hidden_layers": 4}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match=said):
            open_checkpoint(tmp_path)


def test_the_makers_settings_of_kimi_linear(tmp_path: Path) -> None:
    reference, ops = save_tiny("kimi_linear", tmp_path), TorchOps()
    config = json.loads((tmp_path / "config.json").read_text())
    for name in (
        "layer_types",
        "mlp_layer_types",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    ):
        config.pop(name)
    kinds = {"kda_layers": [1, 3, 4], "full_attn_layers": [2]}
    config["linear_attn_config"] = {**kinds, "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": 1}))
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)
    config["linear_attn_config"]["full_attn_layers"] = [2, 3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="does not list each of the 4 layers once"):
        load_model(tmp_path, ops)
    (tmp_path / "config.json").write_text(json.dumps({**config, "mla_use_nope": False}))
    with pytest.raises(ModelLoadError, match="asks for rope"):
        load_model(tmp_path, ops)


def test_the_makers_settings_of_mimo_v2(tmp_path: Path) -> None:
    reference, ops = save_tiny("mimo_v2_flash", tmp_path), TorchOps()
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"):
        config.pop(name)
    makers = {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "rope_theta": 50000,
        "swa_rope_theta": 1000,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-5,
        "sliding_window": 7,
        "sliding_window_size": 7,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 10,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **makers}))
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)
    for key, value, said in (
        ("swa_head_dim", 32, "has swa_head_dim 32"),
        ("add_full_attention_sink_bias", True, "sinks in other layers"),
        ("n_shared_experts", 1, "shared experts"),
        ("hybrid_layer_pattern", [2], "zeros and ones"),
        ("v_head_dim", 24, "cannot share a cache"),
        ("swa_num_key_value_heads", 1, "cannot share a cache"),
    ):
        changed = {**config, **makers, key: value}
        changed["swa_v_head_dim"] = changed["v_head_dim"]
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match=said):
            open_checkpoint(tmp_path)


def test_the_makers_settings_of_minimax(tmp_path: Path) -> None:
    """The makers rotate a part of each head. Transformers rotates whole heads: here with the same pairs of numbers,
    which lie half a head apart, and with angles of 0 for the others."""
    reference, ops = save_tiny("minimax", tmp_path), TorchOps()
    rotary = reference.model.model.rotary_emb
    turned = rotary.compute_default_rope_parameters(Tiny("minimax", {"head_dim": 8}).config())[0]
    rotary.inv_freq.zero_()[:4] = turned
    tensors = load_file(tmp_path / "model.safetensors")
    back = pair_order(16, 8, interleaved=False).argsort()
    for name in [each for each in tensors if each.endswith(("q_proj.weight", "k_proj.weight"))]:
        tensors[name] = tensors[name].view(-1, 16, 64)[:, back].reshape(-1, 64).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    for name, own in {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}.items():
        for greek in ("alpha", "beta"):
            config[f"layernorm_{own}_{greek}"] = config.pop(f"{name}_{greek}_factor")
    config |= {"architectures": ["MiniMaxM1ForCausalLM"], "attn_type_list": kinds, "rotary_dim": 8}
    config |= {"postnorm": True, "shared_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(PROMPTS[0])
    torch.testing.assert_close(made, reference.logits(PROMPTS[0]), **TOLERANCE)
    for changes, said in (
        ({"postnorm": False}, "has no postnorm"),
        ({"shared_intermediate_size": 96}, "a shared expert"),
        ({"attn_type_list": [0, 1, 0, 2]}, "other numbers than 0 and 1"),
        ({"attn_type_list": [0, 1]}, "do not match its 4 layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelLoadError, match=said):
            load_model(tmp_path, ops)


@pytest.mark.parametrize("num_heads", [1, 8, 12, 71])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    expected = _get_alibi_slopes(num_heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases_of_far_positions_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    """A 16-bit type alone could not hold positions beyond 256."""
    reference, ops, prompt = save_tiny("bloom", tmp_path), TorchOps("cpu", dtype), random_prompt(700, seed=9)
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(prompt, 300)
    expected = reference.logits(prompt)
    if dtype == torch.float32:
        torch.testing.assert_close(made, expected, **TOLERANCE)
    else:
        assert torch.nn.functional.cosine_similarity(made, expected, dim=1).min() > 0.99


def test_a_cache_of_8_bits_is_refused_with_biases(tmp_path: Path) -> None:
    save_tiny("bloom", tmp_path)
    with pytest.raises(ConfigError, match="8 bits cannot hold"):
        load_model(tmp_path, TorchOps(kv_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, "attention_types that do not fit"),
        ("gpt_neo", {"attention_types": [[["global", "sparse"], 2]]}, "attention_types that do not fit"),
        ("gptj", {"rotary_dim": None}, "has no rotary_dim"),
        ("codegen", {"n_head": 2}, "needs a multiple of 4"),
        ("zamba", {"attention_hidden_size": 96}, "attention_hidden_size other than"),
        ("zamba", {"n_mamba_heads": 3}, "128 channels for 3 heads"),
        ("recurrent_gemma", {"block_types": ["recurrent", "mamba"]}, "block_types other than"),
        ("recurrent_gemma", {"lru_width": 98}, "must come out even"),
        ("zamba2", {"layers_block_type": ["mamba"] * 5}, "lists no hybrid layer"),
        ("zamba2", {"num_key_value_heads": 2}, "as many key-value heads as heads"),
    ],
)
def test_settings_that_contradict_each_other(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ModelLoadError, match=said):
        load_model(tmp_path, TorchOps())


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_checkpoint_without_a_head(name: str, tmp_path: Path) -> None:
    reference, ops = save_tiny(name, tmp_path / "whole"), TorchOps()
    reference.model.model.save_pretrained(tmp_path / "bare")
    made = PagedRunner(load_model(tmp_path / "bare", ops), ops).prompt_logits(PROMPTS[0])
    with torch.inference_mode():
        hidden = reference.model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0]
        expected = hidden @ reference.model.model.embed_tokens.weight.T
    torch.testing.assert_close(made, expected, **TOLERANCE)
