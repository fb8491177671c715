"""The fields of a header's free-form parts that analyses read, with their types, checked when a run is read.

Other fields in these parts (such as most of vLLM's resolved settings) are not checked.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any

import msgspec

from kvtune.data.run.ranges import Count, Seconds, Whole


def _object(**fields: Any) -> Any:
    """Return the type of a JSON object in which each of these fields may be missing. `last` is called `$tuple`."""
    optional = [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in fields.items()]
    return msgspec.defstruct("Known", optional, frozen=True, rename={"last": "$tuple"})


def _list(item: Any) -> Any:
    return GenericAlias(list, (item,))


KNOWN = _object(
    engine=_object(
        settings=_object(
            hit_alignment_tokens=Count | None,
            retention_interval=Whole | None,
            max_num_seqs=Count | None,
            tiers=list[str] | None,
            offload=_object(bytes=Count, chunks=Count, policy=str) | None,
        ),
        groups=_list(
            _object(
                kind=str,
                block_size=Count,
                sliding_window=Count | None,
                layers=Count,
                page_bytes=Count,
                block_bytes=Count,
            )
        ),
        kv_specs=_object(
            specs=_list(_object(fields=_object(dtypes=_object(last=list[dict[str, Any]]) | None)))
        ),
        block_size=Count,
        num_blocks=Count,
        engines=Count,
    ),
    core=_object(counters=dict[str, Whole]),
    processes=_list(_object(gc=_object(thresholds=list[Whole] | None, frozen=Count))),
    wall_s=Seconds,
    startup_s=Seconds,
)


def check_known(header: dict[str, Any]) -> None:
    """Check a decoded header. msgspec.ValidationError names the field that has a wrong type."""
    msgspec.convert(header, KNOWN)
