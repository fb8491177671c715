"""What the prompts of several servers hit, and would hit with another router, pool or memory: the funnel. Pure.

    as routed       what the servers hit: exact, their own counters
    best replica    each prompt at the server that held most of it when its first step ended, all else as it was
    one cache       one LRU cache with the blocks of all pools, in the order of a log; None without one
    everything      each whole block that any server had computed since its start

A number that events alone do not tell is a range: the last token of a prompt, a block that may be an answer's, and
prompts that are being computed are in its width; so is everything missed by a server whose events are not all read.
"""

from __future__ import annotations

import msgspec

from kvtune.base.units import span
from kvtune.data.run.ranges import Whole


class Range(msgspec.Struct, frozen=True):
    """Tokens, `least` to `most`; both the same: exact."""

    least: Whole
    most: Whole

    @property
    def tokens(self) -> str:
        return span(f"{self.least:,}", f"{self.most:,}")

    def words(self, whole: int) -> str:
        return f"{span(*(f'{100 * tokens / whole:.0f}' for tokens in (self.least, self.most)))} %"


class Funnel(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. Ranges without width are exact. `one_cache`: None without a log, and where windows or states are kept."""

    prompt_tokens: Whole
    as_routed: Whole
    best_replica: Range
    one_cache: Range | None = None
    everything: Range

    @property
    def steps(self) -> list[tuple[str, Range]]:
        """What each step costs, in tokens. Only pools may cost less than nothing: one LRU cache is no bound."""
        routed = Range(self.as_routed, self.as_routed)
        rows = [("router", routed, self.best_replica)]
        if self.one_cache is not None:
            rows += [
                ("pools", self.best_replica, self.one_cache),
                ("memory", self.one_cache, self.everything),
            ]
        else:
            rows.append(("pools and memory", self.best_replica, self.everything))
        rows.append(("workload", self.everything, Range(self.prompt_tokens, self.prompt_tokens)))
        least = {name: min(0, high.least - low.most) if name == "pools" else 0 for name, low, high in rows}
        return [
            (name, Range(max(least[name], high.least - low.most), high.most - low.least))
            for name, low, high in rows
        ]

    @property
    def sentence(self) -> str:
        """Return the line that says it all."""
        whole = self.prompt_tokens
        if not whole:
            return "no prompt has been looked up yet"
        parts = [
            f"as routed {100 * self.as_routed / whole:.0f} %",
            f"each prompt at the replica that had most of it {self.best_replica.words(whole)}",
            *(
                [f"one cache of all pools {self.one_cache.words(whole)}"]
                if self.one_cache is not None
                else []
            ),
            f"everything kept {self.everything.words(whole)}",
        ]
        (name, first), *others = [(name, cost.words(whole).removesuffix(" %")) for name, cost in self.steps]
        return (
            f"{'; '.join(parts)}: {', '.join([f'{name} {first} points', *(f'{n} {w}' for n, w in others)])}"
        )
