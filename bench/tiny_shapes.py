#!/usr/bin/env python3
"""Which decoders give transformers' log-probabilities in shapes and with settings that no test names, in one table.

    python -m bench.tiny_shapes [--only llama,phi] [--seeds 3] [--first 0] [--native] [--ranks 2] [--jobs 2]
                                [--markdown FILE]

Each model of `bench.architectures` gets random settings: head counts, head sizes, vocabularies, biases and other
flags, windows, rope scaling, experts, patterns of layers, activations, factors. The engine serves it in float32, in
chunks, and reports log-probabilities of two prompts and of its greedy answers, which must be those of transformers up
to rounding. With `--ranks`, a native model is also computed on so many tensor-parallel ranks. Results are those of
`bench.architectures`; the remark lists the settings.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import random
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import architectures
from bench.architectures import Result
from bench.tiny_configs import FLAGS, KINDS, tiny_config
from penstock.core.errors import PenstockError
from penstock.core.request import Request, SamplingParams
from penstock.kernels.reference import TorchOps
from tests.models.ranks import run_ranks

TOLERANCE = 2e-3  # of log-probabilities
NUM_TOKENS = 12
# Not settings of the forward pass, or decided elsewhere.
NO_FLAGS = {*FLAGS, "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
            "is_encoder_decoder", "add_cross_attention", "use_mamba_kernels", "use_bfloat16", "scale_fc",
            "output_past", "torchscript", "return_dict_in_generate"}  # fmt: skip
NO_FACTORS = ("drop", "init", "coef", "noise", "loss", "jitter", "std", "rope", "theta", "partial_rotary", "min",
              "max", "floor", "expand", "rank")  # fmt: skip
HEADS = ((1, 1), (3, 1), (6, 2), (6, 3), (5, 5), (4, 4), (7, 1), (9, 3))
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "gelu_new",
    "relu",
    "relu2",
    "quick_gelu",
    "gelu_fast",
    "tanh",
)
ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")

Settings = Mapping[str, Any]
Change = Callable[[Settings, random.Random], dict[str, Any]]


def heads(now: Settings, drawn: random.Random) -> dict[str, Any]:
    if not isinstance(now.get("num_attention_heads"), int) or now.get("kv_lora_rank"):
        return {}
    queries, keys = drawn.choice(HEADS)
    size = drawn.choice((6, 8, 10, 14, 20, 24, 40))
    made: dict[str, Any] = {"num_attention_heads": queries}
    if isinstance(now.get("hidden_size"), int):
        made["hidden_size"] = queries * drawn.choice((8, 12, 14))
    if isinstance(now.get("num_key_value_heads"), int):
        made["num_key_value_heads"] = keys
    if isinstance(now.get("head_dim"), int):
        made["head_dim"] = size
    return made


def sizes(now: Settings, drawn: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, choices in (
        ("intermediate_size", (40, 50, 100, 33)), ("moe_intermediate_size", (24, 20, 33)),
        ("num_hidden_layers", (1, 2, 3, 5)), ("max_position_embeddings", (128, 90)), ("hidden_size", (48, 56, 72)),
    ):  # fmt: skip
        is_list = name == "num_hidden_layers" and any(isinstance(now.get(kind), list) for kind in KINDS)
        is_tied = name == "hidden_size" and not isinstance(now.get("head_dim"), int)
        if isinstance(now.get(name), int) and not is_list and not is_tied and drawn.random() < 0.5:
            made[name] = drawn.choice(choices)
    return made


def vocabulary(now: Settings, drawn: random.Random) -> dict[str, Any]:
    size = drawn.choice((321, 333, 347, 389))
    return {
        name: size for name in ("vocab_size", "vocab_size_per_layer_input") if isinstance(now.get(name), int)
    }


def tied(now: Settings, drawn: random.Random) -> dict[str, Any]:
    return {"tie_word_embeddings": True}


def flags(now: Settings, drawn: random.Random) -> dict[str, Any]:
    names = [name for name, value in now.items() if isinstance(value, bool) and name not in NO_FLAGS]
    return {name: not now[name] for name in names if drawn.random() < 0.4}


def windows(now: Settings, drawn: random.Random) -> dict[str, Any]:
    names = [name for name in now if name in ("sliding_window", "attention_chunk_size", "max_window_layers")]
    made = {name: drawn.choice((2, 3, 5, 17, 30)) for name in names}
    return made | ({"use_sliding_window": True} if "use_sliding_window" in now else {})


def no_windows(now: Settings, drawn: random.Random) -> dict[str, Any]:
    return {"sliding_window": None} if "sliding_window" in now else {}


def rope(now: Settings, drawn: random.Random) -> dict[str, Any]:
    """Change the kind of rope of all layers, or of each kind of layer."""
    parameters = now.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    if "rope_theta" in parameters:
        return {"rope_parameters": {**parameters, **_rope(now, parameters, drawn)}}
    by_kind = {
        kind: {**each, **_rope(now, each, drawn)} if isinstance(each, dict) else each
        for kind, each in parameters.items()
    }
    return {"rope_parameters": by_kind}


def _rope(now: Settings, parameters: Settings, drawn: random.Random) -> dict[str, Any]:
    if parameters.get("rope_type", "default") not in ROPES:
        return {}
    kind, original = drawn.choice(ROPES), drawn.choice((16, 64))
    made: dict[str, Any] = {"rope_type": kind, "rope_theta": drawn.choice((100.0, 10000.0, 500000.0))}
    share = parameters.get("partial_rotary_factor", 1.0)
    if "partial_rotary_factor" in parameters and drawn.random() < 0.5:
        made["partial_rotary_factor"] = share = drawn.choice((0.25, 0.5, 0.75, 1.0))
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        made["factor"] = drawn.choice((1.5, 4.0))
    if kind in ("yarn", "llama3", "longrope"):
        made["original_max_position_embeddings"] = original
    if kind == "llama3":
        made |= {"low_freq_factor": drawn.choice((1.0, 0.5)), "high_freq_factor": 4.0}
    if kind == "yarn":
        extra = {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
        made |= {key: value for key, value in extra.items() if drawn.random() < 0.3}
        made |= {"mscale": 0.7, "mscale_all_dim": 0.9} if drawn.random() < 0.3 else {}
    if kind == "longrope":
        # The context decides which list is used, so no text may cross the original length.
        made["original_max_position_embeddings"] = drawn.choice((16, 512))
        head = (
            now.get("qk_rope_head_dim")
            or now.get("head_dim")
            or now["hidden_size"] // now["num_attention_heads"]
        )
        pairs = int(head * share) // 2
        made |= {
            f"{part}_factor": [1.0 + drawn.random() * 3 for _ in range(pairs)] for part in ("short", "long")
        }
        made |= {"attention_factor": 1.2} if drawn.random() < 0.3 else {"factor": 4.0}
    return made


def experts(now: Settings, drawn: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    groups = drawn.choice((1, 2, 3))
    count = groups * drawn.choice((2, 3, 4))
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if isinstance(now.get(name), int) and now[name] > 0:
            made[name] = count
    if not made:
        return {}
    kept = drawn.randint(1, groups)
    if isinstance(now.get("n_group"), int):
        made |= {"n_group": groups, "topk_group": kept}
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
        if isinstance(now.get(name), int):
            made[name] = drawn.randint(1, min(count, kept * count // groups))
    for name in ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"):
        if isinstance(now.get(name), int):
            made[name] = drawn.choice((0, 1, 3))
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if isinstance(now.get(name), int):
            made[name] = drawn.choice((0, 1, 2))
    for name in ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", "expert_layer_period"):
        if isinstance(now.get(name), int):
            made[name] = drawn.choice((1, 2))
    if isinstance(now.get("mlp_only_layers"), list):
        made["mlp_only_layers"] = drawn.choice(([], [1], [0, 2]))
    return made


def patterns(now: Settings, drawn: random.Random) -> dict[str, Any]:
    made = {}
    for name in KINDS:
        kinds = now.get(name)
        if isinstance(kinds, list) and kinds:
            made[name] = [drawn.choice(sorted(set(kinds))) for _ in kinds]
    return made


def factors(now: Settings, drawn: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in now.items():
        if any(part in name for part in NO_FACTORS):
            continue
        if name.endswith(("eps", "epsilon")):
            made[name] = drawn.choice((1e-2, 1e-6))
        elif isinstance(value, float) and math.isfinite(value) and value > 0 and drawn.random() < 0.4:
            made[name] = value * drawn.choice((0.6, 1.5))
        elif "softcap" in name and drawn.random() < 0.5:
            made[name] = drawn.choice((2.0, None))
    return made


def activation(now: Settings, drawn: random.Random) -> dict[str, Any]:
    names = [name for name in ("hidden_act", "hidden_activation", "activation_function") if name in now]
    return {name: drawn.choice(ACTIVATIONS) for name in names if drawn.random() < 0.3}


CHANGES: tuple[Change, ...] = (
    heads, sizes, vocabulary, tied, flags, windows, no_windows, rope, experts, patterns, factors, activation,
)  # fmt: skip


def changed_settings(model_type: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the settings of a tiny model, and what a random choice of `CHANGES` has changed."""
    drawn = random.Random(f"{model_type} {seed}")
    config = tiny_config(model_type, architectures.VOCAB_SIZE)
    now = config.to_dict()
    made: dict[str, Any] = {}
    for change in CHANGES:
        if drawn.random() < 0.4:
            made |= change({**now, **made}, drawn)
    return config, made


def with_changes(config: Any, made: Mapping[str, Any]) -> Any:
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("model_type", "transformers_version")
    }
    return type(config)(**{**settings, **made})


def reported(engine: Any, texts: list[list[int]], count: int) -> list[tuple[list[int], torch.Tensor]]:
    """Return each text with its answer, and the log-probability of each token but the first."""
    sampling = SamplingParams(
        max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    for number, text in enumerate(texts):
        engine.loop.add(Request(id=f"{number}", prompt_token_ids=tuple(text), sampling=sampling))
    tokens = [list(text) for text in texts]
    values: list[list[float]] = [[] for _ in texts]
    while engine.loop.has_work:
        for event in engine.loop.step():
            at = int(event.request_id)
            if event.error:
                raise RuntimeError(event.error)
            if event.prompt_logprobs is not None:
                values[at] += torch.frombuffer(
                    bytearray(event.prompt_logprobs.values), dtype=torch.float32
                ).tolist()
            tokens[at] += event.token_ids
            values[at] += [each.logprob for each in event.logprobs]
    return [(each, torch.tensor(value)) for each, value in zip(tokens, values, strict=True)]


def on_ranks(folder: Path, ranks: int, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probability of each token of the texts but the first, computed in chunks on several ranks."""
    made: list[torch.Tensor] = []
    for text in texts:
        # Ranks but the first have their part of the logits alone.
        logits = run_ranks(
            folder,
            TorchOps(),
            ranks,
            lambda runner, text=text: runner.prompt_logits(text, architectures.CHUNK_TOKENS),
        )
        made.append(chosen_logprobs(logits, text))
    return made


def chosen_logprobs(logits: torch.Tensor, text: list[int]) -> torch.Tensor:
    return logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def positions(model: Any, count: int) -> dict[str, torch.Tensor]:
    """Return the positions that `generate` gives, which the classes of RoBERTa count in another way without it."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": torch.arange(count)[None]} if takes else {}


def compare(
    model_type: str,
    name: str,
    seed: int,
    folder: Path,
    *,
    made: Mapping[str, Any] | None = None,
    tokens: int = NUM_TOKENS,
    ranks: int = 1,
) -> Result:
    import transformers

    chosen = made or {}

    def result(outcome: str, remark: str = "", path: str = "–") -> Result:
        said = f"{remark} {json.dumps(chosen)}"
        return Result(model_type, f"{name} {seed}", path, outcome, " ".join(said.split()))

    try:
        config, drawn = changed_settings(model_type, seed)
        chosen = drawn if made is None else made
        config = with_changes(config, chosen)
        maker = next(kind for kind, each in architectures._mappings().items() if each.get(model_type) == name)
        attention = architectures.attention_of(config)
        model = getattr(transformers, maker).from_config(config, attn_implementation=attention).float().eval()
        architectures.randomize(model)
        with torch.inference_mode():
            model(input_ids=torch.tensor([architectures.prompts()[0]]))
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(folder)
    except Exception as error:
        return result("no model", f"{type(error).__name__}: {str(error)[:200]}")
    try:
        engine = architectures.serve(folder, max_num_batched_tokens=architectures.CHUNK_TOKENS)
        path = engine.ready.model.implementation
        have = reported(engine, architectures.prompts(), tokens)
    except PenstockError as error:
        sentence = f"{error.message} {error.hint or ''}".split(" is not known; known are")[0]
        return result("refused", sentence)
    except Exception:
        return result("WRONG", traceback.format_exc(limit=-3))
    if ranks > 1 and path == "native":
        try:
            shared = on_ranks(folder, ranks, [text for text, _ in have])
        except PenstockError as error:
            return result("refused", f"on {ranks} ranks: {error.message}", path)
        except Exception:
            return result("WRONG", f"on {ranks} ranks: {traceback.format_exc(limit=-3)}", path)
        have += [(text, values) for (text, _), values in zip(have, shared, strict=True)]
    for text, values in have:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), **positions(model, len(text))).logits[0].float()
        want = chosen_logprobs(logits, text)
        error = (want - values).abs()
        if not bool(error.max() < TOLERANCE * max(1.0, want.abs().max().item())):
            return result(
                "WRONG", f"off by {error.max():.3g} at {int(error.argmax()) + 1} of {len(text)}", path
            )
    return result("equal", "", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="model types, with commas between them")
    parser.add_argument("--native", action="store_true", help="only types that are native")
    parser.add_argument("--seeds", type=int, default=3, help="random settings for each type")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--ranks", type=int, default=1, help="tensor-parallel ranks that native models also run on"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table to a file")
    arguments = parser.parse_args()
    known = architectures._mappings()["AutoModelForCausalLM"]
    chosen = arguments.only.split(",") if arguments.only else list(known)
    if arguments.native:
        from penstock.models.families import FAMILIES

        names = {name for family in FAMILIES for name in family.huggingface_names}
        chosen = [kind for kind in chosen if kind in names or known[kind] in names]
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    wanted = [(kind, str(known[kind]), seed) for kind in chosen for seed in seeds]
    architectures.sweep(
        wanted, arguments.jobs, functools.partial(compare, ranks=arguments.ranks), arguments.markdown
    )


if __name__ == "__main__":
    main()
