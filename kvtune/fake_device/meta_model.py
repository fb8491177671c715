"""Gets a model's KV specs by building it on torch's meta device: shapes, no memory.

Runs in processes of `--on sim` and `--on host`.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from kvtune.errors import KvtuneError
from kvtune.vllm.config import KVCacheSpec, VllmConfig


def specs_of_model(vllm_config: VllmConfig) -> tuple[dict[str, KVCacheSpec], list[str], int]:
    """Return each layer's spec by name, the KV layouts that the backends support (best first), and the weights' bytes.

    The bytes are those of all ranks together. Also sets `cache_config.block_size` (and the block size of recurrent
    states) as an engine does when it starts on this platform.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    try:
        with set_current_vllm_config(vllm_config):
            _one_process_groups()
            with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
                built = [initialize_model(vllm_config), _drafter(vllm_config)]
            current_platform.update_block_size_for_backend(vllm_config)
            specs = of_one_rank(get_kv_cache_spec(vllm_config), vllm_config)
            layouts = [x.name for x in get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))]
    except KvtuneError:
        raise
    except Exception as error:
        architectures = getattr(vllm_config.model_config, "architectures", "?")
        raise KvtuneError(
            f"the model {architectures} cannot be built without weights: {type(error).__name__}: {_line(error)}",
            "profile it where it runs: `kvtune explain RUN` replays from the KV specs in the run file",
        ) from error
    weights = [w for model in built if model is not None for w in model.parameters()]
    return specs, layouts, sum(w.numel() * w.element_size() for w in weights)


def of_one_rank(specs: dict[str, KVCacheSpec], vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return the specs of one of several tensor-parallel ranks. `specs`: with all KV heads on one rank.

    KvtuneError for a model with states: the size of its blocks follows from one rank's states, which are unknown here.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return specs
    if not all(isinstance(spec, AttentionSpec) for spec in specs.values()):
        raise KvtuneError(
            f"the blocks of a model with recurrent states on {ranks} tensor-parallel ranks are not known without a run",
            "record one there, and replay it with --like RUN",
        )
    return {name: _share(spec, ranks) for name, spec in specs.items()}


def _share(spec: Any, ranks: int) -> KVCacheSpec:
    """Return a spec with one rank's KV heads, at least one. Latent attention (MLA) has one head, on every rank."""
    shared: KVCacheSpec = replace(spec, num_kv_heads=max(1, spec.num_kv_heads // ranks))
    return shared


def _drafter(vllm_config: VllmConfig) -> Any:
    """Build the draft model and register its layers beside the model's, as a worker does; None if there is none."""
    from vllm.config import replace
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return None
    model = speculative.draft_model_config
    if speculative.uses_draft_model():
        alone = replace(vllm_config, quant_config=None, model_config=model)
        return initialize_model(alone, prefix="draft_model")
    return initialize_model(vllm_config, model_config=model)


def _one_process_groups() -> None:
    """Set up the parallel groups that vLLM's layers ask for, each with this process as its only member."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # the groups depend on the model
    if parallel_state._WORLD is None:
        _world(parallel_state)
    parallel_state.initialize_model_parallel(1, 1)


def _world(parallel_state: ModuleType) -> None:
    """Set up torch's process group with a store in memory: a file would remain after a simulator exits."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
