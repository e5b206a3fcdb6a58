"""`penstock bench` against a fake server in another thread, and against the echo engine."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import bench_gpu
from penstock.cli.commands import penstock
from penstock.core.errors import EngineUnavailable
from tests.bench.fake_server import FakeServer
from tests.engine.tiny import write_tiny_model


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server.running():
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(penstock, ["bench", *arguments])


def test_serve_reports_figures_in_a_table_a_file_and_a_picture(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        result = run(
            *("serve", "--url", server.url, "--requests", "6", "--concurrency", "2", "--output-len", "5"),
            *("--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "plot.png")),
        )
    assert result.exit_code == 0, result.output
    assert "First token, ms" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_completed"], report["num_errors"], report["num_output_tokens"]) == (6, 0, 30)
    assert len(server.bodies) == 6 + 2  # the warm-up is sent and not counted
    assert (tmp_path / "plot.png").exists()


OUR_DRAFTS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="fake-model"} {n}0
vllm:spec_decode_num_drafts_total{model_name="another"} 9
# TYPE penstock_drafter_draft_tokens counter
penstock_drafter_draft_tokens_total{model_name="fake-model",drafter="lookup",position="0"} {n}0
penstock_drafter_draft_tokens_total{model_name="fake-model",drafter="lookup",position="1"} {n}
penstock_drafter_draft_tokens_total{model_name="fake-model",drafter="heads",position="0"} 5
# TYPE penstock_drafter_accepted_tokens counter
penstock_drafter_accepted_tokens_total{model_name="fake-model",drafter="lookup",position="0"} {n}
penstock_drafter_accepted_tokens_total{model_name="fake-model",drafter="lookup",position="1"} {n}
penstock_drafter_accepted_tokens_total{model_name="fake-model",drafter="heads",position="0"} 5
"""
VLLM_DRAFTS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="fake-model"} {n}0.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="fake-model",position="0"} {n}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="fake-model",position="1"} 0.0
"""


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        pytest.param(OUR_DRAFTS, {"drafter": "lookup", "drafted": [30, 3], "accepted": [3, 3]}, id="ours"),
        pytest.param(VLLM_DRAFTS, {"drafter": "all", "drafted": [30, 30], "accepted": [3, 0]}, id="vllm"),
    ],
)
def test_drafts_of_a_run_are_reported_without_those_before(
    tmp_path: Path, metrics: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bench.summary.SETTLING_S", 0.0)
    with serving(FakeServer(metrics=metrics)) as server:
        result = run(
            *("serve", "--url", server.url, "--requests", "3", "--warmup", "2", "--speculate-report"),
            *("--output-len", "3", "--json", str(tmp_path / "report.json")),
        )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "report.json").read_text())["drafters"] == [expected]
    assert "accepted by position" in result.stdout
    assert ("10 100" if "penstock" in metrics else "10 0") in result.stdout


def test_a_server_without_counts_of_drafts_is_refused_before_the_load() -> None:
    for metrics in (None, "up 1\n", "no{ metrics", OUR_DRAFTS.replace("fake-model", "third")):
        with serving(FakeServer(metrics=metrics)) as server:
            result = run("serve", "--url", server.url, "--speculate-report")
        assert result.exit_code == 1
        assert "metrics" in result.stderr
        assert not server.bodies


def test_a_seed_repeats_the_prompts_and_its_absence_does_not(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        for seed in (["--seed", "1"], ["--seed", "1"], [], []):
            assert run("serve", "--url", server.url, "--requests", "1", "--warmup", "0", *seed).exit_code == 0
    first, repeated, fresh, fresher = (body["prompt"] for body in server.bodies)
    assert first == repeated
    assert len({tuple(first), tuple(fresh), tuple(fresher)}) == 3


def test_compare_sends_the_same_prompts_to_every_server_in_turn(tmp_path: Path) -> None:
    with serving(FakeServer()) as ours, serving(FakeServer()) as peer:
        result = run(
            *("compare", "--url", ours.url, "--peer", f"other={peer.url}", "--repeat", "2"),
            *("--workload", "streams-8", "--json", str(tmp_path / "report.json")),
        )
    assert result.exit_code == 0, result.output
    assert "other" in result.stdout
    assert "×)" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [summary["server"] for summary in report["runs"][0]] == ["penstock", "other"]
    assert report["ratios"][0][0]["output_tokens_per_s"] > 0
    prompts = [sorted(body["prompt"] for body in server.bodies) for server in (ours, peer)]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts[0]}) == len(prompts[0])


def test_a_server_that_answers_nothing_is_a_sentence() -> None:
    with serving(FakeServer(behaviour="refuse")) as server:
        result = run("serve", "--url", server.url)
    assert result.exit_code == 1
    assert "answers no request: status 503" in result.stderr


def test_errors_make_the_exit_code(tmp_path: Path) -> None:
    with serving(FakeServer(behaviour="no-done")) as server:
        result = run("serve", "--url", server.url, "--requests", "3", "--warmup", "0")
    assert result.exit_code == 1
    assert "3 requests" in result.stderr


def test_bad_lengths_are_usage_errors() -> None:
    assert run("serve", "--input-len", "9:1").exit_code == 2
    assert run("serve", "--concurrency", "0").exit_code == 2


def test_offline_measures_the_engine_in_this_process(tmp_path: Path) -> None:
    result = run(
        *("offline", "--model", "echo", "--requests", "4", "--input-len", "8:16", "--output-len", "3"),
        *("--json", str(tmp_path / "report.json")),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_prompts"], report["num_output_tokens"]) == (4, 12)


def test_gpu_measures_a_folder_of_settings(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    out = tmp_path / "figures.json"
    result = run(
        *("gpu", str(folder), "--part", "decode", "--batch", "1", "--batch", "2", "--device", "cpu"),
        *("--json", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "times better" not in result.stdout  # no peer was measured
    figures = json.loads(out.read_text())
    assert [figure["what"] for figure in figures] == [
        "load to first token, s",
        "decode, batch 1, ms",
        "decode, batch 2, ms",
    ]
    assert all(figure["value"] > 0 and figure["peer"] is None for figure in figures)


def test_gpu_needs_settings_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = run("gpu", str(tmp_path))
    assert result.exit_code == 1
    assert "does not describe a model" in result.output


def test_a_server_that_does_not_answer_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | None] = [TimeoutError("timed out"), ConnectionRefusedError(), None]

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return io.BytesIO()

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with subprocess.Popen(["sleep", "60"]) as process:
        bench_gpu.wait_until_ready(process, "http://127.0.0.1:1")
        process.kill()
    assert not answers


def test_a_server_that_ended_is_not_waited_for() -> None:
    with subprocess.Popen(["false"]) as process:
        process.wait()
        with pytest.raises(EngineUnavailable, match="did not start"):
            bench_gpu.wait_until_ready(process, "http://127.0.0.1:1")


def test_gpu_says_which_loads_there_are(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    unknown = run("gpu", str(folder), "--part", "served", "--load", "thousand")
    assert unknown.exit_code != 0
    assert "No served load is called 'thousand'" in unknown.output
    assert "256 streams" in unknown.output
    elsewhere = run("gpu", str(folder), "--part", "decode", "--load", "256")
    assert elsewhere.exit_code != 0
    assert "--part served" in elsewhere.output


def test_gpu_measures_a_peer_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    with serving(FakeServer()) as ours, serving(FakeServer()) as theirs:
        monkeypatch.setattr(bench_gpu, "_server", lambda *_: nullcontext((None, ours.url)))
        monkeypatch.setattr(bench_gpu, "wait_until_ready", lambda *_: None)
        result = run(
            *("gpu", str(folder), "--part", "served", "--load", "1 stream"),
            *("--peer", f"theirs={theirs.url}", "--json", str(tmp_path / "figures.json")),
        )
    assert result.exit_code == 0, result.output
    assert "theirs" in result.stdout
    assert "times better" in result.stdout
    served = [
        figure for figure in json.loads((tmp_path / "figures.json").read_text()) if ":" in figure["what"]
    ]
    assert len(served) == 4
    assert all(figure["peer"] is not None for figure in served)
    assert [body["prompt"] for body in theirs.bodies] == [body["prompt"] for body in ours.bodies][1:], (
        "the same"
    )
