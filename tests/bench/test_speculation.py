"""The prompts and figures of the speculation bench."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import lookup, speculation
from bench.peers_cpu import Server, cpu_seconds, shape_of
from bench.speculation import Answer, Drafts
from penstock.engine.drafters.lookup import LookupDrafter


def test_every_edit_is_of_a_file_of_50_to_200_lines_that_has_the_name() -> None:
    prompts = speculation.edit_prompts(len(speculation.EDITS))
    assert len(prompts) == 10
    for prompt, (name, old, new) in zip(prompts, speculation.EDITS, strict=True):
        assert 50 <= prompt.count("\n") <= 202
        assert len(re.findall(rf"\b{old}\b", speculation.edit_text(name))) >= 4
        assert f"`{old}` changed to `{new}`" in prompt


def test_lookup_needs_fewer_steps_than_the_last_three_tokens_for_a_changed_name() -> None:
    prompt, answer = lookup.texts()["one name changed"][0]
    tokens = [[ord(letter) for letter in text] for text in (prompt, answer)]
    ours, _, accepted, _ = lookup.steps(LookupDrafter(), [1, *tokens[0], 2], tokens[1], 8)
    theirs, *_ = lookup.steps(lookup.LastThree(), [1, *tokens[0], 2], tokens[1], 8)
    assert ours + accepted >= len(tokens[1])
    assert ours < 0.6 * theirs


def test_the_mean_draft_length_counts_steps_without_drafts() -> None:
    before = Drafts(10, 40, 20, 100)
    since = Drafts(20, 100, 50, 230).since(before)
    assert since == Drafts(10, 60, 30, 130)
    assert since.mean_length == 60 / (130 - 30)
    assert Drafts(10, 60, 30, 30).mean_length == 6  # the tokens of the last step are not yet counted
    assert Drafts().mean_length == 0.0


def test_servers_are_compared_with_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked the same batches in turns, and each of them is first about equally often."""
    asked: list[str] = []

    async def ask(client: object, server: Server, prompt: str, max_tokens: int, salt: str) -> Answer:
        asked.append(server.name)
        return Answer(11, 0.5, *((1.0, 1.2) if server.name == "off" else (0.25, 0.4)))

    async def counters(client: object, server: Server) -> Drafts:
        return Drafts()

    for name in ("start", "stop"):
        monkeypatch.setattr(speculation, name, lambda server: None)
    monkeypatch.setattr(speculation, "SAMPLE_S", 0.0)
    monkeypatch.setattr(speculation, "ask", ask)
    monkeypatch.setattr(speculation, "counters", counters)
    servers = [speculation.penstock_server(name, "m", name, 1) for name in ("off", "lookup")]
    speculation.in_turns(servers, [["a"], ["b"]], 10, rounds=1)
    assert asked == ["off", "lookup", "off", "lookup", "lookup", "off"]  # the first two warm up
    shown = speculation.table(servers, "x").columns
    assert list(shown[2].cells) == ["1.00", "4.00"]
    assert [list(column.cells) for column in shown[5:7]] == [["120.0", "40.0"], ["1.00", "3.00"]]  # CPU time


def test_the_metrics_of_both_servers_are_read() -> None:
    class Client:
        def __init__(self, text: str) -> None:
            self.text = text

        async def get(self, url: str) -> Client:
            return self

    def metrics(prefix: str) -> str:
        return (
            f'{prefix}spec_decode_num_drafts_total{{model="m"}} 3.0\n'
            f'{prefix}spec_decode_num_draft_tokens_total{{model="m"}} 12.0\n'
            f'{prefix}spec_decode_num_accepted_tokens_total{{model="m"}} 9.0\n'
            f'{prefix}generation_tokens_total{{model="m"}} 20.0\n{prefix}generation_tokens_total{{model="n"}} 1.0\n'
        )

    both = metrics("vllm:") + metrics("penstock_")  # as Penstock has them
    for text in (metrics("penstock_"), metrics("vllm:"), both):
        read = asyncio.run(
            speculation.counters(Client(text), speculation.penstock_server("x", "m", "off", 1))
        )  # type: ignore[arg-type]
        assert read == Drafts(3, 12, 9, 21)


def test_the_cpu_time_of_a_server_includes_its_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(Server("x", 1, [], process=process)) >= 0.3
        process.communicate(b"\n")
    assert cpu_seconds(Server("x", 1, [])) == 0.0


def test_a_bfloat16_copy_for_vllm_has_the_shapes_of_biases_and_of_the_head() -> None:
    config = SimpleNamespace(
        hidden_size=8, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=100
    )
    shapes = {
        "lm_head.weight": (100, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.k_proj.bias": (4,),
        "model.layers.0.mlp.down_proj.weight": (8, 24),
        "model.norm.weight": (8,),
    }
    assert {name: shape_of(name, config) for name in shapes} == shapes  # type: ignore[arg-type]


def test_the_load_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    speculation.plot_load([(1.0, 1, 8.0, 100.0), (2.0, 64, 0.0, 900.0)], "load", tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000
