"""The steps of an offline run, by kind."""

from __future__ import annotations

from pathlib import Path

from bench.gpu_offline import DECODES_EACH, Step, run, table
from penstock.bench.load import ClosedLoop, IntRange, Workload
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.engine.byte_model import write_byte_model


def test_steps_are_summed_by_kind() -> None:
    steps = [
        Step(0, 100, 0.5, 10.75),
        Step(DECODES_EACH, 0, 0.25, 11.0),
        Step(1, 0, 0.125, 11.5),
        Step(DECODES_EACH + 1, 0, 0.25, 12.0),
    ]
    _, prompts, few, more = table(steps, began_s=10.0)
    assert prompts == ("prompts and 1–32 decodes", "1", "0", "100", "0.50", "500.00", "0.25")
    assert few == ("1–32 decodes", "2", "33", "0", "0.38", "187.50", "0.38")
    assert more == ("33–64 decodes", "1", "33", "0", "0.25", "250.00", "0.25")


def test_every_token_of_a_run_is_in_a_step(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path)
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(itl_target_ms=None, max_draft_tokens=0),
        num_threads=1,
    )
    workload = Workload(
        arrivals=ClosedLoop(3),
        num_requests=3,
        input_len=IntRange(20, 30),
        output_len=IntRange(4, 8),
        vocabulary=IntRange(1, 200),
    )
    prompts = workload.prompts()
    title, heading, rule, *rows = run(config, folder, [prompts])
    assert title.endswith(" steps")
    assert heading.count("|") == rule.count("|") == 8
    cells = [[cell.strip().replace(",", "") for cell in row.strip("|").split("|")] for row in rows]
    assert sum(int(row[3]) for row in cells) == sum(len(prompt.token_ids) for prompt in prompts)
    # A prompt's last step gives the first token of the answer.
    assert sum(int(row[2]) for row in cells) == sum(prompt.max_tokens - 1 for prompt in prompts)
