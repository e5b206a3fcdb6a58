"""Writes `smollm2_answers.json`, the reference of `test_real_model.py`: answers of the default model by transformers.

    python -m tests.gpu.reference

For each prompt the file holds its tokens, the greedy answer of transformers in float32 with the weights of the GGUF
file (an answer may not end), and the log-probability of each token of that answer in float32 and in bfloat16. Needs
transformers and no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

ANSWERS = Path(__file__).parent / "smollm2_answers.json"
MODEL = "smollm2-135m"
NEW_TOKENS = 32
END = 2  # <|im_end|>, which no answer may choose: all answers have the same length
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers.",
)
TEXTS = (
    "Once upon a time",
    "def fibonacci(n):\n",
    "The three states of matter are",
    # Longer than the products of a few rows go.
    "A penstock is a pipe that feeds water under pressure to a turbine. " * 12
    + "The purpose of a penstock is",
)


def prompts(encode: Any) -> list[list[int]]:
    asked = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS]
    return [encode(text, add_special_tokens=False).ids for text in (*asked, *TEXTS)]


def main() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from penstock.cli.console import fetch_model
    from penstock.models.load import load_tokenizer

    path = fetch_model(MODEL)
    files = load_tokenizer(path)
    assert files is not None
    asked = prompts(Tokenizer.from_buffer(files.tokenizer_json).encode)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    def scores(prompt: list[int], answer: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        found = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer).unsqueeze(1))
        return [round(value, 5) for value in found.squeeze(1).tolist()]

    rows = []
    for prompt in asked:
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS
        )
        answer = made[0, len(prompt) :].tolist()
        rows.append({"prompt": prompt, "answer": answer, "float32": scores(prompt, answer)})
    model = model.to(torch.bfloat16)
    for row in rows:
        row["bfloat16"] = scores(row["prompt"], row["answer"])
    lines = ",\n".join(json.dumps(row) for row in rows)
    ANSWERS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
