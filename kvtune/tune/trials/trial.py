"""One setting tried once, and the bench that all trials of a study share. Plain data: journalled as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvtune.engine.flags import flag_value
from kvtune.recipe import engine_flags
from kvtune.tune.space.model import packed_pool
from kvtune.tune.space.values import Settings, Value

Place = Literal["sim", "engine"]
Role = Literal["trial", "baseline"]


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every trial of a study. `core_settings` are fixed, `engine_args` vLLM's own flags.

    block_tokens: the block size that `--num-gpu-blocks-override` in `engine_args` counts in.
    """

    model: str
    spec: str
    seed: int
    workload_hash: str
    core: Literal["kvtune", "stock"] = "kvtune"
    core_settings: Settings = {}
    engine_args: list[str] = []
    block_tokens: int = 0
    dummy: bool = False
    vllm: str = ""
    slo: dict[str, float] = {}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """`core` is stock for the baseline. `summary` is the run's `--json` object; empty where there was no run."""

    number: int
    settings: Settings
    on: Place
    core: Literal["kvtune", "stock"] = "kvtune"
    role: Role = "trial"
    state: Literal["complete", "partial", "failed"] = "complete"
    why: str = ""
    elapsed_s: float = 0.0
    run_file: str = ""
    seed: int = 0
    summary: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """What makes two trials the same work."""
        return json.dumps([self.on, self.core, self.role, self.settings], sort_keys=True)

    def plain(self) -> dict[str, Any]:
        """For `--json`: the run's fields and the trial's own."""
        own = msgspec.to_builtins(self)
        own.pop("summary")
        return {**self.summary, **own}


def core_part(settings: Mapping[str, Value]) -> Settings:
    """The settings that the core takes."""
    from kvtune.core.settings import KNOBS

    return {name: value for name, value in settings.items() if name in KNOBS}


def refused(summary: Mapping[str, Any]) -> str:
    """Why a run is not a trial of the settings that it was asked for: blocks that the engine could not pack; or ""."""
    core = summary.get("core", {})
    if core.get("parts", {}).get("packed") is not False:
        return ""
    notes = [str(note) for note in summary.get("notes", [])]
    return next(
        (n for n in notes if n.startswith("packed: ")), "packed: the model has no states beside attention"
    )


def engine_part(settings: Mapping[str, Value]) -> Settings:
    """The settings that are vLLM's own flags, by their names with underscores."""
    from kvtune.core.settings import KNOBS

    return {name: value for name, value in settings.items() if name not in KNOBS}


def flags_of(bench: Bench, settings: Mapping[str, Value]) -> list[str]:
    """vLLM's flags of a trial: the bench's, then the trial's own, which win.

    A pool that was given in blocks keeps its size in tokens when the block size changes, in bytes when it is packed.
    """
    flags = list(bench.engine_args)
    own = engine_part(settings)
    block = own.get("block_size")
    given = flag_value(flags, "num-gpu-blocks-override")
    if (
        block is not None
        and given is not None
        and bench.block_tokens
        and "num_gpu_blocks_override" not in own
    ):
        own["num_gpu_blocks_override"] = max(2, int(given) * bench.block_tokens // int(block))
    if settings.get("packed") and given is not None and "num_gpu_blocks_override" not in own:
        own["num_gpu_blocks_override"] = packed_pool(
            bench.model,
            int(given),
            bench.block_tokens,
            int(settings.get("states_per_block", 1)),
            state_dtype=flag_value(flags, "mamba-ssm-cache-dtype") or "auto",
        )
    return [*flags, *engine_flags(own)]
