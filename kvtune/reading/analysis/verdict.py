"""The limit of a run, a setting to try, and the command for it: a run's results -> Verdict. Pure.

Each possible limit gets its share of the engine's time; the largest share is named if it is at least `LEAST_SHARE`. The
text says `up to` if the share is an upper bound. A setting is advised only if its replay on this run helped
(replayed.py). For what no replay can judge (pauses, host time), the text advises to measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtune.base.commands import command
from kvtune.base.units import count, ms, percent
from kvtune.data.causes import DIVERGED, UNCLASSIFIED, WINNABLE
from kvtune.data.run.types import Run, untimed
from kvtune.data.tally import Tally
from kvtune.reading.analysis.again import (
    MODEL,
    bounds_line,
    explain_line,
    left_out_of_run,
    named,
    profile_line,
    tune_line,
    with_remedy,
)
from kvtune.reading.analysis.cache import match_unit
from kvtune.reading.analysis.host.ceiling import Ceiling
from kvtune.reading.analysis.host.overlap import Overlap
from kvtune.reading.analysis.latency import Latency
from kvtune.reading.analysis.replayed import brings, helping, mends, points, preempts, tried
from kvtune.reading.analysis.stalls.account import Stalls
from kvtune.reading.analysis.stalls.delays import ADVICE, CAUSES
from kvtune.reading.analysis.step_time import StepTime

LEAST_SHARE = 0.03
"""A limit below this share of the engine's time is not named."""

LEAST_UNKNOWN_SHARE = 0.2
"""Computing prompts, with unknown causes of misses, is named as a limit only above this share."""

LEAST_HOST_SHARE = 0.1
"""The scheduler's Python is named only from this share of the step time on, as some of it is always needed."""

ROLES = {"front_end": "the front end", "engine_core": "EngineCore"}

LEAST_HIDDEN_SHARE = 0.001
"""Pauses that the device hid are mentioned from this share of the step time on."""

BUSY_SHARE = 0.5
"""An engine that spends less than this share of the time in steps is limited by the load."""

TITLES = {
    "cache": "prompts that are computed again",
    "block": "hits of whole blocks only",
    "text": "prompts whose text differs early",
    "pool": "preemptions",
    "collector": "Python's garbage collector",
    "host": "the scheduler's Python",
    "stalls": "stalls",
    "unknown": "prompts that may be computed again",
}

OF_THE_CACHE = ("cache", "block", "pool")
"""Limits that a replay with other settings can judge."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind` names the limit for programs: nothing, cache, block, text, pool, collector, host, stalls, load, model or
    unknown.

    `limits`: the kinds of all limits, the largest first; a pool that preempts comes first, without a share. `also`: the
    title of the second one, with its share. `without`: the flags that the run's commands leave out, in a sentence.
    """

    kind: str
    limit: str
    advice: str
    command: str
    share: float | None = None
    limits: tuple[str, ...] = ()
    also: str = ""
    without: str = ""


NAMED = f" {MODEL} is what the server was started with; {{name}} is only the name it answers to."


def verdict(
    run: Run,
    times: Latency,
    cache: Tally,
    time: StepTime,
    stalls: Stalls,
    overlap: Overlap | None = None,
    ceiling: Ceiling | None = None,
    file: str = "",
) -> Verdict:
    """Return the run's limit, what to do, and the command for it. `file`: the run file, "" if it is not known."""
    if len(run.table("requests")["id"]) and times.output_tokens:
        candidates = [
            _cache(run, cache, time),
            _block(run, cache, time),
            _text(run, cache, time),
            _collector(run, time),
            _host(run, time, overlap, ceiling),
            _stalls(run, stalls),
        ]
        verdict = _costliest(run, candidates, cache, time, overlap)
    else:
        verdict = _nothing(run)
    if not verdict.command:
        verdict = replace(verdict, command=explain_line(run, file))
    if MODEL in verdict.command.split():
        verdict = replace(verdict, advice=verdict.advice + NAMED.format(name=run.header.model))
    return replace(verdict, without=left_out_of_run(run))


def _costliest(
    run: Run, candidates: Sequence[Verdict | None], cache: Tally, time: StepTime, overlap: Overlap | None
) -> Verdict:
    limits = [v for v in candidates if v is not None and (v.share or 0) >= LEAST_SHARE]
    preempted = _pool(run)
    if preempted is None and not limits and UNCLASSIFIED in cache.misses:
        unknown = _unknown(run, cache, time)
        limits += [unknown] if (unknown.share or 0) > LEAST_UNKNOWN_SHARE else []
    limits.sort(key=lambda v: -(v.share or 0))
    if preempted is not None:  # its share of the time is not known, and the other shares follow from it
        limits.insert(0, preempted)
    if limits:
        first, *others = limits
        whole = "time" if time.total_s else "prompt tokens"
        also = "".join(
            f"{TITLES[v.kind]}, up to {percent(v.share or 0, digits=0)} of the {whole}" for v in others[:1]
        )
        return replace(first, limits=tuple(v.kind for v in (first, *others)), also=also)
    if time.busy_share is not None and time.steps and time.busy_share < BUSY_SHARE:
        return _load(run, time.busy_share)
    return _model(run, cache, time, overlap)


def winnable(cache: Tally) -> int:
    """Count the missed prompt tokens that settings, the pool or a better policy can turn into hits."""
    return sum(cache.misses.get(cause, 0) for cause in WINNABLE)


def _nothing(run: Run) -> Verdict:
    why = run.header.why.rstrip(".") or "no request got a token"
    return Verdict(
        "nothing",
        f"This run measured nothing: {why}.",
        "Check the machine and the model before anything else.",
        command("doctor", named(run)),
    )


def _prefill_share(cache: Tally, time: StepTime, tokens: int) -> float:
    """Return the largest share of step time that computing `tokens` prompt tokens can have taken.

    Without times of steps, return their share of all prompt tokens.
    """
    computed = cache.missed
    if not computed:
        return 0.0
    if time.total_s:
        return time.prefill_s * tokens / computed / time.total_s
    return tokens / cache.query_tokens


def _part(lost: int, cache: Tally) -> str:
    whole = cache.query_tokens
    return f"{count(lost)} of {count(whole)} prompt tokens ({percent(lost, whole)})"


def _cost(share: float, time: StepTime, words: str) -> str:
    """Say what share of the engine's time that is; "" without times of steps, where shares are of prompt tokens."""
    return f"{words} {percent(share, digits=0)} of the engine's time" if time.total_s else ""


def _cache(run: Run, cache: Tally, time: StepTime) -> Verdict | None:
    lost = winnable(cache)
    if not lost:
        return None
    share = _prefill_share(cache, time, lost)
    limit = (
        f"Recomputing prompts that the engine had already computed: {_part(lost, cache)} were seen before but not in "
        f"the cache when they came again{_cost(share, time, ', which costs up to')}."
    )
    return Verdict("cache", limit, *_advice(run), share)


def _advice(run: Run) -> tuple[str, str]:
    """Return advice from the replays of this run, and the command for it."""
    replayed = run.header.extra.replayed
    if replayed is not None and (best := helping(replayed)):
        first = best[0]
        cost = f", for {first.cost}" if first.cost else ""
        return f"Replayed on this run, {first.change} brings {brings(first, replayed)}{cost}.", with_remedy(
            run, first
        )
    if replayed is not None and (others := tried(replayed)):
        none = (
            f"None of the {len(others)} settings that were replayed on this run helps"
            if replayed.remedies
            else f"Replayed on this run, {others[0].change} does not help, and no other setting is known that may"
        )
        return f"{none}: see what any cache of this size could hit.", bounds_line(run)
    # The command is `explain`, which `verdict` writes: it knows the run's file.
    return "No other setting was replayed on this run: see which one helps before you change any.", ""


def _unknown(run: Run, cache: Tally, time: StepTime) -> Verdict:
    lost = cache.misses[UNCLASSIFIED]
    share = _prefill_share(cache, time, lost)
    limit = (
        f"{_part(lost, cache)} were computed{_cost(share, time, ', in up to')}; whether the cache could have saved "
        "that is not known, because the workload could not be made again from this run."
    )
    if run.header.source == "server":
        return Verdict("unknown", limit, "Replay its log: then every miss gets a cause.", "", share)
    advice = "Profile it again where its trace file is at hand: then every miss gets a cause."
    return Verdict("unknown", limit, advice, profile_line(run), share)


def _block(run: Run, cache: Tally, time: StepTime) -> Verdict | None:
    dropped = cache.misses.get("eagle_drop", 0)
    lost = cache.misses.get("partial_block", 0) + cache.misses.get("last_token", 0) + dropped
    if not lost:
        return None
    share = _prefill_share(cache, time, lost)
    limit = (
        f"The block size: hits are counted in whole blocks of {match_unit(run)} tokens"
        f"{', less one for EAGLE or MTP' if dropped else ''}, so {count(lost)} prompt "
        f"tokens ({percent(lost, cache.query_tokens)}) that the cache knew were computed again"
        f"{_cost(share, time, ', up to')}."
    )
    return Verdict("block", limit, *_advice(run), share)


def _text(run: Run, cache: Tally, time: StepTime) -> Verdict | None:
    lost = cache.misses.get(DIVERGED, 0)
    if not lost:
        return None
    share = _prefill_share(cache, time, lost)
    limit = (
        f"The text of the prompts: {_part(lost, cache)} stand in an earlier prompt, too, after a text that differs, "
        f"and were computed again{_cost(share, time, ', up to')}."
    )
    replayed = run.header.extra.replayed
    if replayed is not None and (best := mends(run.header.extra.texts, replayed)):
        gain = points(best[0].gain_tokens, replayed.query_tokens)
        advice = (
            f"Replayed on this run, mending the prompts ({best[0].what}) brings {gain} of hits. {best[0].how}"
        )
        return Verdict("text", limit, advice, "", share)
    advice = "The log of its requests says which text that is, and what mending it brings."
    return Verdict("text", limit, advice, "", share)


def _pool(run: Run) -> Verdict | None:
    preempted = int(run.table("requests")["preemptions"].sum())
    requests = int(np.isfinite(run.table("requests")["sent_s"]).sum())
    if not preempts(preempted, requests):
        return None
    limit = (
        f"The KV cache pool is too small for the requests in flight: {count(preempted)} times a running request "
        "was thrown out and computed again later."
    )
    return Verdict("pool", limit, *_advice(run))


def _collector(run: Run, time: StepTime) -> Verdict | None:
    if not time.total_s or not time.gc_s:
        return None
    share = time.exposed_gc_s / time.total_s
    limit = f"Python's garbage collector: its pauses in EngineCore are {percent(share)} of the step time."
    hidden = (time.gc_s - time.exposed_gc_s) / time.total_s
    if hidden >= LEAST_HIDDEN_SHARE:
        limit += f" Others, {percent(hidden)} of it, cost nothing: the device computed meanwhile."
    if run.header.core.active:
        advice = "Find what allocates: the probe `types` counts the objects that survive, by type."
        return Verdict("collector", limit, advice, profile_line(run, "--probe", "types"), share)
    gain = "which freezes long-lived objects and makes fewer new ones"
    return Verdict("collector", limit, *_with_core(run, "pauses", gain), share)


def _host(run: Run, time: StepTime, overlap: Overlap | None, ceiling: Ceiling | None) -> Verdict | None:
    if not time.total_s:
        return None
    share = time.exposed_host_s / time.total_s
    limit = (
        f"The scheduler's own Python: schedule and update take {percent(share, digits=0)} of the step time."
    )
    if overlap is not None and overlap.host_limits:
        share = overlap.exposed_share
        limit = f"The host: it works {ms(overlap.host_ms)} a step, and the device waits for it.{overlap.seen}"
        if ceiling is not None:
            limit += (
                f" It drives {count(ceiling.tokens_s)} tokens/s at most; "
                f"{ROLES[ceiling.process]} sets that, with {ceiling.cpu_us_per_token[ceiling.process]:.1f} us a token."
            )
    if share < LEAST_HOST_SHARE:
        return None
    if run.header.core.active:
        advice = "See which functions it is: sample EngineCore's stacks while it runs."
        return Verdict("host", limit, advice, profile_line(run, "--stacks"), share)
    gain = "whose steady-decode path schedules faster"
    return Verdict("host", limit, *_with_core(run, "host time", gain), share)


def _with_core(run: Run, what: str, gain: str) -> tuple[str, str]:
    """Return the advice to measure with kvtune's core what no replay shows, and the command."""
    advice = f"No replay shows {what}: measure the load with kvtune's core, {gain}, and compare."
    return advice, profile_line(run, core="kvtune")


def _stalls(run: Run, stalls: Stalls) -> Verdict | None:
    """Return the limit `stalls`: time in which no process worked. Collections and preemptions are separate limits."""
    lost_ms = sum(stalls.lost_ms.values())
    if not lost_ms or run.header.wall_s <= 0 or not run.header.valid.timings:
        return None
    share = min(1.0, lost_ms / 1000.0 / run.header.wall_s)
    cause = max(stalls.lost_ms, key=lambda name: stalls.lost_ms[name])
    limit = (
        f"Stalls: {count(stalls.slow)} of {count(stalls.gaps)} gaps between tokens were over "
        f"{ms(stalls.limit_ms or 0.0)}, and nobody worked for a request in {percent(share, digits=0)} of the engine's "
        f"time. In most of that, {CAUSES[cause]}."
    )
    next_ = {
        "off_cpu": command("doctor", named(run)),
        "device": profile_line(run, "--repeat", "3"),
    }.get(cause) or profile_line(run, "--stacks")
    return Verdict("stalls", limit, ADVICE[cause], next_, share)


def _load(run: Run, busy: float) -> Verdict:
    limit = (
        f"The load itself: the engine was busy {percent(busy, digits=0)} of the time, so it is not what sets "
        "the throughput."
    )
    advice = "Send more (a higher rate or concurrency) to see what the engine can do."
    return Verdict("load", limit, advice, bounds_line(run))


def _model(run: Run, cache: Tally, time: StepTime, overlap: Overlap | None) -> Verdict:
    share = f" ({percent(time.execute_s, time.total_s, 0)} of the step time)" if time.total_s else ""
    if untimed(run.header):
        limit = "Nothing stands out in the cache; a nominal step cost says nothing of times."
    elif not time.total_s:
        limit = "Nothing stands out in the cache, and no step times were recorded to say more."
    elif overlap is not None and overlap.device_ms is not None:
        limit = (
            f"The {overlap.waited_for}: it needs {ms(overlap.device_ms)} a step, the host {ms(overlap.host_ms)} of it, "
            f"hidden.{overlap.seen} Cache, collector and scheduler cost little in this run."
        )
    else:
        limit = f"The model's own computing{share}: cache, collector and scheduler cost little in this run."
    if (time.total_s or untimed(run.header)) and cache.hit_tokens and not winnable(cache):
        limit += " The cache hit every token that it could have held."
    advice = "No cache setting changes that; check with a search over all of them, or change batch size or hardware."
    return Verdict("model", limit, advice, tune_line(run))
