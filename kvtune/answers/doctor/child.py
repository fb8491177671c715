"""A child process with vLLM's own answers about a model, from its shapes, without weights (`kvtune/lab/engine/ask.py`).

It is asked about a `Setup` (`kvtune/base/dialogue.py`), and answers with `Facts` or an engine's KV specs, as its second
argument says, or an error. With --like-device, this process's vLLM is that of the device.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from kvtune.answers.doctor.boot import refusal_in
from kvtune.answers.doctor.facts import Facts, Group, GroupKind, Visits
from kvtune.base.cpu import avx512_bf16
from kvtune.base.dialogue import Answered, Refused, questions, tell
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import count, percent, size
from kvtune.data.flags import flag_texts
from kvtune.data.layout.forms import Form, form_of, lengths
from kvtune.data.platforms import BY_MEMORY, Platform
from kvtune.lab.as_if.deferred import defer
from kvtune.lab.device.blocks import Stage, give_pool, layers_of
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.lab.sim.idle import ANSWER_TOKENS, finished, idle_of, runs
from kvtune.plugin.probe.kv_specs import of_group, used_bytes
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.vllm.names import hash_lookahead, state_step
from kvtune.plugin.vllm.parts import differing
from kvtune.plugin.vllm.types import Scheduler
from kvtune.requests.types import Request, Span

POOL_BYTES = 4 << 30  # assumed if only a started engine would know it
MOST_POOL_BYTES = 4 << 40
TOO_LONG = "max seq len"
"""Part of vLLM's message about a pool that holds no request of max_model_len."""
SUFFIX_TOKENS = 64
VISITS = 4


def main(answers: int, want: str) -> None:
    from kvtune.lab.sim.build import run_on

    setup = next(questions(Setup))
    gc.disable()  # this process ends before garbage matters
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        defer()
        run_on(setup.platform)
        reply = Answered(specs_of(setup) if want == "specs" else msgspec.to_builtins(facts_of(setup)))
    except KvtuneError as error:
        tell(answers, Refused.of(error))
    except Exception as error:
        text = str(error).strip().splitlines() or ["no message"]
        hint = "change the flag or field named above; --debug shows vLLM's own log"
        tell(answers, Refused(f"vLLM refuses {setup.model}: {_reason(text)}", hint, 2))
    else:
        tell(answers, reply)


def _reason(lines: list[str]) -> str:
    """Return the line of a pydantic or vLLM message that states the reason."""
    reasons = [line.strip() for line in lines if "Value error" in line or "rror," in line]
    return (reasons or [lines[0].strip()])[0]


def specs_of(setup: Setup) -> dict[str, Any]:
    """Return the KV specs and settings of the set-up's engine, with all the memory that its device leaves it."""
    from kvtune.lab.sim.build import build
    from kvtune.lab.sim.clock import VirtualClock
    from kvtune.plugin.probe.describe import describe_cache

    alone = setup.with_flags(data_parallel_size=None)  # its engines are alike
    engine = build(alone.sized(), VirtualClock())
    facts = describe_cache(engine.scheduler, engine.model_executor.get_kv_cache_specs())
    if "kv_specs" not in facts:
        raise KvtuneError(f"the KV specs cannot be written: {facts.get('kv_specs_failed')}", "report it")
    engine.scheduler.shutdown()
    return dict(facts["kv_specs"])


def facts_of(setup: Setup) -> Facts:
    from kvtune.lab.setup.resolve import check_engine
    from kvtune.lab.sim.build import choose_core, configure

    check_engine()
    choose_core(setup)  # the stock core, for the flags' effect in unmodified vLLM
    config, stages, layouts = configure(setup)
    platform, unknown, refusal = setup.platform, setup.pool.unknown, None
    stages, why = (stages, "") if unknown else sized(platform, config, stages)
    try:
        with started(config, stages, layouts) as begun:
            facts = facts_from(setup, config, stages, begun)
    except ValueError as error:
        if TOO_LONG not in str(error):
            raise
        refusal = refusal_in(str(error))
        if why and platform is not None:
            length = count(config.model_config.max_model_len)
            why = f"unknown: beside the weights {platform.title} has no room for a request of {length} tokens"
        config.cache_config.kv_cache_memory_bytes = config.cache_config.num_gpu_blocks_override = None
        with started(config, stages, layouts) as begun:
            facts = facts_from(setup, config, stages, begun)
    if unknown:
        why = "" if setup.sizes_pool else f"unknown: {unknown}"
        facts = msgspec.structs.replace(facts, weight_bytes=0)  # those of another model
    return msgspec.structs.replace(facts, pool_why=why, refusal=refusal)


def sized(platform: Platform | None, config: Any, stages: list[Stage]) -> tuple[list[Stage], str]:
    """Give the pool what the memory of --like-device leaves, if no flag sizes it. Return why it is of that size."""

    cache = config.cache_config
    if (
        platform is None
        or not platform.memory_bytes
        or cache.kv_cache_memory_bytes
        or cache.num_gpu_blocks_override
    ):
        return stages, ""
    try:
        stages = give_pool(config, platform.memory_bytes, stages)
    except UsageError as error:
        return stages, f"unknown: {error.message}"
    weights = max(stage.weight_bytes for stage in stages)
    used = f"{percent(cache.gpu_memory_utilization)} of {size(platform.memory_bytes)}"
    return stages, f"{used} less {size(weights)} of weights, {BY_MEMORY}"


class Started(NamedTuple):
    """vLLM's EngineCore without a model. `pool_known`: its pool is of the real size. `block_tokens`: as configured."""

    engine: EngineCore
    pool_known: bool
    block_tokens: int


@contextmanager
def started(config: Any, stages: Sequence[Stage], layouts: list[str]) -> Iterator[Started]:
    cache = config.cache_config
    pool_known = bool(cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override)
    block_tokens = cache.block_size  # EngineCore sets it to the finest hash's
    engine = _engine(config, stages, layouts, pool_known)
    try:
        yield Started(engine, pool_known, block_tokens)
    finally:
        engine.scheduler.shutdown()


def _engine(config: Any, stages: Sequence[Stage], layouts: list[str], pool_known: bool) -> EngineCore:
    """Return vLLM's EngineCore on the simulator's executor. Enlarge a pool of unknown size until one request fits."""
    from vllm.v1.engine.core import EngineCore as VllmEngineCore

    from kvtune.lab.device.cost import NOMINAL
    from kvtune.lab.sim.clock import VirtualClock
    from kvtune.lab.sim.executor import Machine, SimExecutor

    pool = int(config.cache_config.kv_cache_memory_bytes or POOL_BYTES)
    while True:
        executor: Any = type("SimExecutor", (SimExecutor,), {})
        executor.machine = Machine(stages, layouts, pool, VirtualClock(), NOMINAL)
        try:
            engine: EngineCore = VllmEngineCore(config, executor, log_stats=False)
        except ValueError as error:
            if pool_known or pool >= MOST_POOL_BYTES or TOO_LONG not in str(error):
                raise
            pool *= 8
            continue
        engine.model_executor.requests = engine.scheduler.requests
        return engine


def facts_from(setup: Setup, config: Any, stages: Sequence[Stage], begun: Started) -> Facts:
    """Return the facts about a configured set-up and its engine."""
    from vllm.config.cache import CacheConfig
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    engine, pool_known, block_tokens = begun
    specs = layers_of(stages)
    cache, model = config.cache_config, config.model_config
    like = setup.platform
    on_cpu = like.kind == "cpu" if like is not None else bool(current_platform.is_cpu())
    scheduler: Any = engine.scheduler
    kv = scheduler.kv_cache_config
    groups = [
        group_of(group, specs, backends(config, group.layer_names), draft_layers(config, group.layer_names))
        for group in kv.kv_cache_groups
    ]
    text = model.hf_config.to_dict()
    longest = max((group.block_tokens for group in groups), default=0)
    held = [reserved(config, group) for group in kv.kv_cache_groups]
    groups = [msgspec.structs.replace(group, request_blocks=n) for group, n in zip(groups, held, strict=True)]
    shared, again = visits(engine, longest, model.max_model_len) if cache.enable_prefix_caching else ([], [])
    hybrid = cache.enable_prefix_caching and any(group.kind == "state" for group in groups)
    again_form, shared_form = (
        forms(engine, longest, _hit_alignment(scheduler), model.max_model_len) if hybrid else (None, None)
    )
    idle = idle_of(engine, model.max_model_len, pool_known=pool_known) if cache.enable_prefix_caching else []
    layers = _block_layers(kv)
    pool_bytes = max((int(tensor.size) for tensor in kv.kv_cache_tensors), default=0)
    return Facts(
        source="vllm",
        model=setup.model,
        architecture=model.architecture,
        device=like.kind if like is not None else current_platform.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        avx512_bf16=avx512_bf16() if on_cpu else None,
        state_dtype=_state_dtype(kv),
        kv_cache_dtype=cache.cache_dtype,
        given=flag_texts(setup.engine_args),
        max_model_len=model.max_model_len,
        batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_requests=config.scheduler_config.max_num_seqs,
        caching=bool(cache.enable_prefix_caching),
        block_tokens=block_tokens,
        kernel_refusal=kernel_refusal(config, kv),
        default_block_tokens=128 if on_cpu else CacheConfig.DEFAULT_BLOCK_SIZE,
        state_step=state_step(config),
        state_mode=str(cache.mamba_cache_mode) if any(g.kind == "state" for g in groups) else "",
        match_unit=cache.prefix_match_unit or 0,
        retention=kv.prefix_cache_retention_interval,
        hash_tokens=scheduler.kv_cache_manager.block_pool.hash_block_size,
        hit_tokens=_hit_alignment(scheduler),
        groups=groups,
        group_layers=layers,
        pool_block_bytes=pool_bytes // kv.num_blocks,
        pool_blocks=kv.num_blocks if pool_known else 0,
        pool_bytes=pool_bytes if pool_known else 0,
        tokens_fit=get_kv_cache_capacity(config, kv)[0] if pool_known else 0,
        weight_bytes=max((stage.weight_bytes for stage in stages), default=0),
        in_flight_tokens=int(getattr(config, "max_in_flight_tokens", 0)),
        draft_tokens=int(getattr(config, "num_speculative_tokens", 0) or 0),
        longest_run=longest_run(engine, model.max_model_len) if pool_known else 0,
        idle=idle,
        packing_refusal=packing_refusal(config, list(specs.values())),
        shared_prefix=shared,
        resent=again,
        again=again_form,
        shared=shared_form,
        checkpoints=bool(getattr(scheduler, "mamba_shared_prefix_checkpoint", False)),
        config=json.loads(json.dumps(text, default=str)),
    )


def _state_dtype(kv: Any) -> str:
    """Return the data type of the recurrent states; "" for a model without states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    for group in kv.kv_cache_groups:
        inner = list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()) or [group.kv_cache_spec]
        if isinstance(inner[0], MambaSpec):
            return str(inner[0].dtypes[-1]).removeprefix("torch.")
    return ""


def kernel_refusal(config: Any, kv: Any) -> str:
    """Return why a worker would refuse the attention groups' block sizes at start, or "" if it accepts them."""
    from vllm.v1.worker.utils import prepare_kernel_block_sizes

    attention = [
        [
            SimpleNamespace(backend=each, kv_cache_spec=group.kv_cache_spec)
            for each in backends(config, group.layer_names)
        ]
        for group in kv.kv_cache_groups
    ]
    try:
        prepare_kernel_block_sizes(kv, attention)
    except ValueError as error:
        return str(error)
    return ""


def backends(config: Any, layers: Sequence[str]) -> list[Any]:
    """Return the attention backends of these layers."""
    from vllm.config import set_current_vllm_config

    context = config.compilation_config.static_forward_context
    with set_current_vllm_config(config):
        return list(dict.fromkeys(context[name].get_attn_backend() for name in layers if name in context))


def draft_layers(config: Any, layers: Sequence[str]) -> int:
    """Return how many of these layers are a drafter's."""
    context = config.compilation_config.static_forward_context
    return sum(bool(getattr(context.get(name), "is_draft_layer", False)) for name in layers)


def packing_refusal(config: Any, specs: Sequence[Any]) -> str:
    """Return why core.packed cannot work in this engine; "" if it can, or if the model has no states."""
    from vllm.platforms import current_platform

    from kvtune.data.knobs import CoreSettings
    from kvtune.plugin.core.cache.packed import block_of, refusal

    if not config.model_config.is_hybrid:
        return ""
    if why := differing(("layout",)):
        return f"this vLLM's layout is not known: {why}"
    backends = current_platform._find_non_ssm_backends(config)
    plain = [replace(spec, page_size_padded=None) if hasattr(spec, "dtypes") else spec for spec in specs]
    states = CoreSettings().states_per_block
    return refusal(config, backends) or block_of(plain, backends, states, 0, state_step(config))[1]


KINDS: dict[str, GroupKind] = {
    "full_attention": "full attention",
    "mla_attention": "full attention",
    "sink_full_attention": "full attention",
    "sliding_window": "sliding window",
    "sliding_window_mla": "sliding window",
    "chunked_local_attention": "chunked attention",
    "mamba": "state",
}
"""vLLM's kinds of specs. Those that hold no text's keys and values (encoders, hidden states, hot rows) are others."""


def group_of(
    group: Any, specs: Mapping[str, Any], backends: Sequence[Any] = (), draft_layers: int = 0
) -> Group:
    """Convert one of vLLM's KV cache groups to plain data. `specs`: each layer's own, `backends`: the group's."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    spec = group.kv_cache_spec
    each = of_group(group, specs)
    classes = sorted({type(spec).__name__ for spec in each})
    kind: GroupKind = KINDS.get(str(get_kv_cache_spec_kind(spec).value), "other")
    if "CircularBufferSpec" in classes:
        kind = "ring buffer"
    elif "HiddenStateCacheSpec" in classes:
        kind = "other"
    return Group(
        kind=kind,
        layers=len(each),
        block_tokens=spec.block_size,
        page_bytes=sum(spec.page_size_bytes for spec in each) // len(each),
        used_bytes=sum(map(used_bytes, each)) // len(each),
        window=int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0),
        specs=classes,
        cached=bool(getattr(spec, "prefix_cacheable", True)),
        backend=", ".join(backend.get_name() for backend in backends),
        draft_layers=draft_layers,
    )


def reserved(config: Any, group: Any) -> int:
    """Return the blocks that vLLM reserves in a group for one request of max_model_len, at start and at admission."""
    spec = group.kv_cache_spec
    return -(-int(spec.max_memory_usage_bytes(config)) // int(spec.page_size_bytes))


def longest_run(engine: EngineCore, longest: int) -> int:
    """Return the tokens of the longest request that the engine runs alone; 0 if it runs one of `longest` tokens."""
    if runs(engine, longest - ANSWER_TOKENS):
        return 0
    return bisect_left(range(1, longest), True, key=lambda tokens: not runs(engine, tokens - ANSWER_TOKENS))


def _block_layers(kv: Any) -> int:
    """Return the number of layers of the largest group: a block of the pool has a page for each of them."""
    return max((len(group.layer_names) for group in kv.kv_cache_groups), default=0)


def _hit_alignment(scheduler: Scheduler) -> int:
    coordinator = scheduler.kv_cache_manager.coordinator
    tokens = getattr(coordinator, "_cache_hit_alignment_tokens", None)
    return int(tokens if tokens is not None else coordinator.scheduler_block_size)


def visits(engine: Any, block: int, max_model_len: int) -> tuple[list[Visits], list[Visits]]:
    """Replay shared prefixes with a new suffix each time, and prompts sent again; return the hits of each visit."""
    shared: list[Visits] = []
    again: list[Visits] = []
    room = max_model_len - 2  # for the answer
    # The last suffix is longer than a block: windows and states are then not kept at the prefix's end.
    short = SUFFIX_TOKENS
    pairs = ((block - 1, short), (block, short), (2 * block, short), (4 * block, block + short))
    for number, (prefix, suffix) in enumerate(pairs):
        if not 0 < prefix + suffix < room:
            continue
        start = Span(10 * number, 0, prefix)
        prompts = [(start, Span(10 * number + 1, visit * suffix, suffix)) for visit in range(VISITS)]
        shared.append(Visits(prefix_tokens=prefix, suffix_tokens=suffix, hit_tokens=replay(engine, prompts)))
    for number, prompt in enumerate((block, block + 1, 2 * block + block // 2)):
        if not 0 < prompt <= room:
            continue
        same = [(Span(1000 + number, 0, prompt),)] * 2
        again.append(Visits(prefix_tokens=prompt, suffix_tokens=0, hit_tokens=replay(engine, same)))
    return shared, again


def forms(engine: Any, block: int, unit: int, max_model_len: int) -> tuple[Form | None, Form | None]:
    """Return the closed forms of what hits of a prompt sent again, and of a prefix at its third and fourth visit.

    Each prompt of a shared prefix ends in more than a block of other text: its own end keeps nothing for the next.
    """
    suffix = block + SUFFIX_TOKENS
    room = max_model_len - 2
    of_prompts, of_prefixes = [], []
    for number, tokens in enumerate(lengths(block, unit, room)):
        same = [(Span(2000 + number, 0, tokens),)] * 2
        of_prompts.append((tokens, replay(engine, same)[1]))
        if tokens + suffix <= room:
            start, rest = Span(3000 + 2 * number, 0, tokens), 3001 + 2 * number
            prompts = [(start, Span(rest, visit * suffix, suffix)) for visit in range(VISITS)]
            hits = replay(engine, prompts)[2:]
            of_prefixes += [(tokens, each) for each in hits]
    units = (unit, block)
    return form_of(of_prompts, units), form_of(of_prefixes, units)


def replay(engine: EngineCore, prompts: Sequence[tuple[Span, ...]]) -> list[int]:
    """Return the hit tokens of each prompt, sent one after another to an engine whose cache is empty at first."""
    from kvtune.lab.sim.requests import Factory

    engine.reset_prefix_cache()
    requests = [Request(str(index), prompt, 2) for index, prompt in enumerate(prompts)]
    block = engine.scheduler.kv_cache_manager.block_pool.hash_block_size
    factory = Factory(requests, block, caching=True, ahead=hash_lookahead(engine.scheduler))
    hits = []
    for index in range(len(requests)):
        request = factory.make(index, 0.0)
        statistics = request.prefill_stats  # filled in at admission, and then removed from the request
        assert statistics is not None
        finished(engine, request)
        hits.append(int(statistics.num_cached_tokens))
    return hits


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    main(int(sys.argv[1]), sys.argv[2])
