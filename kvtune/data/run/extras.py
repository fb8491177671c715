"""Results that only some runs have: probe counts, sampled stacks, a replay's settings. Plain data.

Stored as `Header.extra` of a run file. A new field with a default keeps the file's schema, as in types.py. A field
that does not fit its type (a damaged file, a newer kvtune) reads as not recorded; the other fields are still read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvtune.base.errors import reason
from kvtune.base.units import percent
from kvtune.data.run.funnel import Funnel
from kvtune.data.run.ranges import Number, Positive, Scalar, Whole
from kvtune.data.tally import Hits, Tally

SloName = Literal["ttft", "tpot", "e2e"]


class HeapSize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Number of GC-tracked objects at the start and at the end of measuring."""

    start: Whole | None = None
    last: Whole | None = None


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """A source line whose allocations triggered garbage collections, and the number of these collections."""

    file: str
    line: Whole
    collections: Whole


class CollectorCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One process's garbage collections while measuring. `survivors` of the `young` objects examined were alive.

    `triggers`: the lines that triggered most collections. `lines`: every line (`file:line`) that triggered any; column
    `line` of table `gc` has its number in this list, from 1.
    """

    collections: Whole = 0
    young: Whole = 0
    survivors: Whole | None = None
    heap: HeapSize = HeapSize()
    triggers: list[Trigger] = []
    lines: list[str] = []


class ObjectRow(msgspec.Struct, frozen=True, kw_only=True):
    """Number and bytes of objects of one type; `file` is empty where the allocation site was not sampled."""

    type: str
    file: str = ""
    line: Whole = 0
    count: Whole = 0
    bytes: Whole = 0


class ObjectCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process's objects. `rows`: objects counted at `samples` of its `collections`.

    With `sampled = "steps"`, `samples` and `collections` are numbers of EngineCore steps, and `at_collections` has the
    counts at collections.
    """

    collections: Whole = 0
    samples: Whole = 0
    young: Whole = 0
    cost_us: Number = 0.0
    traced_share: Number = 0.0
    rows: list[ObjectRow] = []
    sampled: str = ""
    at_collections: ObjectCounts | None = None


class ObjectSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by process index (as text), and the number of EngineCore steps that they cover."""

    steps: Whole = 0
    processes: dict[str, ObjectCounts] = {}


class StackFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function and its share of all samples, by self time."""

    function: str = ""
    file: str = ""
    line: Whole = 0
    share: Number = 0.0


FlameBox = tuple[Whole, Number, Number, str, str, Whole]
"""Depth, start and share (both as parts of all samples), function, file, line."""


class StackSamples(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """py-spy's samples of one process; `failed` says why there are none.

    `threads` is "loop" where only threads in vLLM's busy loops are counted, else "all".
    """

    failed: str = ""
    file: str = ""
    rate_hz: Whole = 0
    threads: str = ""
    top: list[StackFunction] = []
    flame: list[FlameBox] = []


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulator ran. `elapsed_s`: real time. `batch_queue`: whether steps overlapped."""

    steps: Whole = 0
    jumps: Whole = 0
    jumped_steps: Whole = 0
    elapsed_s: Number = 0.0
    batch_queue: bool = False


class OtherRouting(Hits, frozen=True, kw_only=True):
    """The same load on the same engines with another router, or in one cache (`router` is empty). `error`: why not."""

    router: str = ""
    error: str = ""


class SessionRegret(Hits, frozen=True, kw_only=True):
    """A session's requests, on `replicas` servers. `best_tokens`: hits with each at the server that had most of it."""

    session: str
    requests: Whole = 0
    replicas: Whole = 0
    best_tokens: Whole = 0


class ServerShare(Tally, frozen=True, kw_only=True):
    """One server of a fleet, since `since` (seconds since 1970): its start if all events since then were read.

    `why`: why it is not compared with the others, or since when its account is not whole; "" if it is. `still_tokens`:
    of its cause `other_replica`, what another held when it was asked for, stored `still_s` before (the median).
    """

    url: str
    since: Number
    model: str = ""
    why: str = ""
    down_since: Number | None = None
    requests: Whole = 0
    evicted_blocks: Whole = 0
    pool_use: Number | None = None
    pool_blocks: Whole | None = None
    block_size: Whole | None = None
    still_tokens: Whole = 0
    still_s: Number | None = None

    @property
    def note(self) -> str:
        down = self.down_since
        if down is None:
            return self.why
        since = time.strftime("%H:%M:%S", time.localtime(down))
        return f"DOWN since {since}: what it counted after its last answer is in no sum"


UNEVEN, ENOUGH = 1.5, 10
"""A server's share of the prompt tokens over the mean's, and requests a server, from which a router is uneven."""


def uneven(servers: Sequence[ServerShare]) -> str:
    """Return how uneven a router divided the prompt tokens, after its hits; "" if it did not."""
    asked = sorted(server.query_tokens for server in servers)
    few = sum(server.requests for server in servers) < ENOUGH * len(servers)
    if few or asked[-1] * len(asked) < UNEVEN * sum(asked):
        return ""
    shares = [percent(tokens, sum(asked), 0) for tokens in asked]
    shown = ", ".join(shares) if len(shares) <= 4 else f"{shares[0]} to {shares[-1]}"
    return f"; uneven: the servers got {shown} of the prompt tokens"


Router = Literal["", "round-robin", "session", "least-busy", "prefix", "given"]
GIVEN: Router = "given"
ROUTERS: tuple[Router, ...] = ("round-robin", "session", "least-busy", "prefix")
"""What a user may choose; lab/sim/routers.py has them."""
MOST_REPLICAS = 64


class FleetInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replay of several engines. `router`: which engine got a request; "given": as the log says.

    `others`: the load replayed with other routers, and in one cache of all engines' size.
    """

    replicas: Whole = 1
    router: str = ""
    others: list[OtherRouting] = []


class RecordedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Several servers that were recorded, and the `funnel` by their events.

    `logged`: the funnel of a log's requests. `sessions`: what these lost.
    """

    servers: list[ServerShare]
    funnel: Funnel
    logged: Funnel | None = None
    sessions: list[SessionRegret] = []


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A replay of the run with other settings. `gain_tokens`: its hit tokens minus those with the run's settings.

    `core`, `core_settings` and `flags` (vLLM's; None removes one) are the settings that differ from the run's; `change`
    names them in words. `cost`: the change's price in words. `cause`: the cause of misses that the change addresses.
    `error`: why the replay failed.
    """

    change: str
    cause: str = ""
    cost: str = ""
    core: str = ""
    core_settings: dict[str, Scalar] = {}
    flags: dict[str, str | None] = {}
    hit_tokens: Whole = 0
    gain_tokens: Whole = 0
    preemptions: Whole = 0
    error: str = ""


class Replayed(Hits, frozen=True, kw_only=True):
    """Replays of the run with the other core and with remedies. `why`: the reason if nothing was replayed.

    `requests`, `query_tokens`, `hit_tokens` and `preemptions` are the counts under the run's own settings. `untried`:
    settings that may help and were not replayed. `gap_tokens`: the replay's hits with the run's settings minus the
    run's; a smaller gain is within the replay's error.
    """

    requests: Whole = 0
    preemptions: Whole = 0
    other: Remedy | None = None
    remedies: list[Remedy] = []
    untried: Whole = 0
    why: str = ""
    gap_tokens: Whole = 0


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant facts about a GPU from NVML; 0 or "" where NVML does not report one."""

    memory_bytes: Whole = 0
    driver: str = ""
    power_limit_w: Number = 0.0


class ServerPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of a server that begin with the same block. `first`: the last digits of that block's hash."""

    first: str = ""
    visits: Whole = 0
    hit_tokens: Whole = 0
    lost_tokens: Whole = 0
    longest_tokens: Whole = 0


class ServerDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that match an earlier prompt up to token `position` and differ from there on."""

    position: Whole = 0
    first: str = ""
    times: Whole = 0
    new_tokens: Whole = 0


class ServerPart(Tally, frozen=True, kw_only=True):
    """A server's counts between two starts, from second `begin_s` of the recording to second `end_s`."""

    begin_s: Number = 0.0
    end_s: Number = 0.0
    loaded_tokens: Whole = 0


class ServerAccount(Tally, frozen=True, kw_only=True):
    """A server's counts by `kvtune record`.

    `parts`: the account before the first restart, and after each; empty if there was none. The lists of prefixes and of
    differences begin with the recording, and again with each start. `loaded_tokens`: hits that a connector loaded.
    `complete`: every KV event since the server's start was read. `logged`: requests of the log whose hits kvtune
    computed. For `reported` of them the log has the server's hit, and for `agree` of these the two are equal.
    `by_log`: the log's requests are divided by what the log alone tells, since the events do not tell causes. `fleet`:
    the counts are of several servers.
    """

    vllm: str = ""
    seconds: Number = 0.0
    events: str = "off"
    complete: bool = False
    recomputed_tokens: Whole = 0
    evicted_blocks: Whole = 0
    preemptions: Whole = 0
    restarts: Whole = 0
    resets: Whole = 0
    requests: Whole = 0
    loaded_tokens: Whole = 0
    parts: list[ServerPart] = []
    logged: Whole = 0
    by_log: bool = False
    reported: Whole = 0
    agree: Whole = 0
    prefixes: list[ServerPrefix] = []
    divergences: list[ServerDivergence] = []
    fleet: RecordedFleet | None = None


class TextGroup(Hits, frozen=True, kw_only=True, omit_defaults=True):
    """Requests whose prompts differ from an earlier prompt in one kind of text, and match it again after that.

    `place`, `line`: the part of the prompt with the text, and its line there; `label`: the text before it, masked.
    `at`: position of the first token that differs. `tokens_after`: tokens after it that the earlier prompt has, too.
    `request` and `like` are an example pair; its texts are kept only if the user asked for them. A replay with the
    text mended hit `hit_tokens` of the `query_tokens` of the original prompts; 0: not replayed. With the groups that
    stand before it mended as well, `with_before_hit_tokens`.
    """

    kind: str
    title: str = ""
    mend: str = ""
    place: str = ""
    line: Whole = 0
    label: str = ""
    at: Whole = 0
    requests: Whole = 0
    tokens_after: Whole = 0
    request: str = ""
    like: str = ""
    before: str = ""
    old: str = ""
    new: str = ""
    after: str = ""
    with_before_hit_tokens: Whole = 0


class ByServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server did by itself to `requests` prompts. `kind`: see kvtune/requests/log/bodies.py, `NOTES`."""

    kind: str
    where: str = ""
    requests: Whole = 0


class TextAccount(Tally, frozen=True, kw_only=True, omit_defaults=True):
    """Differences between a log's prompts.

    `unit`: tokens, or bytes where there was no tokenizer. `engine`: vLLM's own cache was replayed; else hits are those
    of an infinite cache. `mended_*`: a replay with all groups mended. `with_text`: it includes the examples' texts.
    `rendered_by`: what rendered the log's text, "" if it has token ids.
    """

    unit: str = "tokens"
    engine: bool = False
    requests: Whole = 0
    mended_hit_tokens: Whole = 0
    mended_query_tokens: Whole = 0
    groups: list[TextGroup] = []
    with_text: bool = False
    rendered_by: str = ""
    by_server: list[ByServer] = []


class Extras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Optional results of a run. A field with its default value was not recorded."""

    ledger: dict[str, CollectorCounts] = {}  # by process index
    types: ObjectSamples | None = None
    sites: ObjectSamples | None = None
    stacks: dict[str, StackSamples] = {}  # by process role
    devices: list[str] = []  # names of the GPUs in table `devices`
    gpus: list[GpuFacts] = []  # of the same GPUs
    digests: list[Whole] = []  # one number per schedule() call (KVTUNE_DIGESTS=1)
    misses: dict[str, Whole] = {}  # missed prompt tokens by cause, from `kvtune explain`
    replayed: Replayed | None = None  # hits with other settings, from `kvtune profile` and `explain --save`
    slo: dict[SloName, Positive] = {}  # upper limits in milliseconds (run.slo)
    sim: Replay | None = None
    fleet: FleetInfo | None = None
    computed_twice: dict[
        str, dict[str, Whole]
    ] = {}  # after a preemption: row of the request -> cause -> tokens
    server: ServerAccount | None = None
    texts: TextAccount | None = None
    idle: dict[str, object] = {}  # the fields of layout.idle.Idle
    step_cost: dict[str, Scalar] = {}  # the fields of device.cost.StepCost
    verdicts: list[
        dict[str, object] | None
    ] = []  # for each request, the fields of sim.verdicts.listener.PromptVerdict


def read_extras(stored: object) -> Extras:
    """Return the stored `Header.extra` with each field that fits its type; other fields get their defaults."""
    return Extras(**_fields(stored)[0])


def faults_of(stored: object) -> list[str]:
    """Return why fields of the stored `Header.extra` read as not recorded, a line for each."""
    return _fields(stored)[1]


def _fields(stored: object) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    faults = []
    for field in msgspec.structs.fields(Extras):
        if isinstance(stored, Mapping) and field.encode_name in stored:
            try:
                fields[field.name] = msgspec.convert(stored[field.encode_name], field.type)
            except msgspec.ValidationError as error:
                faults.append(f"extra.{field.name} is left out: {reason(error)}")
    return fields, faults
