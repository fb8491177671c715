"""Twin schedulers for the steady path's tests: one stock, one ours, fed alike, compared after each step."""

from __future__ import annotations

import os
import random
import warnings
from collections import deque
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# vLLM's imports warn, and here warnings are errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from kvtune.data.knobs import CoreSettings
    from kvtune.plugin.core import state
    from kvtune.plugin.core.breaker import breaker_of
    from kvtune.plugin.core.cache import adopt
    from kvtune.plugin.core.cache import states as states
    from kvtune.plugin.core.outputs.message import MARK, OUTLET, columns_of
    from kvtune.plugin.core.outputs.outlet import Outlet
    from kvtune.plugin.core.steps import empty, scheduler, steady
    from kvtune.plugin.core.tokens import install as tokens

MODEL = str(Path(__file__).parents[3] / "kvtune" / "data" / "layout" / "models" / "tiny-opt")
VOCAB = 512

init_none_hash(sha256)


@dataclass(frozen=True)
class Shape:
    """An engine, as far as its scheduler sees it."""

    asynchronous: bool = False
    windows: tuple[int, ...] = ()
    """Sliding windows of the groups next to the full-attention one."""
    states: int = 0
    """Groups of recurrent states, one state a block, in vLLM's align mode."""
    more: tuple[Any, ...] = ()
    """Specs of further groups."""
    blocks: int = 400
    block: int = 4
    seqs: int = 16
    batched: int = 64
    max_len: int = 160
    caching: bool = True
    policy: str = "fcfs"
    retention: int | None = 0
    active: int | None = None
    v2_runner: bool = False
    log_stats: bool = True
    finished_sets: bool = False
    interval: int = 1
    """The fewest steps from one prefill to the next; versions before 0.33 ignore it here."""


@cache
def model_of(max_len: int) -> ModelConfig:
    """Reading a model's configuration takes longer than all the rest of a scheduler."""
    model = ModelConfig(model=MODEL, skip_tokenizer_init=True, dtype="float32", seed=0)
    model.max_model_len = max_len
    return model


def build(shape: Shape) -> Scheduler:
    model = copy(model_of(shape.max_len))
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.seqs,
            max_num_batched_tokens=shape.batched,
            max_model_len=shape.max_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=shape.policy,
            max_num_active_seqs=shape.active,
            prefill_schedule_interval=shape.interval,
        ),
        cache_config=CacheConfig(
            block_size=shape.block,
            enable_prefix_caching=shape.caching,
            mamba_cache_mode="align" if shape.states and shape.caching else "none",
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.num_gpu_blocks = shape.blocks
    spec = {"block_size": shape.block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**spec))]
    groups += [
        KVCacheGroupSpec([f"window{i}"], SlidingWindowSpec(**spec, sliding_window=window))
        for i, window in enumerate(shape.windows)
    ]
    state_spec = MambaSpec(
        block_size=shape.block if shape.caching else shape.max_len,
        shapes=((2,),),
        dtypes=(torch.float32,),
        mamba_type="mamba2",
        mamba_cache_mode="align" if shape.caching else "none",
    )
    groups += [KVCacheGroupSpec([f"state{i}"], state_spec) for i in range(shape.states)]
    groups += [KVCacheGroupSpec([f"more{i}"], spec) for i, spec in enumerate(shape.more)]
    retains = shape.windows or shape.states or any(isinstance(spec, SlidingWindowSpec) for spec in shape.more)
    built = (AsyncScheduler if shape.asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=shape.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=shape.retention if retains else None,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=shape.max_len if shape.states and not shape.caching else shape.block,
        hash_block_size=shape.block,
        include_finished_set=shape.finished_sets,
        log_stats=shape.log_stats,
    )
    built.use_v2_model_runner = shape.v2_runner
    return built


_hashers: dict[int, Any] = {}


def request(
    name: str,
    prompt: list[int],
    output: int,
    *,
    block: int = 4,
    priority: int = 0,
    client: int = 0,
    stops: list[int] | None = None,
    eos: int | None = None,
    hashed: bool = True,
    **sampling: Any,
) -> Request:
    if block not in _hashers:
        _hashers[block] = get_request_block_hasher(block, sha256)
    params = SamplingParams(
        max_tokens=output, stop_token_ids=stops, output_kind=RequestOutputKind.DELTA, **sampling
    )
    params._eos_token_id = eos
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        client_index=client,
        arrival_time=float(name.split("-")[-1]),
        priority=priority,
        block_hasher=_hashers[block] if hashed else None,
    )


class Model:
    """Samples tokens as a function of the request's name and position alone; the worker's order is its own."""

    def __init__(self, seed: int, shuffles: bool) -> None:
        self.seed = seed
        self.shuffles = shuffles

    def token(self, name: str, position: int) -> int:
        return random.Random(f"{self.seed}-{name}-{position}").randrange(VOCAB)

    def run(self, scheduler: Scheduler, scheduled: Any) -> ModelRunnerOutput:
        """Called right after schedule(), when attributes of requests are those of this step."""
        names = list(scheduled.num_scheduled_tokens)
        if self.shuffles:
            random.Random(f"{self.seed}-{len(names)}").shuffle(names)
        rows = []
        for name in names:
            one = scheduler.requests[name]
            known = one.num_tokens + one.num_output_placeholders
            if one.num_output_placeholders:
                known -= 1
            prefilled = one.num_computed_tokens >= known
            rows.append([self.token(name, one.num_computed_tokens)] if prefilled else [])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=rows
        )


def plain(scheduled: Any) -> dict[str, Any]:
    """A SchedulerOutput as data that compares."""
    data = {field.name: getattr(scheduled, field.name) for field in fields(scheduled)}
    cached = data.pop("scheduled_cached_reqs")
    data["cached"] = {field.name: getattr(cached, field.name) for field in fields(cached)}
    data["order"] = list(data["num_scheduled_tokens"])
    data["new"] = [
        (n.req_id, n.prompt_token_ids, n.block_ids, n.num_computed_tokens, n.prefill_token_ids)
        for n in data.pop("scheduled_new_reqs")
    ]
    return data


def put_out(outputs: Any) -> dict[int, Any]:
    """What update_from_output returned, as data that compares; times left out."""
    by_name = {}
    for client, one in (outputs or {}).items():
        rows = []
        for output in one.outputs:
            row = {name: getattr(output, name) for name in output.__struct_fields__}
            row["new_token_ids"] = list(row["new_token_ids"])
            row["events"] = [event.type for event in row["events"] or ()]
            rows.append(row)
        stats = one.scheduler_stats
        by_name[client] = (
            rows,
            one.finished_requests,
            None if stats is None else (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage),
        )
    by_name["order"] = list(by_name)
    return by_name


def inside(scheduler: Scheduler) -> dict[str, Any]:
    """What decides later steps: requests, queues, the pool's order, the hashes."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "requests": {
            name: (
                one.status,
                one.num_computed_tokens,
                one.num_in_flight_tokens,
                one.num_output_placeholders,
                one.num_preemptions,
                list(one._output_token_ids),
                list(one._all_token_ids),
                list(one.block_hashes),
                [[b.block_id for b in m.req_to_blocks.get(name, ())] for m in groups(scheduler)],
                [m.num_cached_block.get(name) for m in groups(scheduler)],
            )
            for name, one in scheduler.requests.items()
        },
        "running": [one.request_id for one in scheduler.running],
        "waiting": [one.request_id for one in scheduler.waiting],
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "cached": {
            key: sorted(blocks) if isinstance(blocks, dict) else blocks.block_id
            for key, blocks in pool.cached_block_hash_to_block._cache.items()
        },
        "step": scheduler.current_step,
        "bound": scheduler.prefill_capacity_bound,
        "executed": getattr(scheduler, "num_executed_steps", 0),
        "prefilled": getattr(scheduler, "last_prefill_step", 0),
    }


def groups(scheduler: Scheduler) -> Any:
    return scheduler.kv_cache_manager.coordinator.single_type_managers


class Reader:
    """A client that makes of columns the outputs that they stand for."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.slots: list[int] = []
        self.messages = 0

    def read(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        if not outputs or outputs[-1].request_id != MARK:
            return outputs
        *others, last = outputs
        columns = columns_of(last)
        self.messages += 1
        self.names |= dict(columns.named)
        if columns.slots is not None:
            self.slots = columns.slots.tolist()
        assert columns.counts is None  # a step of these schedulers has one token of each request
        pairs = zip(self.slots, columns.tokens.tolist(), strict=True)
        made = [EngineCoreOutput(self.names[slot], [token]) for slot, token in pairs]
        for at, output in reversed(list(zip(columns.before, others, strict=True))):
            made.insert(at, output)
        return made


class Twins:
    """Stock and ours, stepped together. `readers`: clients that read columns."""

    def __init__(
        self, shape: Shape, settings: CoreSettings | None = None, seed: int = 0, shuffles: bool = True
    ) -> None:
        self.shape = shape
        self.stock, self.ours = build(shape), build(shape)
        scheduler.adopt(self.ours, settings or CoreSettings())
        self.readers: dict[int, Reader] = {}
        self.model = Model(seed, shuffles)
        self.depth = 2 if shape.asynchronous else 1
        self.queue: deque[Any] = deque()
        self.steps = 0

    def add(self, **options: Any) -> None:
        self.stock.add_request(request(block=self.shape.block, **options))
        self.ours.add_request(request(block=self.shape.block, **options))

    def read_columns(self, *clients: int) -> None:
        """From now on these clients read columns, as EngineCore sends them."""
        self.outlet = Outlet(0, breaker_of(self.ours.kv_cache_manager))
        setattr(self.ours, OUTLET, self.outlet)
        for client in clients:
            self.outlet.ask(client)
            self.readers[client] = Reader()

    def abort(self, name: str) -> None:
        for one in (self.stock, self.ours):
            one.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One engine step: schedule, and when the queue of steps in flight is full, update."""
        self.steps += 1
        pair = []
        for one in (self.stock, self.ours):
            scheduled = one.schedule()
            pair.append((scheduled, self.model.run(one, scheduled)))
        assert plain(pair[1][0]) == plain(pair[0][0])
        self.queue.append(pair)
        if len(self.queue) >= self.depth:
            self.update()

    def update(self) -> None:
        pair = self.queue.popleft()
        results = [
            one.update_from_output(*entry) for one, entry in zip((self.stock, self.ours), pair, strict=True)
        ]
        for client, reader in self.readers.items():
            if client in results[1]:
                one = results[1][client]
                one.outputs = reader.read(self.outlet.pack(client, one.outputs, self.ours.requests))
        assert put_out(results[1]) == put_out(results[0])

    def compare(self) -> None:
        theirs, mine = inside(self.stock), inside(self.ours)
        for key, value in theirs.items():
            assert mine[key] == value, key


StockScheduler = Scheduler

__all__ = [
    "OUTLET",
    "ModelRunnerOutput",
    "Outlet",
    "PauseState",
    "Reader",
    "Shape",
    "StockScheduler",
    "Twins",
    "adopt",
    "build",
    "empty",
    "request",
    "scheduler",
    "state",
    "steady",
    "tokens",
]
