"""A checkpoint's layer for multi-token prediction drafts what transformers' layer would, and changes no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ConfigError
from penstock.core.request import Grammar
from penstock.engine.build import Engine, build_engine
from penstock.engine.drafters.length import DraftLength
from penstock.engine.echo import byte_tokenizer_json
from penstock.kernels.reference import TorchOps
from penstock.models.drafters.heads import Target
from penstock.models.drafters.mtp import MtpHead
from penstock.models.load import load_model, open_checkpoint
from tests.models.checkpoints import Reference, make_reference
from tests.models.test_heads import one_text
from tests.models.tiny_families import save_tiny

from .byte_model import constrained
from .drafting import answers, speculate
from .tiny import request, teach_short_answers

SIZE = 64
OWN_NAMES = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "shared_head.norm": "final_layernorm"}  # fmt: skip


class Checkpoint:
    """A checkpoint whose last layer, of a model that transformers made, is the layer for multi-token prediction."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reference: Reference = (
            make_reference("qwen2", folder) if name == "mimo" else save_tiny(name, folder)
        )
        self.folder, self.name = folder, name
        settings = json.loads((folder / "config.json").read_text())
        self.last = settings["num_hidden_layers"] - 1
        settings |= {"num_hidden_layers": self.last, "num_nextn_predict_layers": 1}
        for key in ("layer_types", "mlp_layer_types"):
            if settings.get(key):
                settings[key] = settings[key][:-1]
        tensors = load_file(folder / "model.safetensors")
        torch.manual_seed(3)
        self.own = {key: torch.rand(SIZE) + 0.5 for key in ("enorm", "hnorm", "shared_head.norm")}
        self.own["eh_proj"] = torch.randn(SIZE, 2 * SIZE) * 0.1
        prefix = f"model.layers.{self.last}."
        tensors |= {f"{prefix}{key}.weight": tensor for key, tensor in self.own.items()}
        if name == "mimo":
            settings |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
            for own, other in OWN_NAMES.items():
                tensors[f"{prefix}{other}.weight"] = tensors.pop(f"{prefix}{own}.weight")
            tensors = {key.replace(prefix, "model.mtp_layers.0."): each for key, each in tensors.items()}
        (folder / "config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def drafted(self, hidden: Tensor, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the tokens that follow from it, by transformers' layer."""
        model = self.reference.model.model
        eps = self.reference.model.config.rms_norm_eps
        embedded = rms_norm(model.embed_tokens(torch.tensor(token_ids)), (SIZE,), self.own["enorm"], eps)
        normed = rms_norm(hidden, (SIZE,), self.own["hnorm"], eps)
        both = [normed, embedded] if self.name == "mimo" else [embedded, normed]
        inputs = (torch.cat(both, dim=1) @ self.own["eh_proj"].T).unsqueeze(0)
        count = len(token_ids)
        places = torch.arange(count).unsqueeze(0)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        with torch.inference_mode():
            made = model.layers[self.last](
                inputs,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=model.rotary_emb(inputs, places),
            )
            made = (made[0] if isinstance(made, tuple) else made).view(count, SIZE)
            ended = rms_norm(made, (SIZE,), self.own["shared_head.norm"], eps)
            chosen = self.reference.model.lm_head(ended).argmax(dim=1)
        return (ended if self.name == "mimo" else made), chosen


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32", "glm4_moe", "mimo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def engine_of(folder: Path, named: str, num_kv_blocks: int = 64, **model: Any) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", **model),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerConfig(itl_target_ms=None),
        speculate=named,
        num_threads=1,
    )
    return build_engine(config, folder)


def test_the_layer_computes_what_transformers_computes(checkpoint: Checkpoint) -> None:
    ops = TorchOps()
    model = load_model(checkpoint.folder, ops)
    target = Target(model, open_checkpoint(checkpoint.folder).source(), ops)  # type: ignore[arg-type]
    head = MtpHead(target, 256, None, is_random=False)
    if model.config.latent is not None:
        kv = ops.allocate_latents(1, 4, 16, head.head_dim)
    else:
        kv = ops.allocate_kv(1, 4, 16, head.num_kv_heads, head.head_dim)
    ids, hidden = list(range(7, 31)), torch.randn(24, SIZE)
    made = head.forward(torch.tensor(ids, dtype=torch.int32), hidden, one_text(24), kv)
    expected, chosen = checkpoint.drafted(hidden, ids)
    torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3)
    assert head.argmax(made).tolist() == chosen.tolist()


@pytest.mark.parametrize("follows", [False, True], ids=["asked", "behind-steps"])
def test_drafts_change_no_answer(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """Of sampled answers and those in a grammar, in a cache that holds a few of them at a time."""
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 3)
    (checkpoint.folder / "tokenizer.json").write_bytes(byte_tokenizer_json())
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 1.0, "seed": 4, "top_p": 0.8}]
    settings += [{"frequency_penalty": 0.8, "repetition_penalty": 1.2}, {"logit_bias": {17: 4.0}, "seed": 2}]
    asked = [request(f"r{n}", list(range(5 + n, 25 + 3 * n)), 40, **each) for n, each in enumerate(settings)]
    schema = Grammar("regex", "[a-f]{3,9}(-[0-9]{2}){1,4}")
    asked += [constrained("grammar", schema, 40), constrained("greedy-grammar", schema, 40, temperature=0.0)]
    plain = answers(engine_of(checkpoint.folder, "off"), asked)
    engine = engine_of(checkpoint.folder, "heads=mtp", num_kv_blocks=16)
    drafter = engine.loop.drafter
    assert drafter is not None
    if follows:
        inner = drafter._drafters[-1]  # type: ignore[attr-defined]
        inner.follows_steps, engine.loop.executor._follower = True, inner  # type: ignore[attr-defined]
    teach_short_answers(engine)
    assert answers(speculate(engine, drafter), asked) == plain
    stats = engine.loop.stats()
    assert stats.num_preemptions > 0
    assert sum(next(each for each in stats.drafters if each.drafter == "heads").drafted) > 50


def test_checkpoints_without_the_layer_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    settings = json.loads((checkpoint.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tensors = load_file(checkpoint.folder / "model.safetensors")
    own = ("enorm", "token_layernorm")
    save_file({k: each for k, each in tensors.items() if not any(name in k for name in own)},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match="weights have no layer"):
        engine_of(tmp_path, "heads=mtp")
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        engine_of(tmp_path, "heads=mtp", load_format="random")


def test_a_draft_model_may_cache_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 3)
    folder = Checkpoint("deepseek_v3", tmp_path).folder
    asked = [request("r", list(range(5, 25)), 20)]
    plain = answers(engine_of(folder, "off"), asked)
    engine = engine_of(folder, f"draft={folder}")
    drafter = engine.loop.drafter
    assert drafter is not None
    assert answers(speculate(engine, drafter), asked) == plain
    (stats,) = engine.loop.stats().drafters
    assert sum(stats.accepted) > 0.9 * sum(stats.drafted)


def test_gguf_files_of_glm_name_the_layer_as_folders_do(tmp_path: Path) -> None:
    opened = open_checkpoint(Checkpoint("glm4_moe", tmp_path).folder)
    layout = opened.architecture.gguf_layout(opened.config)
    names = {"nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.shared_head_norm": "shared_head.norm"}
    for stored, usual in names.items():
        assert layout.usual_name(f"blk.46.{stored}.weight") == f"model.layers.46.{usual}.weight"
