"""What is seen of a server at one moment, as `--json` has it; the screen and the pages draw it."""

from __future__ import annotations

import msgspec

from kvtune.data.run.extras import ServerDivergence, ServerPrefix
from kvtune.data.tally import Hits, Tally
from kvtune.servers.watch.drafts import Drafts
from kvtune.servers.watch.facts import Next
from kvtune.servers.watch.possible import Possible
from kvtune.servers.watch.regime import Finding
from kvtune.servers.watch.tier import TierUse

SHORT_S = 10.0
LONG_S = 300.0
SPANS = {"10 s": SHORT_S, "5 min": LONG_S}
"""Periods of a snapshot that end now, and their seconds. They are shorter where the server is not watched as long."""


class Period(Tally, frozen=True, kw_only=True):
    """Hits and misses of some seconds.

    `loaded_tokens`: those of the hits that a connector loaded, from host memory or another machine.
    """

    seconds: float
    recomputed: int = 0
    loaded_tokens: int = 0


class Times(msgspec.Struct, frozen=True):
    median_ms: float | None = None
    p99_ms: float | None = None


class Events(msgspec.Struct, frozen=True):
    """`state`: on, off, unreachable, or unreadable, also after the reader has stopped.

    `complete`: every event since the server's start was read.
    """

    state: str
    complete: bool = False
    lost_batches: int = 0
    unknown_messages: int = 0
    ranks: int = 0


class DifferenceText(msgspec.Struct, frozen=True):
    """The text before a difference, and what follows in an earlier and in the newest prompt."""

    before: str
    earlier: str
    later: str


class Snapshot(Hits, frozen=True, kw_only=True):
    """The state of a server at one moment. None: the server does not report it."""

    url: str
    at: float
    model: str
    vllm: str
    engines: int
    events: Events
    running: int | None
    waiting: int | None
    waiting_by_reason: dict[str, int]
    pool_use: float | None
    pool_blocks: int | None
    block_size: int | None
    preemptions: int | None
    requests: int | None
    prompt_tokens: int
    output_tokens: int
    evicted_blocks: int
    prompt_tokens_s: float | None
    output_tokens_s: float | None
    first_token: Times
    between_tokens: Times
    evicted_blocks_s: float | None
    evicted_age_s: float | None
    cached_blocks: int | None
    periods: dict[str, Period]
    prefixes: list[ServerPrefix]
    texts: dict[str, str]
    """The first words of prefixes, if they were asked for."""
    divergences: list[ServerDivergence]
    restarts: int
    notes: list[str]
    served: dict[str, float] = {}
    """The server's own times (`SERVED` of servers/watch/metrics.py)."""
    differences: list[DifferenceText] = []
    """The text at the divergences, in their order, if it was asked for."""
    down_since: float | None = None
    """When the server last answered; None if it does."""
    regime: Finding | None = None
    """What bounds the server, by the looks of the last seconds; None before the second look."""
    possible: Possible | None = None
    tier: TierUse | None = None
    """What came of the tier below the pool; None: the server has none."""
    drafts: Drafts | None = None
    next: list[Next] = []
    """What would tell more, if the server publishes no events."""


def down(shot: Snapshot) -> Snapshot:
    """Return what is still known of a server that does not answer: no rate, no state, no last seconds."""
    return msgspec.structs.replace(
        shot,
        down_since=shot.at,
        running=None,
        waiting=None,
        waiting_by_reason={},
        pool_use=None,
        prompt_tokens_s=None,
        output_tokens_s=None,
        first_token=Times(),
        between_tokens=Times(),
        evicted_blocks_s=None,
        evicted_age_s=None,
        cached_blocks=None,
        regime=None,
        drafts=None,
        periods={name: period for name, period in shot.periods.items() if name not in SPANS},
    )
