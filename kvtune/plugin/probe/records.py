"""The kinds of ring records: the fields of each, and their places in the ring's 17 integers.

Written in vLLM's processes, read by the launcher. `gc=False`: the collector does not track records, so writing one does
not bring the next collection nearer. All times are nanoseconds of CLOCK_MONOTONIC. A turn is one pass of EngineCore's
loop.

| kind | written by | when |
|---|---|---|
| Collection | any thread that triggers a garbage collection | when it ends |
| Step | EngineCore's main loop | when the step ends |
| PoolChange | EngineCore's main loop | after a step that evicted KV blocks |
| Copies | EngineCore's main loop | after a turn in which a tier of host memory copied something, or had no room |
| Recomputed | EngineCore's main loop | after an update: of preempted requests that have ended |
| Digest | EngineCore's main loop, with `KVTUNE_DIGESTS=1` | after `schedule()` |
"""

from __future__ import annotations

from typing import Protocol

import msgspec

VALUES = 14
Fields = tuple[int, ...]
"""What the ring stores: kind, one 16-bit and one 32-bit integer, then VALUES 64-bit integers."""

COLLECTION, STEP, DIGEST, POOL, COPIES, AGAIN = 1, 2, 3, 4, 5, 6

MOST_QUEUES = 6
"""The most queues of a block pool that a PoolChange has room for."""

_LOW = (1 << 32) - 1
_MOST_PREFILL_CONTEXT = (1 << 31) - 1
_MOST_PREEMPTED = (1 << 15) - 1
_MOST_OBJECTS = (1 << 31) - 1


def _pair(low: int, high: int) -> int:
    """Pack two signed numbers into one; each is limited to 32 bits."""
    return _cut(low) & _LOW | _cut(high) << 32


def _cut(value: int) -> int:
    return max(-_MOST_OBJECTS, min(value, _MOST_OBJECTS))


def _low(pair: int) -> int:
    low = pair & _LOW
    return low - (1 << 32) if low > _MOST_OBJECTS else low


class Record(Protocol):
    """What all records that a ring can store have in common."""

    def pack(self) -> Fields: ...


class Collection(msgspec.Struct, frozen=True, gc=False):
    """One garbage collection."""

    generation: int
    start_ns: int
    pause_ns: int
    cpu_ns: int
    """CPU time of the triggering thread within the pause."""
    collected: int
    uncollectable: int
    thread: int
    young: int
    """Objects in the young generation when the collection started."""
    line: int
    """Index of the line that triggered it, in the status file's `triggers`; -1 if unknown."""

    @property
    def clock_went_back(self) -> bool:
        return self.pause_ns < 0 or self.cpu_ns < 0

    def pack(self) -> Fields:
        # fmt: off
        return (
            COLLECTION, self.generation, 0,
            self.start_ns, self.pause_ns, self.cpu_ns, self.collected, self.uncollectable,
            self.thread, self.young, self.line, 0, 0, 0, 0, 0, 0,
        )
        # fmt: on

    @classmethod
    def unpack(cls, fields: Fields) -> Collection:
        return cls(fields[1], *fields[3:11])


class Step(msgspec.Struct, frozen=True, gc=False):
    """One batch that EngineCore executed, with the times since the previous batch's record.

    The four object counts are the objects made minus the objects freed, by all threads.
    """

    queued: bool
    """Whether EngineCore has a batch queue; if so, `schedule_ns` was spent on a later batch."""
    requests: int
    """Requests that had tokens scheduled."""
    start_ns: int
    step_ns: int
    schedule_ns: int
    execute_ns: int
    """From the end of schedule to the start of update; with a batch queue, the rest of the step."""
    update_ns: int
    cpu_ns: int
    """CPU time of EngineCore's thread within the step."""
    scheduled_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int
    context_tokens: int
    """KV tokens that the scheduled requests attend to."""
    prefill_context_tokens: int
    """The part of `context_tokens` that prefilling requests attend to."""
    schedule_objects: int
    execute_objects: int
    update_objects: int
    other_objects: int
    preempted: int = 0
    """Running requests that `schedule` preempted, to compute them again later."""
    wait_ns: int = 0
    """Time in which EngineCore waited for the model's results, without garbage collections; -1 if not measured."""
    device_ns: int = 0
    """Time from when the device could begin the batch (all earlier ones done) until EngineCore had its tokens."""

    @property
    def clock_went_back(self) -> bool:
        times = (self.step_ns, self.schedule_ns, self.execute_ns, self.update_ns, self.cpu_ns, self.device_ns)
        return min(times) < 0

    def pack(self) -> Fields:
        prefill_context = min(self.prefill_context_tokens, _MOST_PREFILL_CONTEXT)
        # fmt: off
        return (
            STEP, self.queued | min(self.preempted, _MOST_PREEMPTED) << 1, self.requests,
            self.start_ns, self.step_ns, self.schedule_ns, self.execute_ns, self.update_ns, self.cpu_ns,
            self.scheduled_tokens | self.prefill_tokens << 32,
            self.running | self.waiting << 32,
            self.free_blocks | prefill_context << 32,
            self.context_tokens,
            _pair(self.schedule_objects, self.execute_objects), _pair(self.update_objects, self.other_objects),
            self.wait_ns, self.device_ns,
        )
        # fmt: on

    @classmethod
    def unpack(cls, fields: Fields) -> Step:
        tokens, requests, free = fields[9:12]
        return cls(
            queued=bool(fields[1] & 1),
            preempted=fields[1] >> 1,
            requests=fields[2],
            start_ns=fields[3],
            step_ns=fields[4],
            schedule_ns=fields[5],
            execute_ns=fields[6],
            update_ns=fields[7],
            cpu_ns=fields[8],
            scheduled_tokens=tokens & _LOW,
            prefill_tokens=tokens >> 32,
            running=requests & _LOW,
            waiting=requests >> 32,
            free_blocks=free & _LOW,
            prefill_context_tokens=free >> 32,
            context_tokens=fields[12],
            schedule_objects=_low(fields[13]),
            execute_objects=fields[13] >> 32,
            update_objects=_low(fields[14]),
            other_objects=fields[14] >> 32,
            wait_ns=fields[15],
            device_ns=fields[16],
        )


class PoolChange(msgspec.Struct, frozen=True, gc=False):
    """KV blocks that a step evicted, by queue of the pool."""

    free_blocks: int
    start_ns: int
    """The step's start."""
    evicted: tuple[int, ...]

    def pack(self) -> Fields:
        spare = 2 * MOST_QUEUES + 1 - len(self.evicted)
        return (POOL, 0, self.free_blocks, self.start_ns, *self.evicted, *(0,) * spare)

    @classmethod
    def unpack(cls, fields: Fields) -> PoolChange:
        return cls(fields[2], fields[3], fields[4 : 4 + MOST_QUEUES])


class Copies(msgspec.Struct, frozen=True, gc=False):
    """Copies of a host-memory tier in one turn of EngineCore's loop, counted in the tier's chunks."""

    start_ns: int
    """The turn's start."""
    stored_bytes: int
    store_ns: int
    loaded_bytes: int
    load_ns: int
    loads: int
    """Requests whose load ended."""
    wait_ns: int
    """Total wait of the requests that stopped waiting, for their own load or for copies of the same tokens."""
    longest_wait_ns: int
    stored_chunks: int
    reused_chunks: int
    """Chunks that were loaded for the first time since they were stored."""
    evicted_chunks: int
    refused: int
    """Stores for which the tier had no room."""

    def pack(self) -> Fields:
        return (COPIES, 0, 0, *msgspec.structs.astuple(self), 0, 0)

    @classmethod
    def unpack(cls, fields: Fields) -> Copies:
        return cls(*fields[3:15])

    def row(self) -> tuple[float, ...]:
        """Return the record's columns of the table `copies`, without the time."""
        return (
            self.stored_bytes,
            self.store_ns / 1e3,
            self.loaded_bytes,
            self.load_ns / 1e3,
            self.loads,
            self.wait_ns / 1e3,
            self.longest_wait_ns / 1e3,
            *(self.stored_chunks, self.reused_chunks, self.evicted_chunks, self.refused),
        )


class Digest(msgspec.Struct, frozen=True, gc=False):
    """A checksum of what one schedule() decided (plugin/probe/work.py)."""

    start_ns: int
    value: int

    def pack(self) -> Fields:
        return (DIGEST, 0, 0, self.start_ns, self.value, *_NOTHING_MORE)

    @classmethod
    def unpack(cls, fields: Fields) -> Digest:
        return cls(fields[3], fields[4])


class Recomputed(msgspec.Struct, frozen=True, gc=False):
    """Tokens that a request computed twice, because it was preempted. `request`: its number in the load."""

    request: int
    start_ns: int
    """When it was noted: the request has ended, or was preempted once more."""
    evicted: int = 0
    not_retained: int = 0
    partial_block: int = 0
    skipped_lookup: int = 0

    def pack(self) -> Fields:
        counts = (self.evicted, self.not_retained, self.partial_block, self.skipped_lookup)
        return (AGAIN, 0, self.request, self.start_ns, *counts, *(0,) * (VALUES - 5))

    @classmethod
    def unpack(cls, fields: Fields) -> Recomputed:
        return cls(*fields[2:8])

    @property
    def causes(self) -> dict[str, int]:
        return {name: tokens for name in self.__struct_fields__[2:] if (tokens := getattr(self, name))}


_NOTHING_MORE = (0,) * (VALUES - 2)

AnyRecord = Collection | Step | PoolChange | Copies | Recomputed | Digest


def unpack(fields: Fields) -> AnyRecord | None:
    """Return the record in a ring's 17 integers; None for a kind that this version does not know."""
    kind = fields[0]
    if kind == STEP:
        return Step.unpack(fields)
    if kind == COLLECTION:
        return Collection.unpack(fields)
    if kind == POOL:
        return PoolChange.unpack(fields)
    if kind == COPIES:
        return Copies.unpack(fields)
    if kind == AGAIN:
        return Recomputed.unpack(fields)
    return Digest.unpack(fields) if kind == DIGEST else None
