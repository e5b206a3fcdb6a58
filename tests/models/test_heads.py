"""Heads in published formats: their results, and the refusal of heads that belong to another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.drafters.files import write_heads
from penstock.models.drafters.heads import EagleHead, MedusaHeads, Target, load_heads
from penstock.models.load import load_model, open_checkpoint
from penstock.models.model import TappedModel
from tests.models.checkpoints import VOCAB_SIZE, Reference
from tests.models.heads import SIZE, eagle_features, eagle_tensors, write_folder

POSITIONS = 128


@pytest.fixture
def target(llama: Reference, ops: Ops) -> Target:
    return Target(load_model(llama.folder, ops), open_checkpoint(llama.folder).source(), ops)


def one_text(count: int) -> AttentionBatch:
    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionBatch(
        positions=int32(list(range(count))),
        slots=int32(list(range(count))),
        query_starts=int32([0, count]),
        context_lens=int32([count]),
        block_tables=int32(list(range(4))).unsqueeze(0),
        num_requests=1,
        max_query_len=count,
        max_context_len=count,
    )


def run(head: EagleHead, target: Target, hidden: Tensor, token_ids: list[int]) -> Tensor:
    kv = target.ops.allocate_kv(1, 4, 16, head.num_kv_heads, head.head_dim)
    ids = torch.tensor(token_ids, dtype=torch.int32)
    return head.forward(ids, head.features(hidden), one_text(len(token_ids)), kv)


@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
def test_an_eagle_head_computes_what_plain_torch_does(
    tmp_path: Path, target: Target, third: bool, draft_vocab: int | None
) -> None:
    tensors = eagle_tensors(VOCAB_SIZE, third=third, draft_vocab=draft_vocab)
    folder = write_folder(
        tmp_path / "head", tensors, VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1, 2] if third else None
    )
    head = load_heads(folder, target, POSITIONS)
    assert isinstance(head, EagleHead)
    assert head.taps == ((0, 1, 2) if third else ())
    ids = list(range(7, 27))
    hidden = torch.randn(20, 3 * SIZE if third else SIZE)
    made = run(head, target, hidden, ids)
    embedded = target.model.embed(torch.tensor(ids, dtype=torch.int32))
    features = hidden @ tensors["fc.weight"].T if third else hidden
    wanted = eagle_features(tensors, embedded, features, third=third)
    torch.testing.assert_close(made, wanted, rtol=2e-3, atol=2e-3)
    if third:
        normed = torch.nn.functional.rms_norm(wanted, (SIZE,), tensors["norm.weight"], 1e-5)
        logits = normed @ tensors["lm_head.weight"].T
    else:
        logits = target.model.logits(wanted)
    if draft_vocab is not None:
        ids_of = tensors["d2t"] + torch.arange(draft_vocab)
        chosen = ids_of[(logits if third else logits[:, ids_of]).argmax(dim=1)]
    else:
        chosen = logits.argmax(dim=1)
    assert head.argmax(made).tolist() == chosen.tolist()


def test_inner_layers_are_shown_as_transformers_shows_them(llama: Reference, target: Target) -> None:
    model, ids = target.model, list(range(9, 29))
    assert isinstance(model, TappedModel)
    kv = target.ops.allocate_kv(model.num_layers, 4, 16, model.num_kv_heads, model.head_dim)
    token_ids = torch.tensor(ids, dtype=torch.int32)
    with torch.inference_mode():
        hidden, shown = model.forward_tapped(token_ids, one_text(20), kv, (0, 1, 2))
        same = model.forward(token_ids, one_text(20), kv)
        theirs = llama.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert torch.equal(hidden, same)
    wanted = torch.cat([theirs[0][0], theirs[1][0]], dim=1)
    torch.testing.assert_close(shown[:, : 2 * SIZE], wanted, rtol=2e-3, atol=2e-3)
    last = model.normed(shown[:, 2 * SIZE :].contiguous())
    torch.testing.assert_close(last, same, rtol=1e-5, atol=1e-5)


def test_an_eagle_head_continues_from_its_own_kv(tmp_path: Path, target: Target) -> None:
    folder = write_folder(tmp_path / "head", eagle_tensors(VOCAB_SIZE, third=False), VOCAB_SIZE)
    head = load_heads(folder, target, POSITIONS, "int8")
    assert isinstance(head, EagleHead)
    hidden, ids = torch.randn(12, SIZE), list(range(30, 42))
    whole = run(head, target, hidden, ids)
    kv = target.ops.allocate_kv(1, 4, 16, head.num_kv_heads, head.head_dim)
    head.forward(torch.tensor(ids[:-1], dtype=torch.int32), hidden[:-1], one_text(11), kv)
    last = AttentionBatch(
        positions=torch.tensor([11], dtype=torch.int32),
        slots=torch.tensor([11], dtype=torch.int32),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([12], dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32).unsqueeze(0),
        num_requests=1,
        max_query_len=1,
        max_context_len=12,
        num_decodes=1,
    )
    made = head.forward(torch.tensor(ids[-1:], dtype=torch.int32), hidden[-1:], last, kv)
    torch.testing.assert_close(made[0], whole[-1], rtol=1e-4, atol=1e-4)


def medusa_tensors(style: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    tensors = {}
    for head in range(3):
        block, lm_head = {
            "original": (f"{head}.0.linear", f"{head}.1"),
            "prefixed": (f"medusa_head.{head}.0.linear", f"medusa_head.{head}.1"),
            "blocks": (f"blocks.{head}.layers.0", f"lm_heads.{head}"),
        }[style]
        tensors[f"{block}.weight"] = torch.randn(SIZE, SIZE) * 0.2
        tensors[f"{block}.bias"] = torch.randn(SIZE) * 0.2
        tensors[f"{lm_head}.weight"] = torch.randn(VOCAB_SIZE, SIZE) * 0.2
    return tensors


@pytest.mark.parametrize("style", ["original", "prefixed", "blocks"])
def test_medusa_heads_draft_a_token_each(tmp_path: Path, target: Target, style: str) -> None:
    tensors = medusa_tensors(style)
    folder = write_folder(tmp_path / "heads", tensors, VOCAB_SIZE, medusa_num_heads=3)
    heads = load_heads(folder, target, POSITIONS)
    assert isinstance(heads, MedusaHeads)
    assert heads.max_tokens == 3
    hidden = torch.randn(5, SIZE)
    weights = list(tensors.values())
    wanted = []
    for block, bias, lm_head in zip(weights[0::3], weights[1::3], weights[2::3], strict=True):
        wanted.append(((hidden + torch.nn.functional.silu(hidden @ block.T + bias)) @ lm_head.T).argmax(1))
    assert heads.draft(hidden).tolist() == torch.stack(wanted, 1).tolist()


def test_heads_come_from_torch_files_too(tmp_path: Path, target: Target) -> None:
    folder = write_folder(tmp_path / "heads", {"unused": torch.zeros(1)}, VOCAB_SIZE)
    (folder / "model.safetensors").unlink()
    torch.save(medusa_tensors("original"), folder / "medusa_lm_head.pt")
    assert isinstance(load_heads(folder, target, POSITIONS), MedusaHeads)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (b"not a file of torch", "cannot be read"),
        (b"", "too early"),
        ([torch.zeros(1)], "by name"),
        ({1: torch.zeros(1)}, "not a tensor with a name"),
        ({"fc.weight": {"nested": torch.zeros(1)}}, "fc.weight, which is not a tensor"),
        ({"0.0.linear.weight": 5}, "not a tensor"),
        ({"fc.weight": torch.tensor(1.0)}, "no dense matrix"),
        ({"fc.weight": torch.zeros(2, 2, device="meta")}, "no dense matrix"),
        ({"fc.weight": torch.zeros(2, 2).to_sparse()}, "no dense matrix"),
        ({"fc.weight": torch.tensor([1.0, float("nan")])}, "not numbers"),
        ({"fc.weight": torch.zeros(2, 2, dtype=torch.int64)}, "no dense matrix"),
        ({"fc.weight": torch.zeros(SIZE, 2 * SIZE), "d2t": torch.zeros(4)}, "no dense matrix"),
    ],
    ids=[
        "damaged",
        "empty",
        "list",
        "number",
        "nested",
        "constant",
        "scalar",
        "meta",
        "sparse",
        "nan",
        "int",
        "d2t",
    ],
)
def test_damaged_torch_files_are_refused(tmp_path: Path, target: Target, stored: Any, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save(stored, file) if not isinstance(stored, bytes) else file.write_bytes(stored)
    with pytest.raises(ModelLoadError, match=words):
        load_heads(tmp_path, target, POSITIONS)


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        (("0.0",), {}, "neither"),
        (("1.0",), {}, "head 1 is missing"),
        (("0.1",), {}, "no tensor lm_heads.0"),
        ((), {"lm_heads.0.bias": torch.zeros(VOCAB_SIZE)}, "lm_heads.0.bias, which no known"),
        ((), {"blocks.x.layers.0.weight": torch.zeros(SIZE, SIZE)}, "which no known"),
        (("1.0", "0.1", "1.1", "2.1"), {}, "head 1 is missing"),
    ],
    ids=["first", "second", "output", "bias", "name", "gap"],
)
def test_incomplete_medusa_heads_are_refused(
    tmp_path: Path, target: Target, drop: tuple[str, ...], add: dict[str, Tensor], words: str
) -> None:
    tensors = {n: t for n, t in medusa_tensors("original").items() if not n.startswith(drop or ("-",))} | add
    with pytest.raises(ModelLoadError, match=words):
        load_heads(write_folder(tmp_path / "heads", tensors, VOCAB_SIZE), target, POSITIONS)


@pytest.mark.parametrize("name", ["hidden_norm", "input_layernorm"])
def test_an_eagle_3_head_needs_both_norms(tmp_path: Path, target: Target, name: str) -> None:
    tensors = eagle_tensors(VOCAB_SIZE, third=True)
    del tensors[f"midlayer.{name}.weight"]
    folder = write_folder(tmp_path / "head", tensors, VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with pytest.raises((ConfigError, ModelLoadError)):
        load_heads(folder, target, POSITIONS)


def test_written_heads_are_read_back(tmp_path: Path, target: Target) -> None:
    tensors = eagle_tensors(VOCAB_SIZE, third=False)
    settings = json.loads((write_folder(tmp_path / "a", tensors, VOCAB_SIZE) / "config.json").read_text())
    write_heads(tmp_path / "b", settings, tensors)
    hidden = torch.randn(4, SIZE)
    made = []
    for name in "ab":
        head = load_heads(tmp_path / name, target, POSITIONS)
        assert isinstance(head, EagleHead)
        made.append(run(head, target, hidden, [3, 4, 5, 6]))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("changes", "drop", "add", "error", "words"),
    [
        ({"vocab_size": 512}, (), {}, ConfigError, "vocabulary of 512"),
        ({"num_hidden_layers": 2}, (), {}, ModelLoadError, "2 layers"),
        ({}, (), {"layers.1.mlp.gate_proj.weight": torch.zeros(2, 2)}, ModelLoadError, "no known EAGLE"),
        ({}, (), {"fc.weight": torch.zeros(SIZE, SIZE + 48)}, ConfigError, "of 48 numbers"),
        ({}, ("layers.0.mlp.up_proj.weight",), {}, ModelLoadError, "no tensor"),
        ({}, ("fc.weight",), {}, ModelLoadError, "neither an EAGLE"),
        ({}, (), {"d2t": torch.full((4,), VOCAB_SIZE)}, ModelLoadError, "beyond the vocabulary"),
        ({}, (), {"d2t": torch.full((4, 4), VOCAB_SIZE)}, ModelLoadError, "beyond the vocabulary"),
        ({}, (), {"layers.0.mlp.down_proj.weight": torch.zeros(3, 3)}, ModelLoadError, "of shape"),
    ],
    ids=["vocabulary", "layers", "unknown", "hidden-size", "missing", "no-fc", "d2t", "d2t-matrix", "shape"],
)
def test_heads_of_another_model_are_refused(
    tmp_path: Path,
    target: Target,
    changes: dict[str, Any],
    drop: tuple[str, ...],
    add: dict[str, Tensor],
    error: type[Exception],
    words: str,
) -> None:
    tensors = eagle_tensors(VOCAB_SIZE, third=False)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | add
    folder = write_folder(tmp_path / "head", tensors, VOCAB_SIZE, **({"vocab_size": VOCAB_SIZE} | changes))
    with pytest.raises(error, match=words):
        load_heads(folder, target, POSITIONS)


def test_a_folder_without_heads_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ModelLoadError, match="holds no heads"):
        load_heads(tmp_path, target, POSITIONS)
