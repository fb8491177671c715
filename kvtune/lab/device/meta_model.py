"""Gets a model's KV specs by building it on torch's meta device: shapes, no memory.

Runs in processes of `--on sim` and `--on host`.
"""

from __future__ import annotations

from typing import Any

from kvtune.base.errors import KvtuneError
from kvtune.lab.as_if.platform import check_answered, check_kernels, on_meta
from kvtune.lab.device.blocks import Stage
from kvtune.lab.device.model_class import missing_package, or_install
from kvtune.plugin.vllm.types import KVCacheSpec, VllmConfig


def stages_of_model(vllm_config: VllmConfig) -> tuple[list[Stage], list[str]]:
    """Return the stages of the model, first to last, and the KV layouts that the backends support, best first.

    All are those of one tensor-parallel rank. Also sets `cache_config.block_size` (and the block size of recurrent
    states) as an engine does when it starts on this process's platform.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    try:
        with set_current_vllm_config(vllm_config):
            by_layer: dict[str, KVCacheSpec] = {}
            stages = []
            count = vllm_config.parallel_config.pipeline_parallel_size
            for number in range(count):
                _groups_of_stage(vllm_config, number)
                reset_workspace_manager()
                init_workspace_manager(torch.device("meta"))
                with set_default_torch_dtype(vllm_config.model_config.dtype), on_meta():
                    built = [initialize_model(vllm_config)]
                    own = set(_layers(vllm_config))
                    built += [_drafter(vllm_config)] if number == count - 1 else []
                for name in _layers(vllm_config).keys() - own:
                    _layers(vllm_config)[
                        name
                    ].is_draft_layer = True  # vLLM 0.33 finds a drafter's KV cache by it
                current_platform.update_block_size_for_backend(vllm_config)
                # The configuration knows the layers of the stages before this one, too.
                specs = get_kv_cache_spec(vllm_config)
                own_specs = {name: spec for name, spec in specs.items() if name not in by_layer}
                weights = [w for model in built if model is not None for w in model.parameters()]
                stages.append(Stage(own_specs, sum(w.numel() * w.element_size() for w in weights)))
                by_layer = specs
            backends = get_current_attn_backends(vllm_config)
            layouts = [x.name for x in get_supported_kv_cache_layouts(backends)]
            check_answered()
            check_kernels(backends, str(vllm_config.model_config.architecture))
    except KvtuneError:
        raise
    except Exception as error:
        check_answered()
        architectures = list(getattr(vllm_config.model_config, "architectures", None) or ())
        why = missing_package(error) or error
        raise KvtuneError(
            f"the model {architectures} cannot be built without weights: {type(why).__name__}: {_line(why)}",
            "profile it where it runs: `kvtune explain RUN` replays from the KV specs in the run file"
            if current_platform.is_cuda()
            else f"simulate it as on a GPU: --on sim --like-device h100{or_install(why)}",
        ) from error
    return stages, layouts


def _layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the layers with a KV cache that have been built so far, by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return layers


def _drafter(vllm_config: VllmConfig) -> Any:
    """Build the draft model and register its layers after the model's, as a worker does; None if there is none."""
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


def _groups_of_stage(vllm_config: VllmConfig, number: int) -> None:
    """Set up the parallel groups that vLLM's layers ask for, as on the first tensor-parallel rank of a stage.

    torch's `fake` groups answer for the other ranks, and nothing is sent.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    tensor = vllm_config.parallel_config.tensor_parallel_size
    stages = vllm_config.parallel_config.pipeline_parallel_size
    rank, ranks = number * tensor, tensor * stages
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # the groups depend on the model
    if dist.is_initialized():
        parallel_state._WORLD = None
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    new_group, coordinator = dist.new_group, parallel_state.GroupCoordinator

    def silent(members: Any = None, **named: Any) -> Any:
        return new_group(members, **{**named, "backend": "fake"})

    class Silent(coordinator):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **named: Any) -> None:
            named |= {"use_device_communicator": False, "use_message_queue_broadcaster": False}
            super().__init__(*args, **named)

    dist.new_group, parallel_state.GroupCoordinator = silent, Silent
    node_count, parallel_state._node_count = parallel_state._node_count, lambda _: 1
    try:
        parallel_state.init_distributed_environment(ranks, rank, "env://", 0, "fake")
        parallel_state.initialize_model_parallel(tensor, stages)
    finally:
        dist.new_group, parallel_state.GroupCoordinator = new_group, coordinator
        parallel_state._node_count = node_count


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
