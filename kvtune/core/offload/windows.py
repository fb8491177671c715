"""Which chunks of sliding windows and states a tier of host memory keeps, and which it holds while there is room.

A prompt resumes at a boundary only if the tier has the window before it, of each group with windows. By default vLLM
stores the window before a prompt's end and before a boundary that the pool saw shared. Behind kvtune's policy every
window is offered:

    needed   before the prompt's end, before what the pool saw shared, and before the point up to which the tier had
             the rest of the prompt: there a shared prefix ends
    spare    all others: stored while there is room, evicted first. A prefix is shared before anybody has seen it

EngineCore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.core.offload.vllm_types import Context, Key, OffloadConfig, RequestState, SchedulerSide

GROUP = 4
"""Bytes at a key's end that name its group."""


class Windows:
    """The groups of one tier whose chunks serve only prompts that resume within a window behind them."""

    def __init__(self, config: OffloadConfig, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self._unit = config.alignment_tokens or 1
        self._spans = {
            group.group_idx.to_bytes(GROUP, "big"): (
                group.tokens_per_chunk,
                group.tokens_per_chunk * group.sliding_window_size_in_chunks,
            )
            for group in config.kv_group_configs
            # States that the pool hands over are those that it keeps.
            if group.sliding_window_size_in_chunks is not None and not group.requires_cow_source
        }
        """By group: tokens of a chunk, and of the chunks that a hit needs."""

    def __len__(self) -> int:
        return len(self._spans)

    def spare(self, keys: Sequence[Key], context: Context, reached: int) -> list[Key]:
        """Chunks of windows that end at no boundary known so far. `reached`: tokens that groups without windows had."""
        request = self._requests[context.req_id].req
        known = (request.num_prompt_tokens - 1, request.shared_prefix_boundary, reached)
        boundaries = {at // self._unit * self._unit for at in known if at > 0}
        spare = []
        for key in keys:
            span = self._spans.get(key[-GROUP:])
            end = context.get_offload_key_position(key) if span else None
            if span is None or end is None:
                continue
            chunk, window = span
            if not any(end - chunk < at < end + window for at in boundaries):
                spare.append(key)
        return spare


def offer_all(side: SchedulerSide) -> None:
    """Have a new connector offer every window to kvtune's policy, where windows are kept as vLLM does by default."""
    config: Any = side.config
    manager: Any = side.manager
    if getattr(config, "retention_interval", None) != 0:
        return
    windows = Windows(config, side._req_status)
    if windows:
        side.config = config._replace(retention_interval=None)
        manager.keep_windows(windows)
