"""What a server measured of its own steps and requests, as columns of a recording. Pure.

vLLM publishes them as histograms. A recording keeps each one's sum and count since the server's start: step costs are
fitted to their differences (sim/served.py).
"""

from __future__ import annotations

from kvtune.watch.metrics import Scrape

SERVED = {
    "steps": "iteration_tokens_total_count",
    "step_tokens": "iteration_tokens_total_sum",
    "first_tokens": "time_to_first_token_seconds_count",
    "first_token_s": "time_to_first_token_seconds_sum",
    "gaps": "inter_token_latency_seconds_count",
    "gap_s": "inter_token_latency_seconds_sum",
    "answered": "request_decode_time_seconds_count",
    "queue_s": "request_queue_time_seconds_sum",
    "prefill_s": "request_prefill_time_seconds_sum",
    "decode_s": "request_decode_time_seconds_sum",
}
"""Columns of the table `server`, and the series that they hold."""


def served(scrape: Scrape) -> dict[str, float]:
    """Return the columns' values; 0 for a series that the server does not publish."""
    return {column: scrape.get(series) or 0.0 for column, series in SERVED.items()}
