"""lm_eval: multiple choice and perplexity by log-probabilities of prompts, generated answers, chats. The tasks are
local files, because there may be no dataset hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from report import API_KEY, BASE_URL, MODEL, capability

FACTS = [
    ("The capital of France is", ["Paris", "purple", "seven"]),
    ("The opposite of hot is", ["cold", "window", "Tuesday"]),
    ("One, two, three,", ["four", "banana", "river"]),
    ("Cows give us", ["milk", "paper", "music"]),
    ("The sun rises in the", ["east", "spoon", "green"]),
    ("Fish live in the", ["water", "oven", "book"]),
    ("Monday comes after", ["Sunday", "glass", "Norway"]),
    ("Snow is white and", ["cold", "loud", "square"]),
    ("We read a book with our", ["eyes", "feet", "soup"]),
    ("The color of grass is", ["green", "fast", "nine"]),
]
TEXTS = [
    "The sun is a star at the center of the solar system. The planets move around it, and the Earth takes one year "
    "to go around the sun once. The light of the sun takes about eight minutes to reach the Earth.",
    "Once upon a time there was a little girl who lived in a small house near the forest with her mother and her "
    "father. Every morning she walked to school, and every evening she walked back home.",
]
TASKS = {
    "facts": """
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: facts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "texts": """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "answers": """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: facts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def evaluate(task: str, model: str, path: str, *more: str) -> dict[str, float]:
    arguments = f"model={MODEL},base_url={BASE_URL}{path},auth_token={API_KEY},num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", task, "--include_path", ".", "--output_path", f"out-{task}-{model}", *more]
    settings = {**os.environ, "OPENAI_API_KEY": API_KEY, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-1500:]
    (found,) = Path(f"out-{task}-{model}").rglob("results*.json")
    results: dict[str, float] = json.loads(found.read_text())["results"][task]
    return results


for name, text in TASKS.items():
    Path(f"{name}.yaml").write_text(text)
Path("facts.jsonl").write_text(lines([{"text": text, "choices": choices} for text, choices in FACTS]))
Path("texts.jsonl").write_text(lines([{"text": text} for text in TEXTS]))

with capability("other", "multiple choice"):
    results = evaluate("facts", "local-completions", "/v1/completions", "--batch_size", "4")
    assert results["acc,none"] >= 0.8, results

with capability("other", "perplexity"):
    results = evaluate("texts", "local-completions", "/v1/completions")
    assert 1.0 < results["byte_perplexity,none"] < 2.5, results

with capability("other", "generated answers"):
    results = evaluate("answers", "local-completions", "/v1/completions")
    assert "exact_match,none" in results

with capability("chat"):
    results = evaluate("answers", "local-chat-completions", "/v1/chat/completions", "--apply_chat_template")
    assert "exact_match,none" in results
