"""The speed of a server of which only its requests' times are known: replays, until replayed requests take as long.

A recording of a server and a log have no steps to fit a cost to (lab/device/fit.py). They have when each request was
sent and answered, and perhaps when its first token came; a recording also has the server's own sums of both. A first
cost is fitted to the requests as if each ran alone; replays then correct it for the requests that ran beside it.

In the CLI's process. In: a run or a log with times, its workload, a set-up. Out: the set-up with a fitted cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.units import percent
from kvtune.data.run.step_work import fit_step_time
from kvtune.data.run.types import Run, Table
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.device.fit import in_flight
from kvtune.lab.setup.setup import Setup

Floats = NDArray[np.float64]

ROUNDS = 8
"""The most replays that correct the cost."""
FITTED = 2_000
"""The most requests, the first ones, that these replays send."""
CLOSE = 0.02
"""Replayed times that are off by less than this share are not corrected further."""
FEWEST = 8
"""Fewest requests with known times."""
SLOPES = np.array([[1.2, 0.3], [0.8, 0.5]])
"""How much the logarithms of the times before and after the first token grow with those of the costs of a prompt token
and of a step, as a first guess: a prefill delays all other requests."""
MOST_CHANGE = 1.0
"""Largest change of a cost's logarithm from one replay to the next."""
FITTED_SHARE = 0.6
"""The share of the requests, the first in time, whose times the held-out check takes as known."""


@dataclass(frozen=True)
class Times:
    """How long requests took. `first_s`: until the first token; NaN: not known.

    `computed`: prompt tokens that were not hit. `busy_s`: seconds with requests in flight. `first_share`: the share of
    the requests' time before their first tokens, by the server's own sums; NaN: not known.
    """

    total_s: Floats
    first_s: Floats
    computed: Floats
    output: Floats
    busy_s: float
    first_share: float = float("nan")

    @classmethod
    def of(cls, table: Table, server: Table | None = None) -> Times:
        """Take the times from a requests table, and the share from the table of a server's readings."""
        hits = np.maximum(table["hit_tokens"], 0)
        share = float("nan")
        if server is not None and len(server["t_s"]) > 1:
            first_s, rest_s = (
                float(server[name][-1] - server[name][0]) for name in ("first_token_s", "gap_s")
            )
            if first_s > 0 and rest_s > 0:
                share = first_s / (first_s + rest_s)
        return cls(
            table["finished_s"] - table["sent_s"],
            table["first_token_s"] - table["sent_s"],
            (table["prompt_tokens"] - hits).astype("f8"),
            table["output_tokens"].astype("f8"),
            in_flight(table, 0.0)[0],
            share,
        )

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.isfinite(self.total_s) & (self.total_s > 0)

    @property
    def with_first(self) -> NDArray[np.bool_]:
        """The requests whose first token and rest are both known."""
        first = self.known & np.isfinite(self.first_s) & (self.first_s > 0)
        both: NDArray[np.bool_] = first & (self.output > 1) & (self.total_s > self.first_s)
        return both


def like_the_server(setup: Setup, times: Times, replay: Callable[[Setup], Run], source: str) -> Setup:
    """Return the set-up with a cost with which replayed requests take as long as `times` says.

    `replay` replays them at the times at which they were sent. Without usable times, or if the replays cannot be made
    as slow or as fast, the set-up keeps the nominal cost.
    """
    if times.known.sum() < FEWEST:
        return setup
    cost, slopes = _first(times), SLOPES
    best: tuple[float, StepCost] | None = None
    before: tuple[Floats, Floats] | None = None
    for _ in range(ROUNDS):
        replayed = Times.of(replay(setup.replayed(cost=cost)).table("requests"))
        off = _off(times, replayed)
        worst = float(np.abs(off).max())
        if best is None or worst < best[0]:
            best = worst, _described(cost, times, replayed, source)
        if worst <= CLOSE:
            break
        if before is not None:  # Broyden's update: the slopes agree with what the last change did
            change, old = before
            slopes = slopes + np.outer(old - off - slopes @ change, change) / (change @ change)
        change = np.clip(np.linalg.lstsq(slopes, off, rcond=0.05)[0], -MOST_CHANGE, MOST_CHANGE)
        before = change, off
        prefill, step = np.exp(change).tolist()
        cost = _scaled(cost, prefill, step)
    assert best is not None
    return setup.replayed(cost=best[1])


def speed_words(cost: StepCost, times: Times) -> str:
    """Say how fast replays are, and how that was found."""
    if not cost.fitted:
        return (
            f"at the nominal speed of a large accelerator, {cost.step_us / 1000:.0f} ms a step: for "
            f"{int(times.known.sum())} requests it is known when they were sent and answered, a fit needs {FEWEST}"
        )
    return (
        f"at the server's speed, fitted to the times of {int(times.known.sum())} requests: "
        f"{cost.step_us / 1000:.3g} ms a step and {cost.prefill_token_us:.3g} us a prompt token; a request's time is "
        f"off by {percent(cost.error_share, digits=0)} in the middle"
    )


def _first(times: Times) -> StepCost:
    """Fit a first cost to the requests' times as if each ran alone, and divide it by how many ran at once."""
    both, counted = times.with_first, times.known
    rows = [(times.computed[both], np.ones(both.sum()), times.first_s[both])]
    rows += [(np.zeros(both.sum()), times.output[both] - 1, (times.total_s - times.first_s)[both])]
    rest = counted & ~both
    rows += [(times.computed[rest], np.maximum(times.output[rest], 1), times.total_s[rest])]
    prefill, steps, seconds = (np.concatenate([row[n] for row in rows]) for n in range(3))
    step_us, prefill_us = map(float, fit_step_time(np.column_stack([steps, prefill]), seconds * 1e6))
    step_us = step_us or float(np.median(seconds / np.maximum(steps, 1))) * 1e6
    as_nominal = step_us / NOMINAL.step_us
    cost = _scaled(NOMINAL, as_nominal, as_nominal)
    cost = msgspec.structs.replace(cost, prefill_token_us=prefill_us or cost.prefill_token_us)
    alone = times.busy_s / float(times.total_s[counted].sum())
    return _scaled(cost, alone, alone)


def _scaled(cost: StepCost, prefill: float, step: float) -> StepCost:
    return msgspec.structs.replace(
        cost,
        step_us=cost.step_us * step,
        decode_us=cost.decode_us * step,
        kv_token_us=cost.kv_token_us * step,
        prefill_token_us=cost.prefill_token_us * prefill,
    )


def _off(times: Times, replayed: Times) -> Floats:
    """Return by how much (as logarithms) the run's prefills and steps took longer than the replay's."""
    counted = times.known & replayed.known
    total = _middle(times.total_s[counted] / replayed.total_s[counted])
    both = times.with_first & replayed.with_first
    if both.sum() >= FEWEST:
        first = _middle(times.first_s[both] / replayed.first_s[both])
        rest = _middle((times.total_s - times.first_s)[both] / (replayed.total_s - replayed.first_s)[both])
        return np.array([first, rest])
    share = _share(replayed)
    if np.isfinite(times.first_share) and 0 < share < 1:
        # Of the same total, another part comes before the first tokens.
        parts: Floats = np.array([times.first_share / share, (1 - times.first_share) / (1 - share)])
        return np.asarray(total + np.log(parts), dtype="f8")
    return np.array([total, total])


def _middle(ratios: Floats) -> float:
    """Return the mean logarithm without the outer tenths: a pause of the machine is not the server's speed."""
    logs = np.sort(np.log(ratios))
    cut = len(logs) // 10
    return float(logs[cut : len(logs) - cut].mean())


def _share(times: Times) -> float:
    both = times.with_first
    whole = float(times.total_s[both].sum())
    return float(times.first_s[both].sum()) / whole if whole else float("nan")


def _described(cost: StepCost, times: Times, replayed: Times, source: str) -> StepCost:
    """Return the cost with how well replayed requests agree with the run's."""
    counted = np.flatnonzero(times.known & replayed.known)
    ratios = replayed.total_s[counted] / times.total_s[counted]
    first, later = np.split(ratios, [int(len(ratios) * FITTED_SHARE)])
    off = abs(float(np.exp(_middle(later) - _middle(first))) - 1) if len(later) else 1.0
    return msgspec.structs.replace(
        cost,
        fitted=True,
        clock="requests",
        source=source,
        machine="the server",
        error_share=float(np.median(np.abs(ratios - 1))),
        held_out_share=off,
        unexplained_share=abs(float(np.exp(_middle(ratios))) - 1),
    )
