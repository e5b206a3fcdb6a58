"""Flags of `vllm serve` that Penstock does not have, each with what to do instead.

Flags with the same meaning have the same name, and are not listed here."""

from __future__ import annotations

from collections.abc import Sequence

_GRAPHS = "CUDA graphs are used wherever they work; leave the flag out."
_TEMPLATE = "The chat template comes with the model; another one goes into its folder as chat_template.jinja."
_CONFIG = "The model's folder decides; change its config.json."
_TOKENIZER = "The tokenizer is the one in the model's folder or GGUF file."
_REVISION = "The main revision is fetched; download another one into a folder, and serve the folder."
_KIND = "The model's files decide; a model answers at every endpoint that it can serve."
_POOLING = "The model's files decide; the banner names the pooling."
_REQUEST_LOG = "Requests are logged only with --access-log; leave the flag out."
_ALWAYS_ON = "It is always on; leave the flag out."
_GRAMMARS = "Structured output needs no flag."
_CORS = "Only origins are configured: --allowed-origins."
_DOWNLOAD = "Use the environment variable PENSTOCK_CACHE."
_IMAGES = "Use --max-images, --max-image-bytes and --max-image-pixels."
_ONE_COMMAND = "One command starts all ranks of --data-parallel-size, on one machine; leave the flag out."
_PRIORITY = "Use service tiers and --tier-shares."

# By the name without --no-: `--no-enable-log-requests` has the answer of `--enable-log-requests`.
ANSWERS = {
    "--all2all-backend": "Ranks exchange tokens through NCCL, or gloo on CPUs; leave the flag out.",
    "--allow-credentials": _CORS,
    "--allowed-headers": _CORS,
    "--allowed-local-media-path": "Images come from URLs (--allowed-image-hosts) or inside the request.",
    "--allowed-media-domains": "Use --allowed-image-hosts.",
    "--allowed-methods": _CORS,
    "--api-server-count": "Use --api-workers.",
    "--async-scheduling": "Use --steps-in-flight.",
    "--chat-template": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
    "--code-revision": _REVISION,
    "--compilation-config": _GRAPHS,
    "--convert": _KIND,
    "--cpu-offload-gb": "Weights stay on the device; --quantization makes them smaller.",
    "--cuda-graph-sizes": _GRAPHS,
    "--data-parallel-address": _ONE_COMMAND,
    "--data-parallel-backend": "Use --cluster.",
    "--data-parallel-external-lb": _ONE_COMMAND,
    "--data-parallel-hybrid-lb": _ONE_COMMAND,
    "--data-parallel-rank": _ONE_COMMAND,
    "--data-parallel-rpc-port": _ONE_COMMAND,
    "--data-parallel-size-local": "Use --data-parallel-size, or --replicas.",
    "--data-parallel-start-rank": _ONE_COMMAND,
    "--default-mm-loras": "Use --lora-modules.",
    "--disable-fastapi-docs": "There are no such pages; /openapi.json describes the API.",
    "--disable-frontend-multiprocessing": "Use --api-workers.",
    "--disable-log-requests": _REQUEST_LOG,
    "--disable-log-stats": "No statistics are logged; /metrics and penstock top show them.",
    "--disable-sliding-window": _CONFIG,
    "--disable-uvicorn-access-log": _REQUEST_LOG,
    "--distributed-executor-backend": "Use --cluster.",
    "--download-dir": _DOWNLOAD,
    "--enable-auto-tool-choice": _ALWAYS_ON,
    "--enable-chunked-prefill": "It is always on; --max-num-batched-tokens bounds a chunk.",
    "--enable-force-include-usage": "Clients ask for it with stream_options.",
    "--enable-log-requests": "Use --access-log, and --log-prompts for the text of prompts.",
    "--enable-lora": "--lora-modules is enough.",
    "--enable-prompt-tokens-details": _ALWAYS_ON,
    "--enable-reasoning": "Reasoning is found by --reasoning-parser, which is automatic.",
    "--enable-request-id-headers": _ALWAYS_ON,
    "--enable-sleep-mode": "With --min-replicas 0 an idle model leaves the memory.",
    "--enforce-eager": _GRAPHS,
    "--guided-decoding-backend": _GRAMMARS,
    "--h11-max-header-count": "Use --max-header-bytes.",
    "--h11-max-incomplete-event-size": "Use --max-header-bytes.",
    "--hf-config-path": _CONFIG,
    "--hf-overrides": _CONFIG,
    "--hf-token": "Use the environment variable HF_TOKEN.",
    "--kv-cache-memory-bytes": "Use --kv-cache-memory.",
    "--kv-offloading-size": "Use --kv-host-memory.",
    "--kv-transfer-config": "Use --prefill-replicas and --decode-replicas, or --kv-transfer.",
    "--limit-mm-per-prompt": _IMAGES,
    "--log-config-file": "Use --log-format.",
    "--logits-processor-pattern": "Requests cannot name Python code.",
    "--logits-processors": "Requests cannot name Python code.",
    "--long-prefill-token-threshold": "Use --itl-target-ms.",
    "--max-cpu-loras": "Use --max-loras.",
    "--max-log-len": "Prompts are logged only with --log-prompts.",
    "--max-logprobs": "A request may ask for 20.",
    "--max-long-partial-prefills": "Use --itl-target-ms.",
    "--max-num-partial-prefills": "Use --itl-target-ms.",
    "--max-seq-len-to-capture": _GRAPHS,
    "--middleware": "There is no middleware; a proxy in front of the server can do its work.",
    "--mm-processor-kwargs": _IMAGES,
    "--model-impl": "Use --model-implementation.",
    "--num-gpu-blocks-override": "Use --num-kv-blocks.",
    "--num-scheduler-steps": "Use --steps-in-flight.",
    "--otlp-traces-endpoint": "Use --otlp-endpoint.",
    "--override-pooler-config": _POOLING,
    "--pooler-config": _POOLING,
    "--preemption-mode": "Preempted requests are swapped to --kv-host-memory, or computed again.",
    "--response-role": "The role is always assistant.",
    "--return-tokens-as-token-ids": "Tokens are returned as text only.",
    "--revision": _REVISION,
    "--root-path": "Paths have no prefix; let the proxy remove it.",
    "--rope-scaling": _CONFIG,
    "--rope-theta": _CONFIG,
    "--runner": _KIND,
    "--scheduling-policy": _PRIORITY,
    "--speculative-config": "Use --speculate, such as --speculate draft=MODEL.",
    "--ssl-ca-certs": "Clients show keys, not certificates; see penstock keys.",
    "--ssl-cert-reqs": "Clients show keys, not certificates; see penstock keys.",
    "--structured-outputs-config": _GRAMMARS,
    "--swap-space": "Use --kv-host-memory.",
    "--task": _KIND,
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--tokenizer-revision": _TOKENIZER,
    "--uds": "Use --host and --port.",
    "--use-v2-block-manager": _ALWAYS_ON,
    "--uvicorn-log-level": "Use --access-log, or --debug for detailed logs.",
}


def answers(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags of vLLM in a command line, each with what to do instead."""
    given = dict.fromkeys(argument.partition("=")[0].replace("_", "-") for argument in arguments)
    found = {flag: ANSWERS.get(flag) or ANSWERS.get(flag.replace("--no-", "--", 1)) for flag in given}
    return {flag: answer for flag, answer in found.items() if answer is not None}
