"""The fields of a header's free-form parts that analyses read, with their types, checked when a run is read.

Other fields in these parts (such as most of vLLM's resolved settings) are not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

LAST_S = 1e12
"""Times in seconds or microseconds are below this limit, so that sums and products of them stay finite."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LAST_S)]


class _Group(msgspec.Struct, frozen=True):
    kind: str = ""
    block_size: Count = 0
    sliding_window: Count | None = None
    layers: Count = 0
    page_bytes: Count = 0


class _Tier(msgspec.Struct, frozen=True):
    bytes: Count = 0
    chunks: Count = 0
    policy: str = ""


class _Settings(msgspec.Struct, frozen=True):
    hit_alignment_tokens: Count | None = None
    retention_interval: int | None = None
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


class _CoreSettings(msgspec.Struct, frozen=True):
    admission_age_s: Seconds = 0.0


class _Core(msgspec.Struct, frozen=True):
    settings: _CoreSettings = _CoreSettings()
    counters: dict[str, int] = {}


class _Collector(msgspec.Struct, frozen=True):
    thresholds: list[int] | None = None
    frozen: Count | None = None


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
