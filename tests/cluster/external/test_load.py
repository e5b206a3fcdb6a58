"""How busy servers are, from pages such as they really show."""

from __future__ import annotations

import pytest

from penstock.cluster.external.server import MAX_SAMPLES, ServerLoad, read_load

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_requests_running_created{engine="0"} 1.7e9
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
"""
TGI = """# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 6
tgi_queue_size 1
"""
LLAMA_CPP = """# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 9
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (VLLM, ServerLoad(5, 4, 0.75)),
        (SGLANG, ServerLoad(5, 2, 0.28)),
        (TGI, ServerLoad(6, 1)),
        (LLAMA_CPP, ServerLoad(1, 9)),
        ('nv_inference_pending_request_count{model="m"} 8\n', ServerLoad(0, 8)),
        ("process_cpu_seconds_total 12\n", None),
        ("", None),
    ],
)
def test_each_kind_of_server(page: str, load: ServerLoad | None) -> None:
    assert read_load(page) == load


def test_a_page_that_is_none() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        read_load("vllm:num_requests_running{} many\n")


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e400"])
def test_a_figure_that_is_none(value: str) -> None:
    with pytest.raises(ValueError, match="no figure"):
        read_load(f"vllm:num_requests_running {value}\n")


def test_labels_may_hold_anything() -> None:
    page = 'vllm:num_requests_running{model_name="a } 7 \\" b"} 3.0 1700000000000\nvllm:num_requests_waiting -2\n'
    assert read_load(page) == ServerLoad(3, 0)


def test_a_page_with_a_line_for_each_of_very_many_things_is_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        read_load(
            "".join(f'vllm:num_requests_running{{m="{number}"}} 1\n' for number in range(MAX_SAMPLES + 1))
        )
