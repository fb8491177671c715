"""Splits a trial's settings into vLLM's flags and the core's settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.analysis.study import Bench, Settings
from kvtune.engine.flags import flag_value
from kvtune.engine.offload_flags import joined, without_tier
from kvtune.engine.platform import engines
from kvtune.errors import UsageError
from kvtune.knobs import CORE, TIER, TIER_SIZE
from kvtune.recipe import Scalar, check_engine_settings, engine_flags
from kvtune.tune.space.model import packed_pool
from kvtune.vllm.platforms import device


def core_part(settings: Mapping[str, Scalar]) -> Settings:
    return {name: value for name, value in settings.items() if name in CORE}


def check_settings(settings: Mapping[str, Scalar], where: str) -> None:
    """Raise UsageError if a file's trial has a setting that is neither the core's nor one that a file may set."""
    from kvtune.core.settings import parse

    check_engine_settings(engine_part(settings), where, "a trial's settings")
    try:
        parse(core_part(settings))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error


def packing_failure(summary: Mapping[str, Any]) -> str:
    """Return why the engine did not pack blocks although the settings ask for it; "" if there is no such failure."""
    core = summary.get("core", {})
    if core.get("parts", {}).get("packed") is not False:
        return ""
    notes = [str(note) for note in summary.get("notes", [])]
    return next(
        (n for n in notes if n.startswith("packed: ")), "packed: the model has no states beside attention"
    )


def engine_part(settings: Mapping[str, Scalar]) -> Settings:
    """Return the settings that are vLLM's own flags, by their names with underscores."""
    return {name: value for name, value in settings.items() if name not in CORE}


def flags_of(bench: Bench, settings: Mapping[str, Scalar]) -> list[str]:
    """Return vLLM's flags for a trial: the bench's flags, overridden by the trial's.

    A pool given in blocks keeps its size in tokens if the block size changes, and in bytes if blocks are packed.
    """
    flags = list(bench.engine_args)
    changed = engine_part(settings)
    block = changed.get("block_size")
    given = flag_value(flags, "num-gpu-blocks-override")
    if (
        block is not None
        and given is not None
        and bench.block_tokens
        and "num_gpu_blocks_override" not in changed
    ):
        pool, size = _whole(given, "num-gpu-blocks-override"), _whole(block, "block-size")
        changed["num_gpu_blocks_override"] = max(2, pool * bench.block_tokens // size)
    if settings.get("packed") and given is not None and "num_gpu_blocks_override" not in changed:
        changed["num_gpu_blocks_override"] = packed_pool(
            bench.model,
            _whole(given, "num-gpu-blocks-override"),
            bench.block_tokens,
            _whole(settings.get("states_per_block", 1), "core.states_per_block"),
            engines(
                device(bench.like_device) if bench.like_device else None, timed=bench.engine_on == "host"
            ),
            state_dtype=flag_value(flags, "mamba-ssm-cache-dtype") or "auto",
        )
    if changed.get(TIER_SIZE) == 0:
        flags = without_tier(flags)
        changed = {n: v for n, v in changed.items() if n not in (TIER_SIZE, *TIER)}
    return joined(flags, engine_flags(changed))


def _whole(value: Scalar, flag: str) -> int:
    """Return a flag's value as a number from 1 up. UsageError for any other value, as a study may be from anyone."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text)):
        raise UsageError(f"--{flag} {text[:40]} is not a whole number from 1 up", "give for instance 3000")
    return int(text)
