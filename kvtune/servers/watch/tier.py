"""What the tiers below a server's pool were given, hold, were asked for and gave, by events and counters. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from kvtune.base.units import count, ms, percent, size
from kvtune.data.causes import cause_title
from kvtune.servers.watch.events import Hash, Removed, Stored
from kvtune.servers.watch.metrics import STORED, Scrape

REMEMBERED = 200_000
"""Most blocks that are remembered after the last tier evicted them."""
LOWER = ("loadable", "evicted_from_both", "window_not_stored", "never_stored")
"""What a tier had of a prompt, in the order of its tokens."""
TOLD = 3
"""Most reasons that a verdict tells."""


@dataclass(slots=True)
class Tier:
    """The tiers of a rank. A block of each group, by its hash and the group: of those that a tier holds, `held` has how
    many do, and when the first stored it; of the others `gone` has that, and when the last evicted it.

    `kinds`: of the pool's groups. `stored`: blocks by group. `asked`: tokens beyond the hits in the pool, by LOWER or
    cause. `ages_s`: of evicted blocks that were asked for, how long they were kept, and how long ago they were stored.
    """

    held: dict[tuple[Hash, int], tuple[int, float]] = field(default_factory=dict)
    gone: OrderedDict[tuple[Hash, int], tuple[float, float]] = field(default_factory=OrderedDict)
    kinds: dict[int, str] = field(default_factory=dict)
    stored: Counter[int] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    ages_s: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1_000))

    def add(self, event: Stored | Removed, time_s: float) -> None:
        group, change = event.group_idx or 0, 1 if isinstance(event, Stored) else -1
        self.stored[group] += len(event.block_hashes) * (change > 0)
        for name in event.block_hashes:
            tiers, since = self.held.pop((name, group), (0, time_s))
            if tiers + change > 0:
                self.held[name, group] = tiers + change, since
                self.gone.pop((name, group), None)
            elif tiers:
                self.gone[name, group] = since, time_s
        while len(self.gone) > REMEMBERED:
            self.gone.popitem(last=False)

    def count(self, tokens: Mapping[str, int], age_s: tuple[float, float] | None) -> None:
        """Count what was `asked` of it for a prompt; `age_s`: as `age_s` returned."""
        self.asked.update(tokens)
        self.ages_s += [age_s] if age_s is not None and LOWER[1] in tokens else []

    def masks(self, name: Hash | None, groups: Iterable[int]) -> tuple[int, int]:
        """Return the groups of which a tier holds this block, and of which one ever held it, as bits."""
        held = sum(1 << group for group in groups if (name, group) in self.held)
        return held, held | sum(1 << group for group in groups if (name, group) in self.gone)

    def age_s(self, names: Sequence[Hash], groups: Iterable[int], now: float) -> tuple[float, float] | None:
        """Return `ages_s` of the first evicted block of these."""
        gone = (self.gone.get((name, group)) for name in names if self.gone for group in groups)
        return next(((left - since, now - since) for since, left in filter(None, gone)), None)


class TierUse(msgspec.Struct, frozen=True):
    """Since the server's start; None: not published, as `verdict` says. Blocks are those of one group.

    `asked_tokens`: of prompts, beyond what the pool had. `loadable_tokens`: those that a tier could serve, also after a
    preemption. `rest`: the others in whole blocks, by why not. `evicted_s`: medians of `ages_s` (see `Tier`).
    """

    verdict: str
    stored_bytes: int | None
    stored_blocks: int | None
    kept_blocks: int | None
    asked_tokens: int
    loadable_tokens: int | None
    loaded_tokens: int
    rest: dict[str, int]
    evicted_s: tuple[float, float] | None


def use(tiers: Sequence[Tier], last: Scrape, *, complete: bool) -> TierUse | None:
    """Return what came of each rank's tiers; None without any. `complete`: events tell all that they gave."""
    stored = sum((tier.stored for tier in tiers), Counter[int]())
    rest = sum((tier.asked for tier in tiers), Counter[str]())
    asked, loaded = (int(last.get(f"external_prefix_cache_{name}") or 0) for name in ("queries", "hits"))
    if not asked and not stored:
        return None
    ages_s = [median(ages) for ages in zip(*(age for tier in tiers for age in tier.ages_s), strict=True)]
    made = TierUse("", last.whole(STORED), None, None, asked, None, loaded, {}, None)
    if stored and complete:
        made = msgspec.structs.replace(
            made,
            stored_blocks=stored.total(),
            kept_blocks=sum(len(tier.held) for tier in tiers),
            loadable_tokens=rest.pop(LOWER[0], 0),
            rest=dict(rest),
            evicted_s=(ages_s[0], ages_s[1]) if ages_s else None,
        )
    kinds = tiers[0].kinds.items() if tiers else ()
    never = [f"group {group} ({kind})" for group, kind in kinds if not stored[group]]
    return msgspec.structs.replace(made, verdict="; ".join(_verdict(made, last, never)))


def _verdict(made: TierUse, last: Scrape, never: Sequence[str]) -> Iterator[str]:
    """Yield what came of the tokens. `never`: the groups of which the tiers were given no block."""
    stored = "" if made.stored_bytes is None else f"stored {size(made.stored_bytes)}, "
    time = "" if last.started is None else f" in {ms(1000 * (last.at - last.started))}"
    yield f"{stored}loaded {count(made.loaded_tokens)} of {count(made.asked_tokens)} tokens that were asked for{time}"
    for why in sorted(made.rest, key=lambda why: -made.rest[why])[:TOLD]:
        more = f": {', '.join(never)} never is" if never and why == LOWER[2] else ""
        if why == LOWER[1] and made.evicted_s is not None:
            kept, again = (ms(1000 * age_s) for age_s in made.evicted_s)
            more = f", {kept} after it was stored, and asked for again after {again}"
        yield f"{percent(made.rest[why], made.asked_tokens)} {cause_title(why)}{more}"
    if made.stored_blocks is None:
        yield "not known: what it holds, as its events are missing or are not all that was loaded"
    if made.stored_bytes is None and made.stored_blocks:
        yield f"not published: vllm:{STORED}_total"
