"""Recorded figures of vLLM 0.26.0 on one H200: bf16, random weights, CUDA graphs, torch.compile, on 2026-11-15.

    python -m bench.gpu_peers

prints them. They were measured with the workloads of `penstock bench gpu`, but in another run and on another host, so
no command shows them beside its own. `penstock bench gpu FOLDER --part served --peer vllm=URL` measures a server in
the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

PEER_NAME = "vLLM 0.26"


@dataclass(frozen=True, slots=True)
class ServedFigures:
    output_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    start_s: float
    decode_ms: Mapping[int, float]  # by batch
    prefill_ms: Mapping[int, float]  # by number of prompts of 512 tokens
    offline_tokens_per_s: float
    served: Mapping[str, ServedFigures] = field(default_factory=dict)  # by name of the workload


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that tell models apart whose config.json has no name."""

    hidden_size: int
    num_layers: int
    num_experts: int = 0


PEER_FIGURES: dict[Shape, PeerFigures] = {
    Shape(1024, 28): PeerFigures(  # Qwen3-0.6B
        start_s=90,
        decode_ms={1: 1.99, 8: 2.21, 32: 2.54, 128: 5.69, 256: 7.65},
        prefill_ms={1: 15.2, 256: 356},
        offline_tokens_per_s=21_803,
    ),
    Shape(4096, 32): PeerFigures(  # Llama-3.1-8B
        start_s=83,
        decode_ms={1: 4.97, 8: 5.18, 32: 5.92, 128: 8.80, 256: 14.08},
        prefill_ms={1: 16.5, 256: 3_086},
        offline_tokens_per_s=9_782,
        served={
            "1 stream": ServedFigures(197, 21, 4.9, 13),
            "32 streams": ServedFigures(3_522, 349, 5.8, 27),
            "128 streams": ServedFigures(5_980, 871, 8.6, 191),
            "256 streams": ServedFigures(6_017, 1_766, 16.7, 206),
            "64 streams, 2,048 shared": ServedFigures(5_145, 316, 7.9, 30),
            "32 streams beside 16,000-token prompts": ServedFigures(2_813, 140, 5.6, 277),
        },
    ),
    Shape(2048, 48, 128): PeerFigures(  # Qwen3-30B-A3B
        start_s=123,
        decode_ms={1: 4.14, 8: 9.43, 32: 16.35, 128: 19.87, 256: 23.62},
        prefill_ms={1: 25.4, 256: 1_827},
        offline_tokens_per_s=6_053,
    ),
}


if __name__ == "__main__":
    print(PEER_NAME)
    for shape, figures in PEER_FIGURES.items():
        print(json.dumps({**asdict(shape), **asdict(figures)}, indent=2))
