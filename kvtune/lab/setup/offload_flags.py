"""Checks the flags of a tier of host memory before a process starts.

vLLM reports a wrong tier at the end of a traceback, or not at all: a tier smaller than one chunk stores nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtune.base.bounded import decode_json
from kvtune.base.errors import UsageError
from kvtune.base.units import size
from kvtune.data.file_flags import CONNECTOR, EXTRA
from kvtune.data.flags import flag_value, parse_flags, with_flag
from kvtune.data.knobs import TIER
from kvtune.data.recipe import Scalar
from kvtune.data.run.limits import free_memory_bytes

GIB = 1 << 30
SIZE, TRANSFER = "kv-offloading-size", "kv-transfer-config"
LEAST_FREE_BYTES = 64 << 20
"""A folder with less free space than this counts as full."""


def check_tier(words: Sequence[str]) -> None:
    """Raise UsageError if these flags give the tier a size that is not a positive number."""
    given = flag_value(words, SIZE)
    if given is None:
        return
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise UsageError(
            f"--{SIZE} {given} is no size of a tier",
            "give the host memory in GiB, for instance 4 or 0.5; without a tier leave the flag out",
        )


def check_room(words: Sequence[str], *, cpu_build: bool) -> None:
    """Raise UsageError if this machine has no room for the tier: in memory, or in the folder of a second tier."""
    given = flag_value(words, SIZE)
    if given is not None and float(given) * GIB > (free := free_memory_bytes()):
        raise UsageError(
            f"--{SIZE} {given} does not fit: {size(free)} of this machine's memory are free",
            "give a smaller tier, or end what else uses the memory; `--on sim` replays a tier of any size",
        )
    for folder in _folders(words):
        if cpu_build:
            raise UsageError(
                f"--{TRANSFER}: a CPU engine copies to host memory only, not to {folder}",
                "leave secondary_tiers out",
            )
        place = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(place).free
        if free < LEAST_FREE_BYTES:
            raise UsageError(
                f"the tier's folder {folder} has no room: {size(free)} are free",
                "make room there, or name another root_dir in secondary_tiers",
            )


def _folders(words: Sequence[str]) -> list[Path]:
    """Return the folders of second tiers, which are on a file system."""
    tiers = _extra(_transfer(words)).get("secondary_tiers")
    return [
        Path(str(tier["root_dir"])).expanduser().absolute()
        for tier in (tiers if isinstance(tiers, list) else [])
        if isinstance(tier, dict) and tier.get("type") == "fs" and tier.get("root_dir")
    ]


def _transfer(words: Sequence[str]) -> Mapping[str, object]:
    """Return the connector's configuration; {} if it is not JSON (vLLM's own parser then reports that)."""
    try:
        transfer = decode_json(flag_value(words, TRANSFER) or "{}")
    except ValueError:
        return {}
    return transfer if isinstance(transfer, dict) else {}


def _extra(transfer: Mapping[str, object]) -> Mapping[str, object]:
    extra = transfer.get(EXTRA)
    return extra if isinstance(extra, dict) else {}


def tier_given(words: Sequence[str]) -> dict[str, Scalar]:
    """Return those settings of a tier in these flags that a recipe may have."""
    extra = _extra(_transfer(words))
    given = {name: extra[name] for name in TIER if name in extra}
    return {name: value for name, value in given.items() if isinstance(value, (str, int, float))}


def joined(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Join two command lines; the second wins. If both configure a connector, its settings are merged."""
    first, second = _transfer(words), _transfer(more)
    if (first and _is_dotted(more)) or (second and _is_dotted(words)):
        raise UsageError(
            f"--{TRANSFER}.NAME cannot be combined with other settings of the tier",
            f"give them as JSON: --{TRANSFER} '{{\"{EXTRA}\": {{..}}}}'",
        )
    if not first or not second:
        return [*words, *more]
    extra = {**_extra(first), **_extra(second)}
    if "blocks_per_chunk" in _extra(second):
        extra.pop("block_size", None)  # the same size in tokens: vLLM takes only one of them
    both = json.dumps({**first, **second, EXTRA: extra}, separators=(",", ":"))
    return with_flag([*words, *more], TRANSFER, both)


def _is_dotted(words: Sequence[str]) -> bool:
    """Whether the flags set the connector's fields one by one, as vLLM allows: --kv-transfer-config.NAME VALUE."""
    return any(flag.name.startswith(f"{TRANSFER}.") for flag in parse_flags(words))


def without_tier(words: Sequence[str]) -> list[str]:
    """Return the command line without the flags of a tier of host memory."""
    if _transfer(words).get("kv_connector", CONNECTOR) == CONNECTOR:
        words = with_flag(words, TRANSFER, None)
    return with_flag(words, SIZE, None)
