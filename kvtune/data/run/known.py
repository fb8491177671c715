"""The fields of a header's free-form parts that analyses read, with their types, checked when a run is read.

Other fields in these parts (such as most of vLLM's resolved settings) are not checked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvtune.data.run.ranges import Count, Seconds, Whole


class _Group(msgspec.Struct, frozen=True):
    kind: str = ""
    block_size: Count = 0
    sliding_window: Count | None = None
    layers: Count = 0
    page_bytes: Count = 0
    block_bytes: Count = 0


class _Tier(msgspec.Struct, frozen=True):
    bytes: Count = 0
    chunks: Count = 0
    policy: str = ""


class _Settings(msgspec.Struct, frozen=True):
    hit_alignment_tokens: Count | None = None
    retention_interval: Whole | None = None
    max_num_seqs: Count | None = None
    tiers: list[str] | None = None
    offload: _Tier | None = None


class _Types(msgspec.Struct, frozen=True, rename={"last": "$tuple"}):
    last: list[dict[str, Any]] = []


class _Fields(msgspec.Struct, frozen=True):
    dtypes: _Types | None = None


class _Spec(msgspec.Struct, frozen=True):
    fields: _Fields = _Fields()


class _Specs(msgspec.Struct, frozen=True):
    specs: list[_Spec] = []


class _Engine(msgspec.Struct, frozen=True):
    settings: _Settings = _Settings()
    groups: list[_Group] = []
    kv_specs: _Specs = _Specs()
    block_size: Count = 0
    num_blocks: Count = 0
    engines: Count = 1


class _Core(msgspec.Struct, frozen=True):
    counters: dict[str, Whole] = {}


class _Collector(msgspec.Struct, frozen=True):
    thresholds: list[Whole] | None = None
    frozen: Count = 0


class _Process(msgspec.Struct, frozen=True):
    gc: _Collector = _Collector()


class _Known(msgspec.Struct, frozen=True):
    engine: _Engine
    core: _Core
    processes: list[_Process] = []
    wall_s: Seconds = 0.0
    startup_s: Seconds = 0.0


def check_known(header: dict[str, Any]) -> None:
    """Check a decoded header. msgspec.ValidationError names the field that has a wrong type."""
    msgspec.convert(header, _Known)
