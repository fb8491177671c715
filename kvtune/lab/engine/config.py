"""Makes vLLM's configuration from flags, and describes it for run files. In processes that import vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.data.knobs import config_fields
from kvtune.lab.device.model_class import missing_package, or_install
from kvtune.plugin.vllm.types import VllmConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


def parse_engine_args(arguments: list[str]) -> AsyncEngineArgs:
    """Parse flags into vLLM's AsyncEngineArgs. UsageError with the parser's message if it refuses them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            unknown = message.partition("unrecognized arguments:")[2].split()
            mean = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions) if unknown else ""
            raise UsageError(
                f"vLLM refuses these engine arguments: {message}",
                f"{mean}after `--`, give flags of `vllm serve`",
            )

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", allow_abbrev=False))
    # Only `vllm serve` uses this flag; here it is accepted and ignored.
    parser.add_argument("--api-server-count", type=int)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))


def engine_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Make the configuration with the defaults of vLLM's server, which differ in batch tokens and sequences."""
    from vllm.usage.usage_lib import UsageContext

    try:
        config: VllmConfig = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except ValueError as error:
        if missing := missing_package(error):
            raise UsageError(
                f"vLLM cannot import the class of {arguments.model}: {missing}",
                f"simulate it as on a GPU: --on sim --like-device h100{or_install(missing)}",
            ) from error
        raise
    return config


def describe_engine(config: VllmConfig) -> dict[str, object]:
    """Return the engine's configuration as vLLM resolved it at start-up."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    cache, scheduler, parallel, model = (
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
        config.model_config,
    )
    graphs = config.compilation_config
    backend = parallel.distributed_executor_backend
    executor = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": str(current_platform.device_type),
        "device_name": str(current_platform.get_device_name() or ""),
        "executor": executor.rpartition(".")[2],
        "block_size": int(cache.block_size),
        "num_blocks": int(cache.num_gpu_blocks or 0),
        "max_model_len": int(model.max_model_len),
        "async_scheduling": bool(scheduler.async_scheduling),
        "settings": {
            "dtype": str(model.dtype).removeprefix("torch."),
            **{name: getattr(scheduler, name, None) for name in config_fields("scheduler")},
            **{name: getattr(cache, name, None) for name in config_fields("cache")},
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "kv_cache_dtype": str(cache.cache_dtype),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "enforce_eager": bool(model.enforce_eager),
            "gpu_memory_utilization": getattr(cache, "gpu_memory_utilization", None),
            "cudagraph_mode": getattr(graphs.cudagraph_mode, "name", None),
            "largest_graph": graphs.max_cudagraph_capture_size,
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
        },
        "model_config": model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {},
    }


def jsonable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with values that JSON does not have (dtypes, enums) as text."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(facts, enc_hook=str))
    return plain
