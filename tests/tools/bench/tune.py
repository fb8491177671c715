"""Does `kvtune tune` end at the best setting of an exhaustive engine grid, and in how much less time?

    python tests/tools/bench/tune.py simulate [--only rounds]  # the whole grid in the simulator (exact hits)
    python tests/tools/bench/tune.py grid [--only rounds] [--budget 10] [--part 1/2]  # the grid on the real engine
    python tests/tools/bench/tune.py tune [--only rounds]  # `kvtune tune`, engine confirmation included
    python tests/tools/bench/tune.py search [--only rounds]  # `kvtune tune --on sim`: where there is no time for it
    python tests/tools/bench/tune.py guarded [--only rounds]  # the same with the other workloads as guards, simulated
    python tests/tools/bench/tune.py elsewhere  # tuned settings on the workloads they were not tuned on
    python tests/tools/bench/tune.py  # what is known so far

tiny-gemma3 at working sets near the size of the pool. `grid` runs vLLM's EngineCore with the real model and worker in a
fork a setting (vLLM is imported once, steps take virtual time), the settings best in simulation first, then in a seeded
order: what there is of an unfinished grid is a sample of it. Hit rates are counts, so a busy machine changes none.
The grid's time is what `kvtune sweep --on engine` would take: a measured engine trial of `kvtune tune` times the number
of settings. Results are lines of reports/bench-tune.jsonl, by command, workload and setting: nothing is run twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvtune.analysis.study import Settings
from kvtune.engine.setup import Load, Pool, Setup
from kvtune.tune.trials.setup import core_part
from kvtune.workload.spec import build

ROOT = Path(__file__).parents[3]
MODEL = "tiny-gemma3"
BLOCK = 32
DEFAULT_BLOCK = 128  # vLLM's on a CPU
WORKLOADS = {
    "rounds": ("rounds:prefixes=10,prefix=1500,suffix=64,output=4,rounds=3", 1200),
    "zipf": ("zipf:prefixes=16,prefix=1200,suffix=64,output=4,requests=48,s=0.9", 800),
    "mix": ("mix:prefixes=6,prefix=1200,suffix=64,output=4,requests=48,cold=1264,share=0.5", 800),
    "chat": (
        "chat:sessions=8,turns=4,system=256,first=600,user=64,output=32,concurrency=2,answers=fixed",
        700,
    ),
}
"""Workload, and blocks of 32 tokens in the pool."""

GRID: dict[str, tuple[Any, ...]] = {
    "pin_window": (0, 1024, 2048),
    "min_drop": (1, 16, 64),
    "block_size": (32, 64, 128, 256),
    "prefix_cache_retention_interval": (0, "none", 512, 1024, 2048),
}
TRIALS = 40
FIRST = 8
"""Settings that are best in simulation: they run on the engine before the others."""

Row = dict[str, Any]


def bench(name: str) -> Setup:
    spec, blocks = WORKLOADS[name]
    work = build(spec, seed=0)
    flags = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
    return Setup(
        model=MODEL,
        load=Load(spec=work.spec, seed=0, hash=work.hash),
        engine_args=[*flags, "--max-num-batched-tokens", "2048", "--max-model-len", "8192"],
        pool=Pool(block_tokens=BLOCK),
        core="kvtune",
    )


def grid() -> Iterator[Settings]:
    for values in itertools.product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


class Kept:
    """Results by command, workload, core and setting, in a file that several processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self, what: str, name: str) -> dict[str, Row]:
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        mine = (what, name, list(WORKLOADS[name]))
        rows_of_load = [
            row for row in map(json.loads, lines) if (row["what"], row["workload"], row["spec"]) == mine
        ]
        return {row["key"]: row for row in rows_of_load}

    def add(self, what: str, name: str, key: str, **told: Any) -> None:
        row = {"what": what, "workload": name, "spec": WORKLOADS[name], "key": key, **told}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def key_of(settings: Settings, core: str = "kvtune") -> str:
    return json.dumps([core, settings], sort_keys=True)


def simulate(kept: Kept, name: str, asked: list[tuple[str, Settings]], what: str = "simulate") -> None:
    """Hits of settings in the simulator; the core of each is named."""
    from kvtune.tune.trials.run import SimPool

    known = kept.rows(what, name)
    todo = [(core, s) for core, s in asked if key_of(s, core) not in known]
    if not todo:
        return
    tuned_bench = bench(name)
    if what == "elsewhere":
        pool_of = Pool(block_tokens=DEFAULT_BLOCK)
        tuned_bench = msgspec.structs.replace(tuned_bench, engine_args=any_block(tuned_bench), pool=pool_of)
    with SimPool(tuned_bench) as pool:
        waiting = list(enumerate(todo))
        while waiting or pool.running:
            while waiting and pool.free:
                n, (core, settings) = waiting.pop(0)
                pool.submit(n, settings, stock=core == "stock")
            n, answer = pool.next_done()
            core, settings = todo[n]
            hits = answer.summary.get("prefix_cache", {}).get("hit_tokens")
            told = {"settings": settings, "core": core, "hits": hits, "failed": answer.failed}
            kept.add(what, name, key_of(settings, core), **told, wall_s=round(answer.elapsed_s, 3))


def on_engine(kept: Kept, name: str, budget_s: float, part: int, parts: int, share: int) -> None:
    """The grid on the real engine, in forks of this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    tuned_bench = bench(name)
    simulated = kept.rows("simulate", name)
    order = [s for s in grid() if simulated.get(key_of(s), {}).get("hits") is not None]
    order.sort(key=lambda s: -simulated[key_of(s)]["hits"])
    rest = order[FIRST:]
    random.Random(0).shuffle(rest)
    order = [*order[:FIRST], *rest][:share]
    asked = [("stock", Settings()), *(("kvtune", s) for s in order)]
    import tests.tools.bench.real_engine  # noqa: F401 - once, before the forks
    from tests.tools.bench.decode_engine import in_a_fork

    begun = time.monotonic()
    for number, (core, settings) in enumerate(asked):
        if number % parts != part or key_of(settings, core) in kept.rows("grid", name):
            continue
        if time.monotonic() - begun > budget_s:
            return
        start = time.monotonic()
        hits, prompt = in_a_fork(lambda core=core, settings=settings: real_hits(tuned_bench, core, settings))
        told = {"settings": settings, "core": core, "hits": hits, "prompt": prompt}
        kept.add("grid", name, key_of(settings, core), **told, wall_s=round(time.monotonic() - start, 2))


def real_hits(own: Setup, core: Any, settings: Settings) -> tuple[int, int]:
    """Hit and prompt tokens of one run on the real engine."""
    from kvtune.core import state
    from kvtune.engine.setup import Setup, Simulated
    from kvtune.sim.build import choose_core
    from kvtune.sim.clock import VirtualClock, policies_see
    from tests.tools.bench.real_engine import RealPlayer, on_clock, real_engine

    chosen = Setup(
        model=MODEL,
        core=core,
        core_settings=core_part(settings) if core == "kvtune" else {},
        device=Simulated(shortcuts=False),
    )
    choose_core(chosen)
    clock = VirtualClock()
    with policies_see(clock):
        engine = real_engine(MODEL, own.with_knobs(settings).engine_args)
        assert state.active() == (core == "kvtune"), state.state()["why"]
        on_clock(clock)
        engine.model_executor.requests = engine.scheduler.requests
        work = build(own.load.spec, seed=0)
        player = RealPlayer(work, chosen.simulated, engine, clock)
        why = player.play()
        assert not why, why
    return int(player.journal.hits.sum()), work.prompt_tokens


def any_block(own: Setup) -> list[str]:
    """The same pool in tokens with vLLM's own block size: a size that is given is not searched."""
    at, blocks = own.engine_args.index("--block-size"), own.engine_args.index("--num-gpu-blocks-override")
    flags = list(own.engine_args)
    flags[blocks + 1] = str(int(flags[blocks + 1]) * BLOCK // DEFAULT_BLOCK)
    return flags[:at] + flags[at + 2 :]


def tune(kept: Kept, name: str, folder: Path, what: str) -> None:
    """`kvtune tune` as a person calls it, with its time; `search` and `guarded`: in simulation only."""
    if kept.rows(what, name):
        return
    tuned_bench = bench(name)
    out = folder / f"bench-{what}-{name}"
    command = [sys.executable, "-c", "from kvtune.cli.app import main; main()", "tune", MODEL]
    command += ["-w", WORKLOADS[name][0], "--trials", str(TRIALS), "--rounds", "2", "--finalists", "1"]
    command += ["--on", "both" if what == "tune" else "sim"]
    if what == "guarded":
        for other in WORKLOADS:
            command += ["--guard", WORKLOADS[other][0]] if other != name else []
    command += ["-o", str(out), "--study", str(out / "study.jsonl"), "--json", "--", *any_block(tuned_bench)]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"kvtune tune failed for {name}: its two lines stand above")
    told = json.loads(done.stdout)
    runs = [t for t in told["trials"] if t["on"] == "engine"]
    best = told["best"]
    kept.add(
        what,
        name,
        "",
        settings=best["settings"] if told["verdict"]["winner"] else None,
        hits=best["prefix_cache"]["hit_tokens"],
        stock=told["baseline"]["prefix_cache"]["hit_tokens"],
        prompt=best["prefix_cache"]["query_tokens"],
        verdict=told["verdict"]["text"],
        simulated=sum(t["on"] == "sim" for t in told["trials"]),
        engine_runs=len(runs),
        engine_trial_s=round(sum(t["elapsed_s"] for t in runs) / len(runs), 1) if runs else None,
        wall_s=round(wall_s, 1),
    )


def tuned(kept: Kept, name: str) -> Row | None:
    """What tuning came to: confirmed on the engine, or in simulation where that is all there is."""
    rows = [*kept.rows("tune", name).values(), *kept.rows("search", name).values()]
    return rows[0] if rows else None


def elsewhere(kept: Kept) -> None:
    """Every tuned setting, and stock's defaults, on every workload, in the simulator."""
    result = [row for name in WORKLOADS if (row := tuned(kept, name)) is not None]
    result += [row for name in WORKLOADS for row in kept.rows("guarded", name).values()]
    for name in WORKLOADS:
        asked = [("stock", Settings()), ("kvtune", Settings())]
        asked += [("kvtune", row["settings"]) for row in result if row["settings"]]  # {}: the core's own
        simulate(kept, name, asked, "elsewhere")


def shown(kept: Kept) -> None:
    size = len(list(grid()))
    print(f"grid: {size} settings of {', '.join(GRID)}\n")
    for name in WORKLOADS:
        prompt = build(WORKLOADS[name][0], seed=0).prompt_tokens
        simulated, real = kept.rows("simulate", name), kept.rows("grid", name)
        settings = tuned(kept, name)
        both = [(simulated[k]["hits"], row["hits"]) for k, row in real.items() if k in simulated]
        wrong = [pair for pair in both if pair[0] != pair[1]]
        print(f"{name}: {WORKLOADS[name][0]}, {WORKLOADS[name][1]} blocks of {BLOCK}")
        if any(r["core"] == "kvtune" for r in real.values()):
            best = max((r for r in real.values() if r["core"] == "kvtune"), key=lambda r: r["hits"])
            took = sum(r["wall_s"] for r in real.values())
            print(
                f"  engine: {len(real)} runs in {took:.0f} s, best {rate(best['hits'], prompt)} {best['settings']}"
            )
            print(f"  simulated otherwise than on the engine: {len(wrong)} of {len(both)} {wrong[:3]}")
        if simulated:
            rows = [r for r in simulated.values() if r["hits"] is not None and r["core"] == "kvtune"]
            stock = simulated[key_of({}, "stock")]["hits"]
            best = max(rows, key=lambda r: r["hits"])
            took = sum(r["wall_s"] for r in simulated.values()) / len(simulated)
            print(
                f"  simulated: {len(rows)} settings, {took:.2f} s each, {len(simulated) - 1 - len(rows)} refused, best "
                f"{rate(best['hits'], prompt)}, worst {rate(min(r['hits'] for r in rows), prompt)}; stock with blocks "
                f"of {BLOCK} {rate(stock, prompt)}"
            )
            if settings is not None:
                gap = 100 * (best["hits"] - settings["hits"]) / prompt
                print(
                    f"  tune: {rate(settings['hits'], prompt)} (stock {rate(settings['stock'], prompt)}), "
                    f"{gap:+.2f} points to the grid's best; {settings['settings']}; {settings['verdict']}"
                )
                if settings["engine_trial_s"] is not None:
                    whole = size * settings["engine_trial_s"]
                    ratio = f"1/{whole / settings['wall_s']:.1f}"
                    print(
                        f"        {settings['wall_s']:.0f} s, {ratio} of {size} engine trials of "
                        f"{settings['engine_trial_s']} s = {whole:.0f} s"
                    )
        for row in kept.rows("guarded", name).values():
            print(
                f"  with the others as guards, in this pool: {rate(row['hits'], prompt)} (stock "
                f"{rate(row['stock'], prompt)}); {row['settings']}; {row['verdict']}"
            )
        moved = kept.rows("elsewhere", name)
        if moved:
            stock = moved[key_of({}, "stock")]["hits"]
            print(
                f"  elsewhere: stock's defaults {rate(stock, prompt)}, the core's {told(moved, {}, prompt)}"
            )
            for other in WORKLOADS:
                row = tuned(kept, other)
                if row is not None and row["settings"] is not None:
                    print(f"    tuned on {other}: {told(moved, row['settings'], prompt)}")
                for row in kept.rows("guarded", other).values():
                    if row["settings"] is not None:
                        print(
                            f"    tuned on {other}, the others as guards: {told(moved, row['settings'], prompt)}"
                        )


def told(rows: dict[str, Row], settings: Settings, prompt: int) -> str:
    row = rows.get(key_of(settings))
    return rate(row["hits"], prompt) if row else "not run"


def rate(hits: int, prompt: int) -> str:
    return f"{100 * hits / prompt:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="show",
        choices=("simulate", "grid", "tune", "search", "guarded", "elsewhere", "show"),
    )
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--budget", type=float, default=1e6, help="minutes: no new engine run after them")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth setting, for N processes at once")
    parser.add_argument("--most", type=int, default=100_000, help="engine runs of a workload at most")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "reports")
    options = parser.parse_args()
    kept = Kept(options.output / "bench-tune.jsonl")
    part, parts = map(int, options.part.split("/"))
    for name in options.only.split(","):
        if options.what == "simulate":
            simulate(kept, name, [("stock", {}), *(("kvtune", s) for s in grid())])
        elif options.what == "grid":
            budget_s = 60 * options.budget / len(options.only.split(","))
            on_engine(kept, name, budget_s, part - 1, parts, options.most)
        elif options.what in ("tune", "search", "guarded"):
            tune(kept, name, options.output, options.what)
    if options.what == "elsewhere":
        elsewhere(kept)
    shown(kept)


if __name__ == "__main__":
    main()
