"""Reads a run's counters from a server's /metrics, which sum up all API servers. Pure."""

from __future__ import annotations

import re

COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
    "prompt_tokens": "vllm:request_prompt_tokens_sum",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""vLLM's counters by their names in a run."""

_LINE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def counters(text: str) -> dict[str, float]:
    """Return the counters that the server has, by the run's names, summed over engines and finish reasons."""
    sums: dict[str, float] = {}
    for name, _, value in _LINE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {ours: sums[theirs] for ours, theirs in COUNTERS.items() if theirs in sums}


def pool(text: str) -> dict[str, int]:
    """Return the number and the size of the KV cache's blocks, as vLLM resolved them at start-up."""
    labels = next((found for name, found, _ in _LINE.findall(text) if name == "vllm:cache_config_info"), "")
    said = dict(_LABEL.findall(labels))
    names = {"num_blocks": "num_gpu_blocks", "block_size": "block_size"}
    return {ours: int(said[theirs]) for ours, theirs in names.items() if said.get(theirs, "").isdigit()}
