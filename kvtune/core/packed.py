"""Small blocks for hybrids: a block is as large as all attention layers' pages together, and holds k states.

Runs where vLLM settles block sizes and layouts (workers, EngineCore, a simulator). vLLM has the layout (packed groups
of a block-outermost cache) and reaches it by itself once state pages are no longer padded to an attention page: block
tables, allocator and kernels are stock's. What it cannot do is refused by name, and that engine runs stock's blocks.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from math import ceil, lcm
from typing import Any

from kvtune.core import state
from kvtune.core.replaced import Replaced
from kvtune.core.settings import CoreSettings
from kvtune.errors import KvtuneError

logger = logging.getLogger("vllm.kvtune")

REPLACED = Replaced()

LAYOUT_OF_SIBLING = {"LBHNC": "BLHNC", "LBNHC": "BLNHC"}
"""A page's inside is the same in both: a kernel that reads strides reads either."""

STRIDED = ("CPU_ATTN",)
"""Backends that name only a layer-outermost layout, and were seen to read its block-outermost sibling right."""


def install(settings: CoreSettings) -> None:
    """Wrap where vLLM sizes blocks, lists layouts and groups layers; by default both switches are off: no wraps."""
    REPLACED.undo()
    if settings.whole_states or settings.packed:
        _install_whole_states()
    if not settings.packed:
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker import worker_base

    stock_align = vars(_owner(type(current_platform), "_align_hybrid_block_size"))[
        "_align_hybrid_block_size"
    ].__func__

    @functools.wraps(stock_align)
    def align(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        asked = vllm_config.cache_config.block_size
        stock_align(cls, vllm_config, backend_cls)
        why = refusal(vllm_config, cls._find_non_ssm_backends(vllm_config))
        if not why:
            why = _shrink(vllm_config, cls._find_non_ssm_backends(vllm_config), settings, asked)
        state.part("packed", not why, why)
        if why:
            logger.warning("kvtune: blocks stay stock's: %s", why)

    REPLACED.put(
        _owner(type(current_platform), "_align_hybrid_block_size"),
        "_align_hybrid_block_size",
        classmethod(align),
    )

    stock_layouts = utils.get_supported_kv_cache_layouts

    @functools.wraps(stock_layouts)
    def layouts(backends: Any) -> Any:
        found = stock_layouts(backends)
        return _block_outermost(found) if state.state()["parts"].get("packed") else found

    for module in (utils, worker_base):
        REPLACED.put(module, "get_supported_kv_cache_layouts", layouts)

    stock_groups = kv_cache_utils._get_packed_kv_cache_groups

    @functools.wraps(stock_groups)
    def groups(vllm_config: Any, kv_cache_spec: Any) -> Any:
        found = stock_groups(vllm_config, kv_cache_spec)
        return found and [_plain(group) for group in found]

    REPLACED.put(kv_cache_utils, "_get_packed_kv_cache_groups", groups)


def uninstall() -> None:
    """vLLM's own functions are back."""
    REPLACED.undo()


def refusal(vllm_config: Any, backends: Any) -> str:
    """Why this engine cannot have small blocks; empty when it can."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if vllm_config.model_config.use_mla:
        return "attention with a latent cache (MLA) was not tried"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector moves pages by stock's layout"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallel was not tried"
    if cache.cache_dtype != "auto":
        return f"--kv-cache-dtype {cache.cache_dtype} was not tried"
    if cache.kv_cache_dtype_skip_layers:
        return "several KV dtypes in one cache were not tried"
    if cache.mamba_cache_mode == "all":
        return "--mamba-cache-mode all keeps every block's state"
    if vllm_config.speculative_config is not None:
        return "speculative decoding was not tried"
    for backend in backends:
        named = backend.supported_kv_cache_layouts()
        if named is None or any(layout.is_block_outermost for layout in named):
            continue
        if backend.get_name() not in STRIDED:
            return f"attention backend {backend.get_name()} has no layout with whole blocks side by side"
    return ""


def _shrink(vllm_config: Any, backends: Any, settings: CoreSettings, asked: int) -> str:
    """Set the aggregate block size; the reason where the kernels do not take it."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    cache = vllm_config.cache_config
    stock = cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded
    cache.mamba_page_size_padded = None
    specs = get_kv_cache_spec(vllm_config).values()
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    why, block = "", 0
    if len(attention) + len(states) != len(specs) or not states or not attention:
        why = "layers that are neither attention nor states"
    elif len({(type(s), s.page_size_bytes) for s in attention}) > 1 or len(set(states)) > 1:
        why = "layers of one kind with pages of several sizes"
    else:
        token_bytes = sum(spec.page_size_bytes // spec.block_size for spec in attention)
        sizes = [s for b in backends for s in b.get_supported_kernel_block_sizes()]
        steps = [s.base for s in sizes if isinstance(s, MultipleOf)]
        fixed = [s for s in sizes if not isinstance(s, MultipleOf)]
        step = lcm(*steps) if steps else min(fixed)
        block = step * ceil(settings.states_per_block * states[0].page_size_bytes / (step * token_bytes))
        if cache.user_specified_block_size:
            block = max(block, step * ceil(asked / step))
        if fixed and block not in fixed:
            why = f"the attention kernels take blocks of {sorted(set(fixed))} tokens, not of {block}"
    if why:
        cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = stock
        return why
    cache.block_size = block
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = block
    logger.info("kvtune: blocks of %d tokens (stock: %d)", block, stock[0])
    return ""


def _block_outermost(found: Any) -> Any:
    """The layouts of `found` (or their siblings) in which a block's pages lie side by side."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    own = [layout for layout in found if layout.is_block_outermost and layout.is_block_compact]
    if own:
        return own
    siblings = [KVCacheLayout[LAYOUT_OF_SIBLING[x.name]] for x in found if x.name in LAYOUT_OF_SIBLING]
    if not siblings:
        raise KvtuneError(f"no block-outermost layout among {found}", "set core.packed=false")
    return siblings


def _plain(group: Any) -> Any:
    """The group with its layers' one spec, as stock's groups have it: much of vLLM asks for a MambaSpec by type."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs) and len(set(spec.kv_cache_specs.values())) == 1:
        return replace(group, kv_cache_spec=spec.first_spec)
    return group


def _install_whole_states() -> None:
    """On the CPU a Mamba-2 chunk has no state in its middle to export, and stock crashes where it wants one."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        REPLACED.put(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)


def _owner(cls: type, name: str) -> Any:
    return next(base for base in cls.__mro__ if name in vars(base))
