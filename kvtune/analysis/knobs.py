"""The meaning of each knob in one line with its unit, for all places that print knobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtune.core.settings import KNOBS

API_SERVERS = "api_server_count"
"""A search with this knob runs `vllm serve` as the front end of all trials, stock's too."""

ENGINE_KNOBS = {
    "block_size": "tokens per block",
    "prefix_match_unit": "hits are multiples of this many tokens; a divisor of the block size",
    "prefix_cache_retention_interval": "tokens between the windows and states that are kept; none: keep all",
    "max_num_batched_tokens": "most tokens in a step; longer prompts are cut into chunks of it",
    "max_num_seqs": "most requests in a step",
    "prefill_schedule_interval": "start new prefills only every N steps while others decode (1: every step)",
    "kv_offloading_size": "host memory (GiB) for KV blocks that the pool evicts; 0: off",
    "eviction_policy": "which KV blocks host memory evicts first: lru or arc",
    "blocks_per_chunk": "blocks that host memory stores, evicts and loads together",
    "store_threshold": "how often a prompt must offer a chunk before it is stored; below 2: at once",
    "stream_interval": "tokens per streamed chunk after the first token; does not affect hits",
    API_SERVERS: "HTTP servers of `vllm serve` in front of the engine; does not affect hits",
    "enable_prefix_caching": "whether prompts are cached for later requests",
}
"""Settings of vLLM that a search can try."""
ENGINE_UNITS = {
    "block_size": "tokens",
    "prefix_match_unit": "tokens",
    "prefix_cache_retention_interval": "tokens",
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests",
    "prefill_schedule_interval": "steps",
    "kv_offloading_size": "GiB",
    "blocks_per_chunk": "blocks",
    "store_threshold": "times",
    "stream_interval": "tokens",
    "api_server_count": "servers",
}


@dataclass(frozen=True, slots=True)
class KnobNote:
    """A knob's name, unit and meaning. `unit` is empty for switches, choices and shares."""

    name: str
    unit: str
    help: str

    @property
    def head(self) -> str:
        """The name with its unit, for the head of a column."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


def knob_note(name: str) -> KnobNote:
    if name in KNOBS:
        return KnobNote(name, KNOBS[name].unit, KNOBS[name].help)
    help = ENGINE_KNOBS.get(name, f"vLLM's --{name.replace('_', '-')}")
    return KnobNote(name, ENGINE_UNITS.get(name, ""), help)


def knob_lines(names: Iterable[str]) -> list[str]:
    """Return one line per knob, such as `  pin_window, tokens   tokens kept before a point ..`."""
    notes = [knob_note(name) for name in names]
    width = max((len(note.head) for note in notes), default=0)
    return [f"  {note.head:<{width}}   {note.help}" for note in notes]
