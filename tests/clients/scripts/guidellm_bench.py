"""guidellm: a benchmark of streamed chats and of completions, on prompts of a local file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from report import API_KEY, BASE_URL, MODEL, capability

PROMPTS = ["Tell me a story about a dog.", "What is the capital of France?", "Count to ten.", "Name a color."]
Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))


def benchmark(request_format: str) -> None:
    backend = f"kind=openai_http,target={BASE_URL},model={MODEL},api_key={API_KEY},max_tokens=16"
    out = Path(f"{request_format.strip('/').replace('/', '-')}.json")
    options = {
        "--backend": f"{backend},request_format={request_format}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={len(PROMPTS)}",
        "--data": "kind=json_file,path=prompts.jsonl",
        "--output": f"kind=json,path={out}",
    }
    command = ["guidellm", "run", *(word for option in options.items() for word in option)]
    finished = subprocess.run([*command, "--disable-progress"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-1500:]
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] > 0, totals
    assert totals["errored"] == 0, totals
    assert metrics["output_token_count"]["successful"]["mean"] > 0
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


with capability("stream"):
    benchmark("/v1/chat/completions")

with capability("other", "completions"):
    benchmark("/v1/completions")
