"""Architectures that are not native run by the code of transformers, over paged attention, and give its answers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.adapted import AdaptedProduct, Delta, adapters_on
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, open_any_checkpoint
from penstock.models.model import StagedModel, staged
from penstock.models.sharding import Shard
from penstock.models.transformers_model import GivenStates, PackedNorm, TransformersModel
from tests.kernels.adapted_case import copy_into
from tests.models.checkpoints import SMALL, VOCAB_SIZE, Reference, save_random
from tests.models.conftest import available_ops, random_prompt
from tests.models.paged import BLOCK_SIZE, PagedRunner, Sequence
from tests.models.quantized_checkpoints import LAYOUTS, quantize_folder
from tests.models.tiny_families import PROMPTS, TINY, Tiny, answers, family_engine, save_tiny

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
PLAIN = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}


def _model(config: type[Any], **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config(**settings))


# Learned positions, partial rotary, biases, experts, and two attentions per layer with values of double size.
MODELS: dict[str, Callable[[], Any]] = {
    "opt": lambda: _model(transformers.OPTConfig, **PLAIN, ffn_dim=96, word_embed_proj_dim=32),
    "biogpt": lambda: _model(transformers.BioGptConfig, **PLAIN),
    "persimmon": lambda: _model(transformers.PersimmonConfig, **PLAIN),
    "gpt_neox": lambda: _model(transformers.GPTNeoXConfig, **PLAIN),
    "stablelm": lambda: _model(transformers.StableLmConfig, **SMALL, qk_layernorm=True),
    "olmoe": lambda: _model(transformers.OlmoeConfig, **SMALL, **EXPERTS),
    "diffllama": lambda: _model(transformers.DiffLlamaConfig, **SMALL),
    "llama": lambda: _model(transformers.LlamaConfig, **SMALL),
    "gemma4": TINY["gemma4"].make,  # with heads of two sizes
}


@pytest.fixture(scope="module", params=list(MODELS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.manual_seed(0)
    return save_random(request.param, MODELS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runner(reference: Reference) -> PagedRunner:
    ops = available_ops(torch.float32)[-1]
    return PagedRunner(load_model(reference.folder, ops, implementation="transformers"), ops)


def test_the_same_greedy_tokens(reference: Reference, runner: PagedRunner) -> None:
    prompt = random_prompt(21, seed=5)
    assert runner.greedy(prompt, 32) == reference.greedy(prompt, 32)


def test_chunks_a_cached_prefix_and_a_batch(reference: Reference, runner: PagedRunner) -> None:
    prefix, rest = random_prompt(2 * BLOCK_SIZE, seed=2), random_prompt(20, seed=4)
    first = Sequence()
    runner.step([(first, prefix + random_prompt(5, seed=3))])
    second = Sequence(block_ids=first.block_ids[:2], num_computed=len(prefix))
    other, other_text = Sequence(), random_prompt(17, seed=6)
    runner.step([(other, other_text[:6])])
    logits, other_logits = runner.step([(second, rest[:7]), (other, other_text[6:])])
    (last,) = runner.step([(second, rest[7:])])
    expected = reference.logits(prefix + rest)[len(prefix) :]
    torch.testing.assert_close(torch.cat([logits, last]), expected, **TOLERANCE)
    torch.testing.assert_close(other_logits, reference.logits(other_text)[6:], **TOLERANCE)


def test_the_model_describes_itself(reference: Reference, runner: PagedRunner) -> None:
    model = runner.model
    assert isinstance(model, TransformersModel)
    assert model.implementation == "transformers"
    assert model.num_parameters == reference.model.num_parameters()
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.weight_bytes >= 4 * model.num_parameters
    assert not isinstance(model, StagedModel)
    with pytest.raises(ConfigError, match="cannot be taken apart"):
        staged(model)


def test_norms_that_a_backend_computes_in_one_step(reference: Reference, runner: PagedRunner) -> None:
    """RMS norms, also of single heads and with 1 added to their weights, and no layer norms."""
    model = runner.model
    assert isinstance(model, TransformersModel)
    packed = [each for each in model.decoder.modules() if isinstance(each, PackedNorm)]
    assert bool(packed) == (reference.name in ("llama", "olmoe", "diffllama", "gemma4"))


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return save_random("opt", MODELS["opt"](), tmp_path_factory.mktemp("opt"))


def test_a_text_model_within_a_larger_model(tmp_path: Path) -> None:
    """Of a model that also sees, and that is not native."""
    text = {**PLAIN, "model_type": "persimmon", "tie_word_embeddings": False}
    outer = {**PLAIN, "patch_size": 4, "num_channels": 3, "tie_word_embeddings": False}
    config = transformers.FuyuConfig(text_config=text, **outer)
    reference = save_random("fuyu", transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    ops, prompt = TorchOps(), random_prompt(21, seed=5)
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(made, reference.logits(prompt), **TOLERANCE)


def test_a_model_of_texts_and_images_gets_texts_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tower, which nothing uses, has no weights in memory. Its experts are stored under other names."""
    text = {**SMALL, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    tower = {name: PLAIN[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    tower |= {"num_hidden_layers": 1, "image_size": 32, "patch_size": 8, "model_type": "idefics3_vision"}
    config = transformers.AriaConfig(text_config=text, vision_config=tower)
    made = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    reference = save_random("aria", made, tmp_path)
    ops, prompt = TorchOps(), random_prompt(21, seed=5)
    model = load_model(tmp_path, ops)
    torch.testing.assert_close(
        PagedRunner(model, ops).prompt_logits(prompt), reference.logits(prompt), **TOLERANCE
    )
    assert "AriaForConditionalGeneration takes text only" in caplog.text
    parts = made.model.language_model, made.lm_head
    assert model.num_parameters == sum(each.numel() for part in parts for each in part.parameters())


def test_masks_that_belong_to_one_text_are_refused(tmp_path: Path) -> None:
    text = {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    text |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
    config = transformers.Gemma4UnifiedConfig(text_config=text, tie_word_embeddings=False)
    reference = save_random("unified", transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    ops, prompt = TorchOps(), random_prompt(21, seed=5)
    with pytest.raises(ModelLoadError, match="masks hold for the tokens of one text"):
        load_model(tmp_path, ops, implementation="transformers")
    # The text model within is native.
    made = PagedRunner(load_model(tmp_path, ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(made, reference.logits(prompt), **TOLERANCE)


def test_weights_are_rounded_when_asked(opt: Reference) -> None:
    ops = TorchOps()
    plain = load_model(opt.folder, ops)
    rounded = load_model(opt.folder, ops, quantization="int8")
    logits = [PagedRunner(model, ops).prompt_logits(random_prompt(20, seed=1)) for model in (plain, rounded)]
    similarity = torch.nn.functional.cosine_similarity(*logits, dim=1)
    assert 0.999 < similarity.min() < 1 - 1e-7


def test_an_adapter_changes_a_product(opt: Reference) -> None:
    """A step with an adapter runs the same modules by other operations."""
    ops = TorchOps()
    model = load_model(opt.folder, ops)
    names = [product.names for product in model.products]
    index = names.index(("model.decoder.layers.1.fc1",))
    products = [AdaptedProduct(product.packed, product.rows, product.columns) for product in model.products]
    adapters = adapters_on(ops, products, 1)
    left, right = torch.randn(4, 64), torch.randn(96, 4)
    adapters.load(0, adapters.pack({index: Delta((96,), 64, ((left, right),))}))
    adapters.use(np.zeros(20, dtype=np.int32), copy_into)
    prompt = random_prompt(20, seed=1)
    got = PagedRunner(model.with_ops(adapters.around(ops)), ops).prompt_logits(prompt)
    layer = opt.model.model.decoder.layers[1].fc1
    layer.weight.data += right @ left
    expected = opt.logits(prompt)
    layer.weight.data -= right @ left
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_experts_are_merged(layout: str, tmp_path: Path) -> None:
    """Of a mixture that is not native, whose experts transformers puts into one tensor."""
    tiny = Tiny(
        "dots1",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    )
    made = save_tiny("dots1", tmp_path, tiny)
    dense = quantize_folder(tmp_path, LAYOUTS[layout])
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({name: each.contiguous() for name, each in dense.items()}, plain / "model.safetensors")
    made.model.config.save_pretrained(plain)
    ops, prompt = TorchOps(), random_prompt(20, seed=1)
    got, expected = (
        PagedRunner(load_model(folder, ops), ops).prompt_logits(prompt) for folder in (tmp_path, plain)
    )
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("layout", ["GPTQ act-order", "compressed int4", "float8 in blocks"])
def test_quantized_checkpoints_stay_packed(layout: str, llama: Reference, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.folder, tmp_path / "copy"))
    quantize_folder(folder, LAYOUTS[layout])
    ops, prompt = available_ops(torch.float32)[-1], random_prompt(20, seed=1)
    models = [load_model(folder, ops, implementation=how) for how in ("native", "transformers")]
    native, other = (PagedRunner(model, ops).prompt_logits(prompt) for model in models)
    torch.testing.assert_close(other, native, atol=1e-3, rtol=1e-3)
    assert models[0].weight_bytes == pytest.approx(models[1].weight_bytes, rel=0.1)


def test_random_weights_need_no_files(opt: Reference, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((opt.folder / "config.json").read_bytes())
    ops = TorchOps()
    models = [load_model(tmp_path, ops, load_format="random", seed=3) for _ in range(2)]
    first, second = (PagedRunner(model, ops).prompt_logits([5, 6, 7]) for model in models)
    assert torch.equal(first, second)


def test_bfloat16_stays_close(opt: Reference) -> None:
    ops = TorchOps("cpu", torch.bfloat16)
    prompt = random_prompt(30, seed=6)
    logits = PagedRunner(load_model(opt.folder, ops), ops).prompt_logits(prompt)
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, opt.logits(prompt), dim=1).min() > 0.99


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention by distance": (
        lambda: _model(transformers.BloomConfig, vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
        "attention of its own",
    ),
    "convolutions": (
        lambda: _model(transformers.Lfm2Config, **SMALL, layer_types=["conv", "full_attention"]),
        "carry more from token to token",
    ),
    "states alone": (
        lambda: _model(
            transformers.MambaConfig, vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=4
        ),
        "(never calls the attention|attention of its own)",
    ),
}


class _Picky(torch.nn.Module):
    """Masks of its own: a token sees the other tokens of its choice."""

    def __init__(self, inner: Any, change: Callable[[Any], Any], more: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.change, self.more = inner, change, more

    def forward(self, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        return self.inner(*args, attention_mask=self.change(attention_mask), **self.more, **options)


@pytest.mark.parametrize(
    ("change", "more", "reason"),
    [
        (lambda mask: mask.clone() if mask is not None else None, {}, "a mask of its own making"),
        (
            lambda mask: mask[:, 0],
            {},
            r"fails in a step without an attention mask \(TypeError: 'NoneType' object",
        ),
        # As MiniMax M3 does in layers with sparse attention.
        (lambda mask: mask, {"block_indices": torch.zeros(1)}, "gives attention block_indices, which"),
    ],
)
def test_masks_that_a_model_makes_are_refused(
    change: Callable[[Any], Any],
    more: dict[str, Any],
    reason: str,
    llama: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a mask may leave out tokens of a long text only, which the probe's short texts would not show."""
    build = transformers.models.llama.modeling_llama.LlamaDecoderLayer.__init__

    def build_picky(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        self.self_attn = _Picky(self.self_attn, change, more)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaDecoderLayer, "__init__", build_picky)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(llama.folder, TorchOps(), implementation="transformers", load_format="random")


def test_a_model_with_a_cache_of_its_own_is_refused(opt: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of Unlimited OCR, which has a window for answers alone, longer than the probe's texts."""
    module = transformers.models.opt.modeling_opt
    own = type("OwnCache", (transformers.DynamicCache,), {"__module__": module.__name__})
    monkeypatch.setattr(module, "OwnCache", own, raising=False)
    with pytest.raises(ModelLoadError, match="OPTForCausalLM with a cache of its own kind"):
        load_model(opt.folder, TorchOps(), implementation="transformers")


def test_heads_find_what_they_ask_the_decoder_for() -> None:
    """Chameleon's asks for the ids of images."""
    assert GivenStates(torch.nn.Linear(2, 3)).out_features == 3


def test_a_refusal_says_what_is_missing_and_what_is_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _model(transformers.RwkvConfig, vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2)
    save_random("rwkv", model, tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"^RwkvForCausalLM needs the recurrent layers of RWKV"
    ) as caught:
        load_model(tmp_path, TorchOps())
    assert caught.value.message.count(".") == 1, "one sentence"
    assert "--external" in (caught.value.hint or "")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=r"OtherForCausalLM\. .* is not native, either\.$"):
        load_model(tmp_path, TorchOps())


@pytest.mark.parametrize("kind", list(REFUSED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_ties_between_tokens_are_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    torch.manual_seed(0)
    save_random(kind, make(), tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(tmp_path, TorchOps("cpu", dtype), implementation="transformers")


def test_a_window_longer_than_the_probe_is_seen(tmp_path: Path) -> None:
    reference = save_random(
        "mistral", _model(transformers.MistralConfig, **SMALL, sliding_window=40), tmp_path
    )
    ops = TorchOps()
    model = load_model(tmp_path, ops, implementation="transformers")
    assert model.config.windows == (40, 40)
    prompt = random_prompt(70, seed=8)
    torch.testing.assert_close(
        PagedRunner(model, ops).prompt_logits(prompt, 16), reference.logits(prompt), **TOLERANCE
    )


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_windows_that_give_blocks_back(name: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path)
    engine = family_engine(tmp_path, 64, {"model_implementation": "transformers"}, max_num_batched_tokens=13)
    assert engine.loop.scheduler.cache.windows is not None
    for prompt, answer in zip(PROMPTS, answers(engine, "together", 32), strict=True):
        expected = reference.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(dim=1)
        assert (len(answer), answer) == (32, expected.tolist())


def test_attention_in_chunks_works_within_one_chunk(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        **EXPERTS,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    }
    model = _model(transformers.Llama4TextConfig, **settings, attention_chunk_size=64)
    reference, ops = save_random("llama4", model, tmp_path), TorchOps()
    with pytest.raises(ModelLoadError, match="only if --max-model-len is at most one chunk"):
        load_model(tmp_path, ops, implementation="transformers")
    short = load_model(tmp_path, ops, implementation="transformers", max_model_len=64)
    prompt = random_prompt(40, seed=8)
    torch.testing.assert_close(
        PagedRunner(short, ops).prompt_logits(prompt, 16), reference.logits(prompt), **TOLERANCE
    )


def test_angles_that_depend_on_the_batch_are_limited(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    save_random("llama", _model(transformers.LlamaConfig, **SMALL, rope_parameters=rope), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="at most 128 tokens"):
        load_model(tmp_path, TorchOps(), implementation="transformers")
    load_model(tmp_path, TorchOps(), implementation="transformers", max_model_len=128)


def test_ranks_are_refused(opt: Reference) -> None:
    with pytest.raises(ConfigError, match="sharded over ranks"):
        load_model(opt.folder, TorchOps(), shard=Shard(tensor_size=2))


def _write(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_code_that_comes_with_a_model_needs_the_flag(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    folder = _write(tmp_path, architectures=["MineForCausalLM"], model_type="mine", auto_map=code)
    with pytest.raises(ModelLoadError, match="Python code of its own") as caught:
        open_any_checkpoint(folder)
    assert "--trust-remote-code" in str(caught.value.hint)
    (folder / "configuration_mine.py").write_text(
        "from transformers import OPTConfig\nclass MineConfig(OPTConfig):\n    model_type = 'mine'\n"
    )
    checkpoint = open_any_checkpoint(folder, trust_remote_code=True)
    assert checkpoint.config.architecture == "mine"


def test_a_pass_that_leaves_attention_out_is_an_error(
    opt: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(opt.folder, TorchOps(), implementation="transformers")
    assert isinstance(model, TransformersModel)
    decoder = model.decoder.decoder
    monkeypatch.setattr(decoder, "layers", decoder.layers[:-1])
    with pytest.raises(ModelLoadError, match="same number of times"):
        PagedRunner(model, TorchOps()).prompt_logits([5, 6, 7])


def test_what_is_missing_is_named(tmp_path: Path, opt: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write(tmp_path, architectures=["NoSuchForCausalLM"], model_type="no_such")
    with pytest.raises(ModelLoadError, match=r"no class NoSuchForCausalLM.*is not native, either"):
        open_any_checkpoint(folder)
    with pytest.raises(ModelLoadError, match=r"model type 'no_such'.*is not native, either"):
        open_any_checkpoint(_write(tmp_path, model_type="no_such"))
    folder = _write(tmp_path, architectures=["T5ForConditionalGeneration"], model_type="t5")
    with pytest.raises(ModelLoadError, match="an encoder of texts, and attention to what the encoder makes"):
        open_any_checkpoint(folder)
    # A known type does not make a stranger's architecture a Llama.
    with pytest.raises(ModelLoadError, match="no class NoSuchForCausalLM"):
        open_any_checkpoint(_write(tmp_path, architectures=["NoSuchForCausalLM"], model_type="llama"))
    with pytest.raises(ModelLoadError, match="word_embed_proj_dim as OPT 350M has"):
        open_any_checkpoint(opt.folder, "native")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelLoadError, match=r"transformers.*not installed") as caught:
        open_any_checkpoint(opt.folder)
    assert "penstock-llm[transformers]" in str(caught.value.hint)


def test_a_checkpoint_without_a_tensor(opt: Reference, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(opt.folder / "model.safetensors")
    del tensors["model.decoder.layers.1.fc1.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((opt.folder / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"layers\.1\.fc1\.bias"):
        load_model(tmp_path, TorchOps())
