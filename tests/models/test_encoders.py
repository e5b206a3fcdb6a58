"""Encoders against transformers' own, with random weights; and the real MiniLM where it can be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ErnieConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    Gemma3TextModel,
    GteConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from penstock.cli.console import fetch_model
from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ModelLoadError
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import build_engine
from penstock.kernels.select import select_ops
from penstock.models.encoders.load import is_encoder, load_encoder
from penstock.models.load import open_checkpoint

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


SIZES = {"vocab_size": 120, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "initializer_range": 0.3, "pad_token_id": 0}
DEBERTA = {"relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
           "position_biased_input": False, "layer_norm_eps": 1e-7}  # fmt: skip
LONG = [(7 * n) % 119 + 1 for n in range(90)]  # beyond the windows below
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], str]] = {
    "bert": (BertConfig, {}, "Bert"),
    "bert-gelu_new": (BertConfig, {"hidden_act": "gelu_new"}, "Bert"),
    "ernie": (ErnieConfig, {}, "Ernie"),
    "electra": (ElectraConfig, {"embedding_size": 48}, "Electra"),
    "electra-narrow": (ElectraConfig, {"embedding_size": 24}, "Electra"),
    "roberta": (RobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}, "Roberta"),
    "xlm-roberta": (XLMRobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}, "XLMRoberta"),
    "distilbert": (
        DistilBertConfig,
        {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4},
        "DistilBert",
    ),
    "mpnet": (MPNetConfig, {"pad_token_id": 1}, "MPNet"),
    "deberta-v3": (
        DebertaV2Config,
        {**DEBERTA, "share_att_key": True, "pos_att_type": "p2c|c2p"},
        "DebertaV2",
    ),
    "deberta-v2": (
        DebertaV2Config,
        {**DEBERTA, "pos_att_type": ["c2p", "p2c"], "position_biased_input": True, "type_vocab_size": 2}
        | {
            "position_buckets": -1,
            "max_relative_positions": 40,
            "norm_rel_ebd": "none",
            "embedding_size": 24,
        },
        "DebertaV2",
    ),
    "deberta-plain": (DebertaV2Config, {"type_vocab_size": 0}, "DebertaV2"),
    "modernbert": (
        ModernBertConfig,
        {"local_attention": 16, "norm_bias": True, "classifier_pooling": "mean", "cls_token_id": 1}
        | {"eos_token_id": 2, "bos_token_id": 1, "sep_token_id": 2},
        "ModernBert",
    ),
    "nomic": (NomicBertConfig, {}, "NomicBert"),
    "eurobert": (
        EuroBertConfig,
        {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2},
        "EuroBert",
    ),
    "gte": (GteConfig, {"type_vocab_size": 1}, "Gte"),
    "gte-untyped": (GteConfig, {"type_vocab_size": 0, "initializer_range": 0.2}, "Gte"),
    "jina-v3": (JinaEmbeddingsV3Config, {"pad_token_id": 1, "type_vocab_size": 1}, "JinaEmbeddingsV3"),
}


def write_encoder(family: str, folder: Path, kind: str, **more: Any) -> Any:
    """Write random weights, and return transformers' own model of them."""
    config_class, settings, name = FAMILIES[family]
    torch.manual_seed(3)
    config = config_class(**{**SIZES, **HEADS, "max_position_embeddings": 128, **settings, **more})
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    for parameter in model.parameters():  # also biases and norms, which begin as zeros and ones
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def run_encoder(model: Any, text: list[int], second_text_at: int = 0) -> Any:
    ids = torch.tensor([text])
    given = {}
    if second_text_at:
        given["token_type_ids"] = (torch.arange(len(text)) >= second_text_at).long()[None]
    with torch.inference_mode():
        return model(ids, attention_mask=torch.ones_like(ids), **given)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = write_encoder(family, tmp_path, "Model")
    ours = load_encoder(tmp_path, select_ops("cpu", torch.float32)).model
    texts = [*TEXTS, LONG, [1, 5, 0, 9]]  # with a padding token of some families
    with torch.inference_mode():
        found = ours.hidden_states(texts)
        for text, states in zip(texts, found, strict=True):
            expected = run_encoder(theirs, text).last_hidden_state[0]
            torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)
            (alone,) = ours.hidden_states([text])
            assert torch.equal(alone, states), "a text's states depend on its batch"


def test_classifiers_of_eurobert_are_refused(tmp_path: Path) -> None:
    write_encoder("eurobert", tmp_path, "ForSequenceClassification", num_labels=3)
    with pytest.raises(ModelLoadError, match="label each token first"):
        load_encoder(tmp_path, select_ops("cpu", torch.float32))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"eurobert"}))
def test_classifiers_give_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = write_encoder(family, tmp_path, "ForSequenceClassification", num_labels=3)
    has_pairs = family in ("bert", "nomic", "ernie", "electra-narrow")
    requests = [(text, 0) for text in TEXTS] + [(LONG, 40 if has_pairs else 0)]
    found = embed(tmp_path, [text for text, _ in requests], seconds=[at for _, at in requests])
    for (text, at), vector in zip(requests, found, strict=True):
        expected = run_encoder(theirs, text, at).logits[0]
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


# Nomic's own names of what transformers names otherwise.
NOMIC_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "up_proj": "fc11",
    "gate_proj": "fc12",
    "down_proj": "fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def test_original_names_of_nomic(tmp_path: Path) -> None:
    theirs = write_encoder("nomic", tmp_path, "Model")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        for new, old in NOMIC_NAMES.items():
            name = name.replace(new, old)
        stored[name] = tensor.contiguous()
    for index in range(3):
        prefix = f"encoder.layers.{index}"
        qkv = [stored.pop(f"{prefix}.self_attn.{part}_proj.weight") for part in "qkv"]
        stored[f"{prefix}.attn.Wqkv.weight"] = torch.cat(qkv)
    save_file(stored, tmp_path / "model.safetensors")
    config = {"architectures": ["NomicBertModel"], "n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4}
    config |= {
        "n_positions": 128,
        "vocab_size": 120,
        "rotary_emb_base": 1000,
        "activation_function": "swiglu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_encoder(tmp_path, select_ops("cpu", torch.float32)).model
    (states,) = ours.hidden_states([LONG])
    expected = run_encoder(theirs, LONG).last_hidden_state[0]
    torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"prenorm": True}))
    with pytest.raises(ModelLoadError, match="prenorm"):
        load_encoder(tmp_path, select_ops("cpu", torch.float32))


class SecondNomic:
    """The makers' second NomicBERT with random weights, written down plainly: every expert computes every token."""

    num_experts, per_token, sizes = 4, 2, (48, 80)

    def __init__(self) -> None:
        torch.manual_seed(6)
        hidden, inner = self.sizes
        shapes = {"embeddings.word_embeddings.weight": (120, hidden), "emb_ln.weight": (hidden,)}
        shapes |= {"embeddings.token_type_embeddings.weight": (1, hidden), "emb_ln.bias": (hidden,)}
        for index in range(2):
            prefix = f"encoder.layers.{index}"
            shapes |= {
                f"{prefix}.attn.Wqkv.weight": (3 * hidden, hidden),
                f"{prefix}.attn.Wqkv.bias": (3 * hidden,),
            }
            shapes |= {
                f"{prefix}.attn.out_proj.weight": (hidden, hidden),
                f"{prefix}.attn.out_proj.bias": (hidden,),
            }
            for norm in ("norm1", "norm2"):
                shapes |= {f"{prefix}.{norm}.weight": (hidden,), f"{prefix}.{norm}.bias": (hidden,)}
        shapes |= {
            "encoder.layers.0.mlp.fc1.weight": (inner, hidden),
            "encoder.layers.0.mlp.fc1.bias": (inner,),
        }
        shapes |= {
            "encoder.layers.0.mlp.fc2.weight": (hidden, inner),
            "encoder.layers.0.mlp.fc2.bias": (hidden,),
        }
        experts = "encoder.layers.1.mlp.experts"
        shapes |= {f"{experts}.mlp.w1": (4 * inner, hidden), f"{experts}.mlp.w2": (4 * inner, hidden)}
        shapes |= {f"{experts}.bias": (hidden,), "encoder.layers.1.mlp.router.layer.weight": (4, hidden)}
        self.tensors = {name: torch.randn(*shape) * 0.3 for name, shape in shapes.items()}
        for name, tensor in self.tensors.items():
            if "norm" in name or "emb_ln" in name:
                tensor.add_(float(name.endswith("weight")))

    def save(self, folder: Path, **changes: Any) -> None:
        settings = {
            "architectures": ["NomicBertModel"],
            "n_embd": 48,
            "n_inner": 80,
            "n_layer": 2,
            "n_head": 4,
        }
        settings |= {"n_positions": 128, "vocab_size": 120, "rotary_emb_base": 10000, "type_vocab_size": 1}
        settings |= {
            "activation_function": "gelu",
            "qkv_proj_bias": True,
            "mlp_fc1_bias": True,
            "mlp_fc2_bias": True,
        }
        settings |= {"layer_norm_epsilon": 1e-5, "num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2}
        settings |= {
            "moe_normalize_expert_weights": False,
            "num_shared_experts": 0,
            "expert_choice_router": False,
        }
        (folder / "config.json").write_text(json.dumps(settings | changes))
        save_file(self.tensors, folder / "model.safetensors")

    def __call__(self, text: list[int]) -> torch.Tensor:
        of = self.tensors
        angles = torch.outer(torch.arange(len(text)), 10000 ** -(torch.arange(0, 12, 2) / 12))
        cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cosines + torch.cat([-second, first], dim=-1) * sines

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return functional.layer_norm(x, (48,), of[f"{name}.weight"], of[f"{name}.bias"], 1e-5)

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, of[f"{name}.weight"], of[f"{name}.bias"])

        x = of["embeddings.word_embeddings.weight"][text] + of["embeddings.token_type_embeddings.weight"][0]
        x = norm("emb_ln", x)
        for index in range(2):
            prefix = f"encoder.layers.{index}"
            parts = linear(f"{prefix}.attn.Wqkv", x).view(len(text), 3, 4, 12).permute(1, 2, 0, 3)
            scores = turned(parts[0]) @ turned(parts[1]).transpose(1, 2) / 12**0.5
            attended = (scores.softmax(dim=-1) @ parts[2]).transpose(0, 1).flatten(1)
            x = norm(f"{prefix}.norm1", x + linear(f"{prefix}.attn.out_proj", attended))
            mixed = (
                self._experts(x)
                if index
                else linear(f"{prefix}.mlp.fc2", functional.gelu(linear(f"{prefix}.mlp.fc1", x)))
            )
            x = norm(f"{prefix}.norm2", x + mixed)
        return x

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        experts, (hidden, inner) = "encoder.layers.1.mlp.experts", self.sizes
        first, second = (
            self.tensors[f"{experts}.mlp.{name}"].view(4, inner, hidden) for name in ("w1", "w2")
        )
        shares = (x @ self.tensors["encoder.layers.1.mlp.router.layer.weight"].T).softmax(dim=-1)
        kept = shares * (shares >= shares.topk(2, dim=-1).values[:, -1:])
        every = torch.einsum("eti,eih->teh", functional.gelu(torch.einsum("th,eih->eti", x, first)), second)
        return (kept[:, :, None] * every).sum(dim=1) + self.tensors[f"{experts}.bias"]


def test_the_second_nomic_has_experts(tmp_path: Path) -> None:
    theirs = SecondNomic()
    theirs.save(tmp_path)
    ours = load_encoder(tmp_path, select_ops("cpu", torch.float32)).model
    for text, states in zip([LONG, *TEXTS], ours.hidden_states([LONG, *TEXTS]), strict=True):
        torch.testing.assert_close(states, theirs(text), atol=1e-4, rtol=1e-4)
        (alone,) = ours.hidden_states([text])
        assert torch.equal(alone, states), "a text's states depend on its batch"
    for key, value in (
        ("moe_normalize_expert_weights", True),
        ("qkv_proj_bias", False),
        ("num_shared_experts", 1),
    ):
        theirs.save(tmp_path, **{key: value})
        with pytest.raises(ModelLoadError, match=key):
            load_encoder(tmp_path, select_ops("cpu", torch.float32))
    theirs.save(tmp_path, moe_top_k=5)
    with pytest.raises(ModelLoadError, match="experts that cannot be"):
        load_encoder(tmp_path, select_ops("cpu", torch.float32))


def test_settings_of_the_makers_of_gte(tmp_path: Path) -> None:
    """NTK scaling by a factor: a larger theta, and all frequencies divided by the factor's share of one pair."""
    theta, factor, head_dim = 500.0, 8.0, 12
    rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    theirs = write_encoder("gte", tmp_path, "ForSequenceClassification", num_labels=1, rope_parameters=rope)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({n.replace("gte.", "new."): t for n, t in stored.items()}, tmp_path / "model.safetensors")
    config = {**SIZES, "num_attention_heads": 4, "architectures": ["NewForSequenceClassification"]}
    config |= {"model_type": "new", "auto_map": {"AutoModel": "modeling.NewModel"}, "type_vocab_size": 1}
    config |= {"layer_norm_type": "layer_norm", "pack_qkv": True, "position_embedding_type": "rope"}
    config |= {
        "rope_theta": theta,
        "rope_scaling": {"factor": factor, "type": "ntk"},
        "id2label": {"0": "LABEL_0"},
    }
    config |= {"max_position_embeddings": 128, "layer_norm_eps": 1e-12, "logn_attention_scale": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (vector,) = embed(tmp_path, [LONG])
    torch.testing.assert_close(vector, run_encoder(theirs, LONG).logits[0], atol=1e-4, rtol=1e-4)
    for key, value in (("layer_norm_type", "rms_norm"), ("logn_attention_scale", True)):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelLoadError, match=key):
            load_encoder(tmp_path, select_ops("cpu", torch.float32))


# Jina's names of what transformers names otherwise, in XLM-RoBERTa.
JINA_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def test_names_of_jina_in_xlm_roberta(tmp_path: Path) -> None:
    theirs = write_encoder("xlm-roberta", tmp_path, "ForSequenceClassification", num_labels=1)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        for new, old in JINA_NAMES.items():
            name = name.replace(new, old)
        stored[name] = tensor.contiguous()
    for index in range(3):
        prefix = f"roberta.encoder.layers.{index}"
        for kind in ("weight", "bias"):
            parts = [
                stored.pop(f"{prefix}.attention.self.{part}.{kind}") for part in ("query", "key", "value")
            ]
            stored[f"{prefix}.mixer.Wqkv.{kind}"] = torch.cat(parts)
    save_file(stored, tmp_path / "model.safetensors")
    (vector,) = embed(tmp_path, [LONG])
    torch.testing.assert_close(vector, run_encoder(theirs, LONG).logits[0], atol=1e-4, rtol=1e-4)


def make_embedding_gemma() -> Gemma3TextModel:
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=120,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=16,
        initializer_range=0.3,
        use_bidirectional_attention=True,
    )
    return Gemma3TextModel(config).eval()


def test_gemma_that_sees_both_ways(tmp_path: Path) -> None:
    theirs = make_embedding_gemma()
    theirs.save_pretrained(tmp_path)
    add_modules(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    dense = [write_dense(tmp_path / "2_Dense", 48, 96), write_dense(tmp_path / "3_Dense", 96, 40)]
    found = embed(tmp_path, [LONG, TEXTS[0]])
    for text, vector in zip([LONG, TEXTS[0]], found, strict=True):
        made = run_encoder(theirs, text).last_hidden_state[0].mean(dim=0)
        for weight in dense:
            made = weight @ made
        torch.testing.assert_close(vector, made / made.norm(), atol=1e-5, rtol=1e-4)


def add_modules(folder: Path, *kinds: str, pooling: str = "mean") -> None:
    """Write the files that sentence-transformers puts beside a model."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(kinds, start=1):
        path = f"{index}_{kind}"
        modules.append({"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    (folder / "modules.json").write_text(json.dumps(modules))


def write_dense(folder: Path, inputs: int, outputs: int) -> torch.Tensor:
    weight = torch.randn(outputs, inputs)
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    settings = {"in_features": inputs, "out_features": outputs, "bias": False}
    settings["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "config.json").write_text(json.dumps(settings))
    return weight


def embed(
    folder: Path, texts: list[list[int]], *, seconds: list[int] | None = None, **scheduler: int
) -> list[torch.Tensor]:
    config = EngineConfig(
        model=ModelConfig(model="bert", device="cpu"),
        scheduler=SchedulerConfig(itl_target_ms=None, **scheduler),
        num_threads=1,
    )
    engine = build_engine(config, folder)
    for index, text in enumerate(texts):
        engine.loop.add(
            Request(
                id=str(index),
                prompt_token_ids=tuple(text),
                sampling=SamplingParams(max_tokens=1),
                pooling=engine.ready.model.pooling,
                second_text_at=seconds[index] if seconds else 0,
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


def write_layer(folder: Path, settings: dict[str, Any], **tensors: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True)
    save_file(
        {name.replace("_", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(settings))


def test_a_cross_encoder_of_modules(tmp_path: Path) -> None:
    """Dense layers and a norm score what the pooling gives, as newer rerankers of sentence-transformers do."""
    theirs = write_encoder("modernbert", tmp_path, "Model")
    add_modules(tmp_path, "Pooling", "Dense", "LayerNorm", "Dense", pooling="cls")
    torch.manual_seed(5)
    inner, weight, bias, last = torch.randn(48, 48), torch.randn(48), torch.randn(48), torch.randn(1, 48)
    gelu = {
        "in_features": 48,
        "out_features": 48,
        "bias": False,
        "activation_function": "torch.nn.modules.GELU",
    }
    write_layer(tmp_path / "2_Dense", gelu, linear_weight=inner)
    write_layer(tmp_path / "3_LayerNorm", {"dimension": 48}, norm_weight=weight, norm_bias=bias)
    score = {"in_features": 48, "out_features": 1, "activation_function": "torch.nn.modules.linear.Identity"}
    score |= {"module_input_name": "sentence_embedding", "module_output_name": "scores"}
    write_layer(tmp_path / "4_Dense", score, linear_weight=last, linear_bias=torch.ones(1))
    sentences = {
        "model_type": "CrossEncoder",
        "activation_fn": "torch.nn.modules.linear.Identity",
        "prompts": {},
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    card = load_encoder(tmp_path, select_ops("cpu", torch.float32)).settings.card
    assert (card.scores_pairs, card.normalizes, card.score_activation) == (True, False, "none")
    (found,) = embed(tmp_path, [LONG])
    made = functional.gelu(inner @ run_encoder(theirs, LONG).last_hidden_state[0, 0])
    expected = last @ functional.layer_norm(made, (48,), weight, bias) + 1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [48, 20])
def test_a_dense_layer_with_a_residual(tmp_path: Path, size: int) -> None:
    theirs = write_encoder("bert", tmp_path, "Model")
    add_modules(tmp_path, "Pooling", "Dense")
    weight, other = torch.randn(size, 48), torch.randn(size, 48)
    settings = {"in_features": 48, "out_features": size, "bias": False, "use_residual": True}
    tensors = {"linear_weight": weight} | ({} if size == 48 else {"residual_weight": other})
    write_layer(tmp_path / "2_Dense", settings, **tensors)
    (found,) = embed(tmp_path, [LONG])
    mean = run_encoder(theirs, LONG).last_hidden_state[0].mean(dim=0)
    expected = torch.tanh(weight @ mean) + (mean if size == 48 else other @ mean)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (["Normalize", "Pooling"], {"module_input_name": "token_embeddings"}, "module 'Normalize'"),
        (["LayerNorm", "Pooling"], {"dimension": 48}, "module 'LayerNorm'"),
        (["LogitScore"], {"false_token_id": 3}, "no true_token_id"),
    ],
)
def test_modules_in_other_places_are_refused(
    tmp_path: Path, kinds: list[str], settings: dict[str, Any], message: str
) -> None:
    add_modules(write_bert(tmp_path), *kinds)
    (tmp_path / f"1_{kinds[0]}" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=message):
        load_encoder(tmp_path, select_ops("cpu", torch.float32))


@pytest.mark.parametrize(("stated", "longest"), [(40, 40), (10**30, 96), ("many", 96)])
def test_the_tokenizer_may_state_the_longest_text(tmp_path: Path, stated: object, longest: int) -> None:
    add_modules(write_bert(tmp_path), "Pooling")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    assert load_encoder(tmp_path, select_ops("cpu", torch.float32)).max_text_len == longest
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 30}')
    assert load_encoder(tmp_path, select_ops("cpu", torch.float32)).max_text_len == 30


def test_folders_of_modules_alone_are_refused_by_name(tmp_path: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="module 'StaticEmbedding'"):
        open_checkpoint(tmp_path)


def test_what_makes_an_encoder(tmp_path: Path) -> None:
    assert is_encoder(write_bert(tmp_path / "bert"))
    assert not is_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not is_encoder(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}),
        ("modules.json", [{"path": "", "type": "st.Transformer"}, {"path": "1_LSTM", "type": "st.LSTM"}]),
        ("modules.json", [{"path": "../outside", "type": "st.Pooling"}]),
        ("modules.json", {}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("config_sentence_transformers.json", {"similarity_fn_name": "guess"}),
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
