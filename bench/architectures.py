#!/usr/bin/env python3
"""Which decoders of the transformers library give the same answers here, in one table.

    python -m bench.architectures [--images] [--only opt,bloom] [--jobs 2] [--tokens 24] [--markdown FILE]

Every model type that `AutoModelForCausalLM` knows is made small, filled with random weights and saved. The engine
serves the folder in float32 (natively, else by transformers' code), with each prompt alone, with all prompts in one
batch, and with prompts in chunks. The tokens must be those of transformers' own greedy `generate`. With `--images`,
the model types are those of `AutoModelForImageTextToText`, and prompts are texts without images. Results are:

    equal       the same tokens in all three runs
    near tie    other tokens, where the two best logits of transformers differ by less than rounding
    refused     an error sentence before anything is served
    no model    transformers itself cannot make or run the model as a decoder of texts
    WRONG       other tokens, or an exception that is not a sentence
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.tiny_configs import tiny_config
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import PenstockError
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import Engine, build_engine

VOCAB_SIZE = 320
TIE = 2e-3  # of two logits of a model whose logits are of size 1 to 10
CHUNK_TOKENS = 13
PATIENCE_S = 900


@dataclass(frozen=True)
class Result:
    model_type: str
    architecture: str
    path: str  # native, transformers, or –
    result: str
    remark: str = ""


def prompts() -> list[list[int]]:
    """Two prompts with a shared beginning, longer than the windows of the tiny models."""
    drawn = torch.Generator().manual_seed(7)
    texts = [torch.randint(3, VOCAB_SIZE, (count,), generator=drawn).tolist() for count in (20, 25, 3)]
    return [texts[0] + texts[1], texts[0] + texts[2]]


def randomize(model: Any) -> None:
    """Fill a model with weights that make answers vary. Norms stay near those of a fresh model."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and not name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.is_floating_point():
                parameter.normal_(0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1)


def attention_of(config: Any) -> str:
    """Return the attention that transformers runs. Falcon's eager one adds ALiBi twice: in the mask, too."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


def expected_answers(model: Any, texts: Sequence[list[int]], count: int) -> list[list[int]]:
    answers = []
    for text in texts:
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([text]), max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1,
                pad_token_id=0, eos_token_id=None, bos_token_id=1,
            )  # fmt: skip
        answers.append(made[0].tolist()[len(text) :])
    return answers


def serve(folder: Path, **scheduling: Any) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="auto"),
        cache=CacheConfig(num_kv_blocks=256),
        scheduler=SchedulerConfig(**{"itl_target_ms": None, **scheduling}),
        speculate="off",
    )
    return build_engine(config, folder)


def answers(engine: Engine, name: str, texts: Sequence[list[int]], count: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    made: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        each = Request(id=f"{name}-{number}", prompt_token_ids=tuple(text), sampling=sampling)
        made[each.id] = []
        engine.loop.add(each)
    while engine.loop.has_work:
        for event in engine.loop.step():
            made[event.request_id] += event.token_ids
    return list(made.values())


def is_near_tie(model: Any, text: list[int], want: list[int], have: list[int]) -> bool:
    """Say whether the first different token has nearly the logit of the expected one."""
    at = next((n for n, pair in enumerate(zip(want, have, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return False
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text + want[:at]])).logits[0, -1].float()
    return bool((logits[want[at]] - logits[have[at]]).abs() < TIE * max(1.0, logits.abs().max().item()))


def _mappings() -> dict[str, dict[str, str]]:
    """Return the class of each model type, by the class of transformers that knows them."""
    from transformers.models.auto import modeling_auto

    return {
        "AutoModelForImageTextToText": dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        "AutoModelForCausalLM": dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    }


def compare(model_type: str, name: str, count: int, folder: Path) -> Result:
    import transformers

    def result(outcome: str, remark: str = "", path: str = "–") -> Result:
        return Result(model_type, name, path, outcome, " ".join(remark.split()))

    texts = prompts()
    try:
        config = tiny_config(model_type, VOCAB_SIZE)
        makers = {
            each[model_type]: maker for maker, each in _mappings().items() if each.get(model_type) == name
        }
        model = getattr(transformers, makers[name]).from_config(
            config, attn_implementation=attention_of(config)
        )
        model = model.float().eval()
        randomize(model)
        want = expected_answers(model, texts, count)
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(folder)
    except Exception as error:
        return result("no model", f"{type(error).__name__}: {str(error)[:300]}")
    try:
        engine = serve(folder)
        path = engine.ready.model.implementation
        alone = [answers(engine, f"alone-{n}", [text], count)[0] for n, text in enumerate(texts)]
        batched = answers(serve(folder), "batch", texts, count)
        chunked = answers(serve(folder, max_num_batched_tokens=CHUNK_TOKENS), "chunk", texts, count)
    except PenstockError as error:
        return result("refused", f"{error.message} {error.hint or ''}")
    except Exception:
        return result("WRONG", traceback.format_exc(limit=-3))
    is_tied = False
    for how, have in (("alone", alone), ("batched", batched), ("chunked", chunked)):
        for number, text in enumerate(texts):
            if have[number] == want[number]:
                continue
            if is_near_tie(model, text, want[number], have[number]):
                is_tied = True
                continue
            same = next(n for n in range(count) if have[number][n : n + 1] != want[number][n : n + 1])
            return result("WRONG", f"{how}: prompt {number}, token {same}", path)
    distinct = len({token for answer in want for token in answer})
    return result(
        "near tie" if is_tied else "equal", f"{distinct} distinct tokens" if distinct < 4 else "", path
    )


Compare = Callable[[str, str, int, Path], Result]


def run_one(model_type: str, name: str, count: int, compare: Compare = compare) -> Result:
    """Run a model in a process of its own, which a crash ends without the others."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            sender.send(asdict(compare(model_type, name, count, Path(folder))))
        os._exit(0)

    process = context.Process(target=work, daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(PATIENCE_S):
            return Result(**receiver.recv())
        return Result(model_type, name, "–", "WRONG", f"no answer within {PATIENCE_S} s")
    except EOFError:
        return Result(model_type, name, "–", "WRONG", "the process died")
    finally:
        process.kill()
        process.join()


def table(results: Sequence[Result]) -> str:
    lines = ["| model type | class | run by | result | remark |", "|---|---|---|---|---|"]
    lines += [
        f"| `{each.model_type}` | `{each.architecture}` | {each.path} | {each.result} | {each.remark} |"
        for each in results
    ]
    return "\n".join(lines)


def sweep(
    wanted: Sequence[tuple[str, str, int]], jobs: int, compare: Compare, markdown: Path | None
) -> list[Result]:
    """Run models: each is a type, the name of its class and a count for `compare`. Print each result as it comes, and
    the number of results of each kind at the end."""
    import transformers

    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(run_one, *each, compare) for each in wanted]:
            made = job.result()
            results.append(made)
            print(f"{made.architecture:44} {made.path:13} {made.result:9} {made.remark}", flush=True)
    print(f"\ntransformers {transformers.__version__}, {len(results)} classes")
    for (path, outcome), number in sorted(Counter((each.path, each.result) for each in results).items()):
        print(f"{path:13} {outcome:9} {number}")
    if markdown:
        markdown.write_text(table(results) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="model types, with commas between them")
    parser.add_argument("--images", action="store_true", help="sweep models that see images, with texts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--markdown", type=Path, help="write the table to a file")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    arguments = parser.parse_args()
    known = _mappings()["AutoModelForImageTextToText" if arguments.images else "AutoModelForCausalLM"]
    chosen = arguments.only.split(",") if arguments.only else list(known)
    wanted = [(kind, str(known[kind]), arguments.tokens) for kind in chosen]
    results = sweep(wanted, arguments.jobs, compare, arguments.markdown)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
