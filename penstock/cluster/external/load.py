"""How busy another server is, read from the metrics it shows. Knows the names that engines give them, and no server.

For servers without such metrics, only the requests that were sent to them count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# In the order of preference; the first that a server shows counts. All label sets of a name are added up: a server
# with several engines shows one for each.
_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "tgi_batch_current_size",
    "llamacpp:requests_processing",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
    "llamacpp:requests_deferred",
    "nv_inference_pending_request_count",
)
# Shares from 0 to 1; of several engines the fullest counts.
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_WANTED = frozenset((*_RUNNING, *_WAITING, *_KV_USAGE))


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_running: int
    num_waiting: int
    kv_usage: float | None = None  # None where the server does not tell


def read_load(page: str) -> ServerLoad | None:
    """None when the page tells nothing about load. Raises ValueError for one that is no metrics page."""
    found: dict[str, list[float]] = {}
    # Only the lines that matter: a page may have thousands.
    lines = [line for line in page.splitlines() if line.startswith(tuple(_WANTED))]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name in _WANTED:
                found.setdefault(sample.name, []).append(sample.value)
    running, waiting, usage = (_first(found, names) for names in (_RUNNING, _WAITING, _KV_USAGE))
    if running is None and waiting is None:
        return None
    return ServerLoad(
        num_running=round(sum(running or ())),
        num_waiting=round(sum(waiting or ())),
        kv_usage=None if usage is None else min(1.0, max(usage)),
    )


def _first(found: dict[str, list[float]], names: Sequence[str]) -> list[float] | None:
    return next((found[name] for name in names if name in found), None)
