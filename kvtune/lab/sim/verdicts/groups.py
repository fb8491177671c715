"""A scheduler's KV cache groups as prefix-cache lookups use them. Runs in processes that have vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune.plugin.vllm.names import dropping_groups
from kvtune.plugin.vllm.types import Coordinator, Scheduler, has_several_specs

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True)
class LookupGroup:
    """The KV cache groups that have the same spec and are looked up together."""

    label: str
    spec: KVCacheSpec
    ids: list[int]
    manager_class: type[SingleTypeKVCacheManager]
    use_eagle: bool
    block_tokens: int
    dcp: int
    pcp: int
    draft: bool  # holds only layers of the draft model

    def needed_ends(self, boundary: int) -> Sequence[int]:
        """Return the ends (in tokens) of the blocks that a hit up to `boundary` needs, in the prompt's order."""
        from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

        size = self.block_tokens
        first = size
        if isinstance(self.spec, MambaSpec):
            return range(boundary, boundary + 1)
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(boundary - (self.spec.sliding_window - 2) // size * size, size)
        whole = range(first, boundary + 1, size)
        # With a match unit smaller than a block, a hit may end inside a block, at a unit with a hash.
        return whole if boundary % size == 0 else [*whole, boundary]


def hit_alignment(coordinator: Coordinator) -> int:
    """Return the number of tokens of which every hit of this coordinator is a multiple."""
    tokens = getattr(coordinator, "_cache_hit_alignment_tokens", None)
    return int(tokens if tokens is not None else coordinator.scheduler_block_size)


def drafters_groups(scheduler: Scheduler) -> frozenset[int]:
    """Return the indexes of the KV cache groups that hold only layers of the draft model."""
    config = scheduler.vllm_config
    if config.speculative_config is None:
        return frozenset()
    layers = config.model_config.hf_text_config.num_hidden_layers
    groups = scheduler.kv_cache_config.kv_cache_groups
    return frozenset(
        i for i, g in enumerate(groups) if all(is_draft_layer(name, layers) for name in g.layer_names)
    )


def is_draft_layer(name: str, target_layers: int) -> bool:
    """Whether a layer is the draft model's: its number follows the model's own layers, or its name has a prefix."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdigit()), 0)
    return words[0] in ("draft_model", "mtp") or number >= target_layers


def lookup_groups(coordinator: Coordinator, drafts: Collection[int] = ()) -> list[LookupGroup]:
    """Return the groups that are looked up, one entry per spec. `drafts`: the indexes of the draft model's groups."""
    managers = coordinator.single_type_managers
    by_spec: Iterable[Any]
    if has_several_specs(coordinator):
        by_spec = coordinator.attention_groups
    else:  # one group, or no cache
        dropping = dropping_groups(coordinator)
        by_spec = [
            (manager.kv_cache_spec, [i], type(manager), i in dropping)
            for i, manager in enumerate(managers)
            if manager.kv_cache_spec.prefix_cacheable
        ]
    groups = []
    for spec, ids, manager_class, use_eagle in by_spec:
        manager = managers[ids[0]]
        draft = all(i in drafts for i in ids)
        groups.append(
            LookupGroup(
                label=group_label(spec) + (" of the draft model" if draft else ""),
                spec=spec,
                ids=list(ids),
                manager_class=manager_class,
                use_eagle=bool(use_eagle),
                block_tokens=manager.block_size,
                dcp=manager.dcp_world_size,
                pcp=manager.pcp_world_size,
                draft=draft,
            )
        )
    return groups


def group_label(spec: KVCacheSpec) -> str:
    """Return a KV cache group's kind in words, for instance `sliding window 512`."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = str(get_kv_cache_spec_kind(spec).value)
    if kind == "mamba":
        return "state"
    window = getattr(spec, "sliding_window", None)
    return f"{kind.replace('_', ' ')}{f' {window}' if window and kind.startswith('sliding') else ''}"
