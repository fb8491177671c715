"""A scheduler's KV cache groups as prefix lookups see them. Runs where vLLM runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtune.core.compat.names import dropping_groups
from kvtune.sim.vllm_types import Coordinator

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True)
class LookupGroup:
    """KV cache groups of one spec, looked up together."""

    label: str
    spec: KVCacheSpec
    ids: list[int]
    manager_class: type[SingleTypeKVCacheManager]
    use_eagle: bool
    block_tokens: int
    dcp: int
    pcp: int

    def needed_ends(self, boundary: int) -> Sequence[int]:
        """The ends of the blocks that a hit at `boundary` needs, in the prompt's order."""
        from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

        size = self.block_tokens
        first = size
        if isinstance(self.spec, MambaSpec):
            return range(boundary, boundary + 1)
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(boundary - (self.spec.sliding_window - 2) // size * size, size)
        whole = range(first, boundary + 1, size)
        # With a match unit finer than a block, a hit may end inside one, under a hash of its own.
        return whole if boundary % size == 0 else [*whole, boundary]


def hit_alignment(coordinator: Coordinator) -> int:
    """Hits of this coordinator land on multiples of so many tokens."""
    tokens = getattr(coordinator, "_cache_hit_alignment_tokens", None)
    return int(tokens if tokens is not None else coordinator.scheduler_block_size)


def lookup_groups(coordinator: Coordinator) -> list[LookupGroup]:
    """The groups that vLLM's coordinator looks up, those of one spec as one."""
    managers = coordinator.single_type_managers
    by_spec = getattr(coordinator, "attention_groups", None)
    if by_spec is None:
        cacheable = [i for i, m in enumerate(managers) if m.kv_cache_spec.prefix_cacheable]
        by_spec = [
            (managers[i].kv_cache_spec, [i], type(managers[i]), i in dropping_groups(coordinator))
            for i in cacheable
        ]
    groups = []
    for spec, ids, manager_class, use_eagle in by_spec:
        manager = managers[ids[0]]
        groups.append(
            LookupGroup(
                group_label(spec),
                spec,
                list(ids),
                manager_class,
                bool(use_eagle),
                manager.block_size,
                manager.dcp_world_size,
                manager.pcp_world_size,
            )
        )
    return groups


def group_label(spec: KVCacheSpec) -> str:
    """A KV cache group's kind in words."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = str(get_kv_cache_spec_kind(spec).value)
    if kind == "mamba":
        return "state"
    window = getattr(spec, "sliding_window", None)
    return f"{kind.replace('_', ' ')}{f' {window}' if window and kind.startswith('sliding') else ''}"
