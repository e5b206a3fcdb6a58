"""What `auto` means, and what a user hears when the fast kernels are missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ConfigError
from penstock.core.machine import install_command
from penstock.engine import device as device_module
from penstock.engine.device import cache_sizes, choose_device, choose_ops, leave_cores_to
from penstock.kernels import library
from penstock.kernels.interface import GroupQuantWeight
from penstock.kernels.native_storage import NativeKVStore
from penstock.models.model import Model
from tests.engine.tiny import tiny_engine, write_tiny_model

DTYPES = ("auto", "bfloat16", "float32")


def config(**model: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(device="cpu", **model))


def test_the_slow_backend_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    assert choose_ops(config()).dtype == torch.float32
    assert "penstock doctor" in caplog.text


def test_a_backend_without_half_precision_falls_back_aloud(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_ops(config(dtype="float16")).name == "torch"
    assert "float16 has no fast kernels on a CPU" in caplog.text


def test_the_native_backend_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if library.load() is None:
        pytest.skip("needs the native kernels")
    choose_ops(config(dtype="float32"))
    assert not caplog.text


@pytest.fixture
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.parametrize(("dtype", "backend", "left"), [("float32", "native", 1), ("float16", "torch", 3)])
def test_torch_does_not_spin_beside_the_kernels_threads(dtype: str, backend: str, left: int) -> None:
    ops = choose_ops(EngineConfig(model=ModelConfig(device="cpu", dtype=dtype), num_threads=3))
    if ops.name != backend:
        pytest.skip("needs the native kernels")
    assert torch.get_num_threads() == 3  # a model is loaded with all of them
    leave_cores_to(ops)
    assert torch.get_num_threads() == left


def test_only_auto_multiplies_quantized_weights_in_whole_numbers() -> None:
    native = library.load()
    if native is None or not native.fast_integers():
        pytest.skip("needs a processor that multiplies bytes")
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    weight = GroupQuantWeight(codes, torch.rand(32, 2), None, 32, 4)
    x = torch.randn(1, 64)

    def error(dtype: str) -> float:
        ops = choose_ops(config(dtype=dtype))
        found = ops.logits(x.to(ops.dtype), ops.pack_linear([weight]))
        return float((found - x @ weight.dequantize().T).norm() / found.norm())

    assert error("float32") < 1e-6 < 4e-6 < error("auto") < 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_ops(EngineConfig(model=ModelConfig(device="cuda")))


def test_a_float8_cache_needs_cuda() -> None:
    config = EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="CUDA"):
        choose_ops(config)


def test_an_int8_cache_runs_anywhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="int8"))
    if library.load() is not None:
        ops = choose_ops(config)
        assert (ops.name, ops.kv_dtype) == ("native", torch.int8)
        assert not caplog.text
    monkeypatch.setattr(library, "load", lambda: None)
    ops = choose_ops(config)
    assert (ops.name, ops.kv_dtype) == ("torch", torch.int8)
    assert "slow" in caplog.text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The properties of the GPU that torch finds."""
    properties = SimpleNamespace(name="GPU", major=8, minor=0, total_memory=40 << 30)
    for name, value in {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return properties


def test_a_gpu_that_is_too_old_leaves_the_model_to_the_cpu(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    gpu.major, gpu.minor = 7, 5
    assert choose_device("auto").type == "cpu"
    assert "7.5, 40 GiB: too old, kernels need compute capability 8.0" in caplog.text
    with pytest.raises(ConfigError, match="too old") as refused:
        choose_device("cuda")
    assert "--device" in (refused.value.hint or "")


def test_an_fp8_cache_needs_a_gpu_with_fp8(gpu: SimpleNamespace) -> None:
    config = EngineConfig(model=ModelConfig(device="cuda"), cache=CacheConfig(kv_cache_dtype="fp8"))
    with pytest.raises(
        ConfigError, match=r"needs compute capability 8\.9 .* 8\.0, 40 GiB \(Ampere\)"
    ) as refused:
        choose_ops(config)
    assert "int8" in (refused.value.hint or "")


def test_flashinfer_needs_cuda_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    wanting = EngineConfig(model=ModelConfig(device="cpu", attention_backend="flashinfer"))
    with pytest.raises(ConfigError, match="CUDA"):
        choose_ops(wanting)
    monkeypatch.setattr(device_module, "choose_device", lambda asked: torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs FlashInfer") as refused:
        choose_ops(wanting)
    assert refused.value.hint == f"Run: {install_command('flashinfer')}"


def test_host_memory_that_is_not_there_refuses_the_start_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.load() is None:
        pytest.skip("needs the native kernels")

    def refuse(self: NativeKVStore, num_slots: int) -> None:
        raise MemoryError("the system does not lock it")

    monkeypatch.setattr(NativeKVStore, "reserve_host", refuse)
    with pytest.raises(ConfigError, match=r"no room for .*B of KV: the system does not lock it") as refused:
        tiny_engine(write_tiny_model(tmp_path / "tiny"))
    assert "--kv-host-memory" in (refused.value.hint or "")


def test_what_is_loaded_early_asks_for_no_gpu() -> None:
    """Which ones an engine may see is said later, and a driver that was asked before would not hear it."""
    script = """
import sys
import penstock.engine.build
slow = {"torch", "numpy"} & set(sys.modules)
assert not slow, f"an echo engine does without {slow}, and imports take a tenth of a second or more"
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
from pathlib import Path
from penstock.engine.startup import preload
preload('penstock.engine.decoder', Path('/proc/nobody/bytecode'))
assert not asked, asked
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("cache", [{"kv_cache_memory": "900TiB"}, {"num_kv_blocks": 10**12}])
def test_a_kv_cache_that_does_not_fit_is_a_sentence(tmp_path: Path, cache: dict[str, Any]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="no memory for a KV cache of") as caught:
        tiny_engine(model, **{"num_kv_blocks": None, **cache})
    assert "--kv-cache-memory" in (caught.value.hint or "")


def test_float16_on_a_cpu_says_what_is_fast(caplog: pytest.LogCaptureFixture) -> None:
    choose_ops(EngineConfig(model=ModelConfig(device="cpu", dtype="float16")))
    (record,) = caplog.records
    assert "--dtype bfloat16 or --dtype float32" in record.getMessage()
    assert "doctor" not in record.getMessage()


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_kv_cache_takes_no_more_memory_than_it_was_given(head_dim: int, kv_cache_dtype: str) -> None:
    config = EngineConfig(
        model=ModelConfig(device="cpu", dtype="float32"),
        cache=CacheConfig(kv_cache_memory="1MiB", kv_cache_dtype=kv_cache_dtype),
    )
    ops = choose_ops(config)
    model = cast(Model, SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=head_dim))
    num_blocks = cache_sizes(config, model, ops).num_blocks
    kv = ops.allocate_kv(2, num_blocks, config.cache.block_size, 2, head_dim)
    assert num_blocks * kv.block_bytes <= 1 << 20 < (num_blocks + 1) * kv.block_bytes


def state_model(num_kv_layers: int, slot_bytes: int) -> Model:
    """A model of which only the sizes matter: one layer with a state."""
    return cast(
        Model,
        SimpleNamespace(
            num_layers=3,
            num_kv_layers=num_kv_layers,
            num_kv_heads=2,
            head_dim=32,
            max_model_len=1000,
            state_layers=(((slot_bytes // 4,),),),
        ),
    )


def state_config(memory: str, max_num_seqs: int, **cache: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="any", device="cpu", dtype="float32"),
        cache=CacheConfig(kv_cache_memory=memory, **cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def test_states_and_keys_and_values_share_the_memory_that_was_given() -> None:
    config = state_config("8MiB", 16)
    ops = choose_ops(config)
    model = state_model(2, 64 << 10)
    sizes = cache_sizes(config, model, ops)
    assert sizes.states is not None
    assert (sizes.states.num_slots, sizes.max_num_seqs) == (32, 16)
    kv = device_module.allocate_kv(model, ops, sizes.num_blocks, 16)
    taken = 33 * (64 << 10) + sizes.num_blocks * kv.block_bytes
    assert taken <= 8 << 20 < taken + kv.block_bytes


def test_large_states_let_fewer_requests_run_and_leave_room_for_snapshots() -> None:
    config = state_config("8MiB", 256)
    sizes = cache_sizes(config, state_model(2, 256 << 10), choose_ops(config))
    assert sizes.states is not None
    assert (sizes.states.num_slots, sizes.max_num_seqs) == (15, 11)
    config = state_config("8MiB", 256, enable_prefix_caching=False)
    sizes = cache_sizes(config, state_model(2, 16 << 10), choose_ops(config))
    assert sizes.states is not None
    assert sizes.states.num_host_slots == 0


def test_a_model_without_attention_has_blocks_without_memory() -> None:
    config = state_config("8MiB", 4)
    ops, model = choose_ops(config), state_model(0, 64 << 10)
    sizes = cache_sizes(config, model, ops)
    assert sizes.num_blocks == 4 * 63
    kv = device_module.allocate_kv(model, ops, sizes.num_blocks, 16)
    assert (kv.block_bytes, device_module.num_host_blocks(config, kv)) == (0, sizes.num_blocks)


def test_states_that_do_not_fit_are_named_with_their_sizes() -> None:
    config = state_config("1MiB", 4)
    with pytest.raises(
        ConfigError, match=r"take 1\.0 MiB for each request, and 1\.0 MiB of memory .* beside keys"
    ):
        cache_sizes(config, state_model(2, 1 << 20), choose_ops(config))


def test_images_take_their_memory_from_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the memory of the largest image while it is encoded, and that of encoded images."""
    encoded: list[tuple[int, int]] = []
    vision: Any = SimpleNamespace(
        tiles_at_once=4,
        largest=lambda max_tokens: SimpleNamespace(num_tiles=7, max_tokens=max_tokens),
        encode=lambda pixels, first, count: encoded.append((pixels.max_tokens, count)),
    )
    allocated = {"memory_allocated": 5 << 20, "max_memory_allocated": 45 << 20}
    for name, value in {**allocated, "reset_peak_memory_stats": None, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(device_module, "_gpu_memory_left", lambda *_: 200 << 20)
    ops: Any = SimpleNamespace(device=torch.device("cuda"))
    model: Any = SimpleNamespace(max_model_len=512)
    config = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(image_cache_memory="60MiB"))
    assert device_module._cache_memory(config, model, ops, vision) == 100 << 20
    assert encoded == [(512, 4)]
    assert device_module._cache_memory(config, model, ops, None) == 200 << 20
