"""Lists known devices with the figures of their data sheets, reads descriptions of other devices, and lists the
formats of weights and KV. Prices are examples; `--price` replaces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import UsageError

GB = 1e9
TB = 1e12
TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. Efficiencies are the shares of the data sheet that the engine reaches; the defaults were fitted on
    one H200 (docs/planning.md) and are assumptions elsewhere, until `--measure`."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense; float32 where there is no bfloat16
    fp8_flops_per_s: float | None  # None: no fp8 products
    link_bytes_per_s: float  # to one other device, one way
    dollars_per_hour: float
    memory_efficiency: float = 0.79
    compute_efficiency: float = 0.72
    layer_s: float = 1.7e-5  # the least time of a layer's products; 2.8 times that with experts
    # The least time of a layer's kernels in a step with prompts, which runs without a CUDA graph.
    launch_s: float = 1.4e-4
    step_s: float = 1.8e-4  # launches and gaps that nothing hides
    sequence_s: float = 1.2e-6  # sampling
    stream_s: float = 6e-6  # to send a token to a client, as far as no other work hides the time
    exchange_s: float = 1.2e-5  # the latency of one all-reduce, or of one transfer to the next stage


def _gpu(
    name: str,
    memory_gb: float,
    tb_per_s: float,
    tflops: float,
    fp8_tflops: float | None,
    link_gb_per_s: float,
    price: float,
) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=memory_gb * GB,
        bytes_per_s=tb_per_s * TB,
        flops_per_s=tflops * TERA,
        fp8_flops_per_s=None if fp8_tflops is None else fp8_tflops * TERA,
        link_bytes_per_s=link_gb_per_s * GB,
        dollars_per_hour=price,
    )


HARDWARE: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        _gpu("h200", 141, 4.8, 989, 1979, 450, 3.80),
        _gpu("h100", 80, 3.35, 989, 1979, 450, 2.90),
        _gpu("a100", 80, 2.04, 312, None, 300, 1.70),
        _gpu("l40s", 48, 0.864, 362, 733, 25, 1.00),
        _gpu("l4", 24, 0.30, 121, 242, 25, 0.70),
        _gpu("rtx-4090", 24, 1.008, 165, 330, 25, 0.40),
        _gpu("rtx-5090", 32, 1.792, 210, 419, 50, 0.70),
        _gpu("mi300x", 192, 5.3, 1307, 2615, 64, 3.00),
        _gpu("b200", 180, 8.0, 2250, 4500, 900, 5.50),
        Hardware(
            name="cpu",  # one socket with AMX
            memory_bytes=256 * GB,
            bytes_per_s=0.307 * TB,
            flops_per_s=90 * TERA,
            fp8_flops_per_s=None,
            link_bytes_per_s=20 * GB,
            dollars_per_hour=2.20,
            compute_efficiency=0.4,
            step_s=1e-3,
            launch_s=0.0,
        ),
    )
}

# The figures of a device as they are written, and in which unit.
_FIGURES: Mapping[str, tuple[str, float]] = {
    "memory": ("memory_bytes", GB),
    "bandwidth": ("bytes_per_s", TB),
    "tflops": ("flops_per_s", TERA),
    "fp8_tflops": ("fp8_flops_per_s", TERA),
    "link": ("link_bytes_per_s", GB),
    "price": ("dollars_per_hour", 1.0),
}
_MOST = 1e9
_NEEDED = ("memory", "bandwidth", "tflops", "price")  # of a device that is not in the table
_PCIE_GB_PER_S = 25.0  # the link of a device that names none
_EXAMPLE = "name=h20,memory=96,bandwidth=4.0,tflops=148,fp8_tflops=296,link=450,price=2.10"


def device_from_text(text: str) -> Hardware:
    """Read a device such as `name=h20,memory=96,bandwidth=4.0,tflops=148,price=2.10`: GB, TB/s, dense TFLOP/s in
    bfloat16, dollars per hour; `fp8_tflops` and `link` (GB/s) if it has them. A known name keeps what is left out."""
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    name = given.pop("name", "").strip().lower()
    known = HARDWARE.get(name)
    unknown = sorted(given.keys() - _FIGURES.keys())
    missing = [] if known else [figure for figure in _NEEDED if figure not in given]
    if not name or unknown or missing:
        problem = (
            f"has no figure {unknown[0]!r:.40}" if unknown else f"lacks {', '.join(missing) or 'a name'}"
        )
        raise UsageError(f"The device {text:.80} {problem}.", hint=f"Write {_EXAMPLE}.")
    figures: dict[str, Any] = {}
    for figure, number in given.items():
        field, unit = _FIGURES[figure]
        figures[field] = _positive(number, figure, may_be_zero=figure == "price") * unit
    return replace(known or _gpu(name, 1, 1, 1, None, _PCIE_GB_PER_S, 0.0), **figures)


def _positive(text: str, figure: str, *, may_be_zero: bool) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MOST or not (number or may_be_zero):
        raise UsageError(f"{figure}={text:.40} is no positive number.", hint=f"Write {_EXAMPLE}.")
    return number


@dataclass(frozen=True, slots=True)
class Format:
    """The storage format of weights or KV: bytes of one number, scales included, and whether products run in fp8.

    Products in fp8 reach less of their peak, and scale their inputs first, which takes time in every layer."""

    name: str
    bytes_per_number: float
    computes_in_fp8: bool = False
    compute_share: float = 1.0  # of the device's compute efficiency
    layer_factor: float = 1.0  # on the least time of a layer


WEIGHT_FORMATS: Mapping[str, Format] = {
    "float32": Format("float32", 4.0),
    "bfloat16": Format("bfloat16", 2.0),
    "fp8": Format("fp8", 1.0, computes_in_fp8=True, compute_share=0.62, layer_factor=1.7),
    "int8": Format("int8", 1.03),
    "int4": Format("int4", 0.56),  # a 16-bit scale and an offset for every 64 weights
}
KV_FORMATS: Mapping[str, Format] = {
    "bfloat16": Format("bfloat16", 2.0),
    "fp8": Format("fp8", 1.0),
    "int8": Format("int8", 1.03),
}
