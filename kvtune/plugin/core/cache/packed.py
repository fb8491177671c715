"""Small blocks for hybrid models: all attention layers' pages of a block together hold k states. Off by default.

Runs where vLLM decides block sizes and layouts: workers, EngineCore, a simulator. The layout (packed groups of a
block-outermost cache), block tables, allocator and kernels are vLLM's own: vLLM chooses this layout if state pages are
not padded to an attention page. An engine with an untested feature keeps stock's blocks, and the core's state names
the feature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil, lcm
from typing import TYPE_CHECKING

from kvtune.base.errors import KvtuneError
from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.vllm.names import state_step
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import (
    Backend,
    HybridPlatform,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    VllmConfig,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

logger = logging.getLogger("vllm.kvtune")

PART = "cache.packed"

LAYOUT_OF_SIBLING = {"LBHNC": "BLHNC", "LBNHC": "BLNHC"}
"""Layer-outermost layout -> block-outermost one with the same pages. A kernel that uses strides can read either."""

Groups = list[KVCacheGroupSpec] | None

GROUPS = "vllm.v1.core.kv_cache_utils._get_packed_kv_cache_groups"

STRIDED = ("CPU_ATTN",)
"""Backends that list only a layer-outermost layout, but were tested to read its block-outermost sibling correctly."""


def install(settings: CoreSettings) -> None:
    """If a switch is on, wrap the functions in which vLLM sizes blocks, lists layouts and groups layers."""
    STATE.patches.undo(PART)
    if not (settings.whole_states or settings.packed):
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker import worker_base

    from kvtune.plugin.vllm.names import home_of

    _install_whole_states(asked=settings.whole_states)

    def wrap_sized(stock_groups: Callable[..., Groups]) -> Callable[..., Groups]:
        def groups(vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]) -> Groups:
            # After its start an EngineCore completes its config again. On a CPU that sets the usual block of 128 unless
            # the user gave one, and the scheduler would end chunks there, not where a block's state is kept.
            vllm_config.cache_config.user_specified_block_size = True
            return stock_groups(vllm_config, kv_cache_spec)

        return groups

    if current_platform.is_cpu():
        STATE.patches.wrap(PART, home_of(GROUPS), GROUPS.rpartition(".")[2], wrap_sized)
    if not settings.packed:
        return
    state.part("packed", False)  # until vLLM aligns or groups the layers of a model with states

    def wrap_align(stock_align: Callable[..., None]) -> Callable[..., None]:
        def align(cls: HybridPlatform, vllm_config: VllmConfig, backend_cls: type) -> None:
            requested = vllm_config.cache_config.block_size
            stock_align(cls, vllm_config, backend_cls)
            why = refusal(vllm_config, cls._find_non_ssm_backends(vllm_config))
            if not why:
                why = _shrink(vllm_config, cls._find_non_ssm_backends(vllm_config), settings, requested)
            state.part("packed", not why, why)
            if why:
                logger.warning("kvtune: blocks stay stock's: %s", why)

        return align

    def wrap_layouts(
        stock_layouts: Callable[[Sequence[Backend]], list[KVCacheLayout]],
    ) -> Callable[[Sequence[Backend]], list[KVCacheLayout]]:
        def layouts(backends: Sequence[Backend]) -> list[KVCacheLayout]:
            supported = stock_layouts(backends)
            return _block_outermost(supported) if state.state()["parts"].get("packed") else supported

        return layouts

    def wrap_groups(stock_groups: Callable[..., Groups]) -> Callable[..., Groups]:
        def groups(vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]) -> Groups:
            packed = stock_groups(vllm_config, kv_cache_spec)
            if not packed:
                return packed
            plain = [_plain(group) for group in packed]
            # EngineCore does not size blocks (its workers do): it first sees the layout here.
            if any(isinstance(group.kv_cache_spec, MambaSpec) for group in plain):
                state.part("packed", True)
            return plain

        return groups

    name = "_align_hybrid_block_size"
    platform = next(kind for kind in type(current_platform).__mro__ if name in vars(kind))
    STATE.patches.wrap(PART, platform, name, wrap_align)
    for module in (utils, worker_base):
        STATE.patches.wrap(PART, module, "get_supported_kv_cache_layouts", wrap_layouts)
    STATE.patches.wrap(PART, home_of(GROUPS), GROUPS.rpartition(".")[2], wrap_groups)


def refusal(vllm_config: VllmConfig, backends: Iterable[Backend]) -> str:
    """Return why this engine must keep stock's blocks; empty if it can have small ones."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if vllm_config.model_config.use_mla:
        return "attention with a latent cache (MLA) was not tried"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector moves pages by stock's layout"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallel was not tried"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallel: ranks with other layers would make other blocks"
    if cache.cache_dtype != "auto":
        return f"--kv-cache-dtype {cache.cache_dtype} was not tried"
    if cache.kv_cache_dtype_skip_layers:
        return "several KV dtypes in one cache were not tried"
    mode: str = cache.mamba_cache_mode  # other versions know other modes
    if mode == "all":
        return "--mamba-cache-mode all keeps every block's state"
    if vllm_config.speculative_config is not None:
        return "speculative decoding was not tried"
    for backend in backends:
        layouts = backend.supported_kv_cache_layouts()
        if layouts is None or any(layout.is_block_outermost for layout in layouts):
            continue
        if backend.get_name() not in STRIDED:
            return f"attention backend {backend.get_name()} has no layout with whole blocks side by side"
    return ""


def _shrink(
    vllm_config: VllmConfig, backends: Sequence[Backend], settings: CoreSettings, requested: int
) -> str:
    """Set the aggregate block size. Return why not if the kernels do not take it, else an empty text."""
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    cache = vllm_config.cache_config
    stock, padded = cache.block_size, cache.mamba_page_size_padded
    cache.mamba_page_size_padded = None
    specs = list(get_kv_cache_spec(vllm_config).values())
    wanted = requested if cache.user_specified_block_size else 0
    block, why = block_of(specs, backends, settings.states_per_block, wanted, state_step(vllm_config))
    if why:
        cache.mamba_page_size_padded = padded
        return why
    cache.block_size = block
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = block
    logger.info("kvtune: blocks of %d tokens (stock: %d)", block, stock)
    return ""


def block_of(
    specs: Sequence[KVCacheSpec],
    backends: Sequence[Backend],
    states_per_block: int,
    wanted: int,
    state_step: int = 1,
) -> tuple[int, str]:
    """Return the smallest block (tokens) whose attention pages together hold `states_per_block` states; or 0 and why.

    A block has at least `wanted` tokens. In vLLM's own rule, one attention page must hold one state. `state_step`: the
    kernels of the states keep one only at its multiples.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if len(attention) + len(states) != len(specs) or not states or not attention:
        return 0, "layers that are neither attention nor states"
    if len({(type(s), s.page_size_bytes) for s in attention}) > 1 or len(set(states)) > 1:
        return 0, "layers of one kind with pages of several sizes"
    if states_per_block > len(states):
        return 0, f"core.states_per_block {states_per_block} of a model with {len(states)} state layers"
    token_bytes = sum(spec.page_size_bytes // spec.block_size for spec in attention)
    sizes = [list(backend.get_supported_kernel_block_sizes()) for backend in backends]
    step = lcm(
        state_step, *(min(s if isinstance(s, int) else s.base for s in taken) for taken in sizes if taken)
    )
    block = step * ceil(states_per_block * states[0].page_size_bytes / (step * token_bytes))
    block = max(block, step * ceil(wanted / step))
    for backend, taken in zip(backends, sizes, strict=True):
        if taken and not any(s == block if isinstance(s, int) else block % s.base == 0 for s in taken):
            legal = ", ".join(str(s) if isinstance(s, int) else f"multiples of {s.base}" for s in taken)
            return 0, f"the kernels of {backend.get_name()} take blocks of {legal} tokens, not of {block}"
    return block, ""


def _block_outermost(layouts: Sequence[KVCacheLayout]) -> list[KVCacheLayout]:
    """Return the layouts that keep a block's pages side by side; if there are none, the siblings that do."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    outermost = [layout for layout in layouts if layout.is_block_outermost and layout.is_block_compact]
    if outermost:
        return outermost
    siblings = [KVCacheLayout[LAYOUT_OF_SIBLING[x.name]] for x in layouts if x.name in LAYOUT_OF_SIBLING]
    if not siblings:
        raise KvtuneError(f"no block-outermost layout among {layouts}", "set core.packed=false")
    return siblings


def _plain(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    """Return the group with its layers' one spec, as in stock's groups: vLLM often tests for MambaSpec by type."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec, plain = group.kv_cache_spec, group
    if isinstance(spec, UniformTypeKVCacheSpecs) and len(set(spec.kv_cache_specs.values())) == 1:
        plain = replace(group, kv_cache_spec=spec.first_spec)
    return plain


def _install_whole_states(*, asked: bool) -> None:
    """End prefill chunks where a state is kept: on a CPU, Mamba-2 has none inside a chunk, and stock would crash."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        STATE.patches.replace(PART, MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
    elif asked:
        state.note("whole_states: only hybrids on a CPU need it, nothing is changed on this device")
