"""A server's /metrics: the counters of a run, and the pool that vLLM made."""

from __future__ import annotations

from kvtune.lab.engine.front_end.server import counters, pool

TEXT = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="model"} 120.0
vllm:generation_tokens_total{engine="1",model_name="model"} 80.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="model"} 7.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="model"} 1.0
vllm:prefix_cache_hits_total{engine="0",model_name="model"} 1.6e+01
vllm:cache_config_info{block_size="16",engine="0",note="a \\"quoted\\", text",num_gpu_blocks="32768"} 1.0
http_request_duration_seconds_sum{handler="/v1/completions",method="POST"} 0.02
process_start_time_seconds 1.7e+09
"""


def test_counters_are_summed_over_engines_and_reasons() -> None:
    assert counters(TEXT) == {"generation_tokens": 200.0, "finished": 8.0, "hits": 16.0}


def test_the_pool_is_as_vllm_resolved_it() -> None:
    assert pool(TEXT) == {"num_blocks": 32768, "block_size": 16}
    assert pool("") == {}
    assert pool('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0') == {"block_size": 16}
