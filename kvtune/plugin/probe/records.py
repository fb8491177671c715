"""The kinds of ring records: the fields of each, in the order and with the widths of its `layout`.

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

from struct import Struct
from typing import ClassVar, Self

import msgspec

BODY = 119
"""The most bytes of a record's fields."""

MOST_QUEUES = 6
"""The most queues of a block pool that a PoolChange has room for."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """What all records that a ring can store have in common."""

    kind: ClassVar[int]
    layout: ClassVar[Struct]

    def pack(self) -> bytes:
        return self.layout.pack(*msgspec.structs.astuple(self))

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        return cls(*cls.layout.unpack_from(body))


class Collection(Record, frozen=True, gc=False):
    """One garbage collection."""

    kind: ClassVar = 1
    layout: ClassVar = Struct("<B8q")

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


class Step(Record, frozen=True, gc=False):
    """One batch that EngineCore executed, with the times since the previous batch's record.

    The four object counts are the objects made minus the objects freed, by all threads.
    """

    kind: ClassVar = 2
    layout: ClassVar = Struct("<?I6q5IqI4iH2q")

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


class PoolChange(Record, frozen=True, gc=False):
    """KV blocks that a step evicted, by queue of the pool."""

    kind: ClassVar = 4
    layout: ClassVar = Struct("<Iq6q")

    free_blocks: int
    start_ns: int
    """The step's start."""
    evicted: tuple[int, ...]

    def pack(self) -> bytes:
        queues = (*self.evicted, *(0,) * MOST_QUEUES)[:MOST_QUEUES]
        return self.layout.pack(self.free_blocks, self.start_ns, *queues)

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        free_blocks, start_ns, *evicted = cls.layout.unpack_from(body)
        return cls(free_blocks, start_ns, tuple(evicted))


class Copies(Record, frozen=True, gc=False):
    """Copies of a host-memory tier in one turn of EngineCore's loop, counted in the tier's chunks."""

    kind: ClassVar = 5
    layout: ClassVar = Struct("<12q")

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


class Digest(Record, frozen=True, gc=False):
    """A checksum of what one schedule() decided (plugin/probe/work.py)."""

    kind: ClassVar = 3
    layout: ClassVar = Struct("<2q")

    start_ns: int
    value: int


class Recomputed(Record, frozen=True, gc=False):
    """Tokens that a request computed twice, because it was preempted. `request`: its number in the load."""

    kind: ClassVar = 6
    layout: ClassVar = Struct("<Iq4q")

    request: int
    start_ns: int
    """When it was noted: the request has ended, or was preempted once more."""
    evicted: int = 0
    not_retained: int = 0
    partial_block: int = 0
    skipped_lookup: int = 0

    @property
    def causes(self) -> dict[str, int]:
        counts = list(msgspec.structs.asdict(self).items())[2:]
        return {name: tokens for name, tokens in counts if tokens}


AnyRecord = Collection | Step | PoolChange | Copies | Recomputed | Digest

KINDS: dict[int, type[AnyRecord]] = {
    each.kind: each for each in (Collection, Step, Digest, PoolChange, Copies, Recomputed)
}
