"""What instruments cost EngineCore's main loop, in CPU time of its thread, side by side and paired. No engine starts.

    python bench/overhead.py [--batches 1,128,1024] [--cores stock,kvtune] [--only light,types] [--fills N]

Each cell is a separate process: vLLM's EngineCore decodes a batch (decode_engine.py), and stretches of steps without
and with the instrument alternate (A B B A, B A A B). Such a quad gives one ratio; the interval is of their mean
(Student, 95 %, of logarithms). Stretches are short where an instrument may be switched often: what else runs on the
machine hits both sides. kvtune's levels run as in an engine: its own plugin, all of it, at default sampling.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import process_time_ns, sleep, thread_time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.decode_engine import Decoding, in_a_fork, machine
from bench.ratio import ratio

Step = Callable[[Any], bool]

SHORT, LONG = {1: 32, 128: 16}, {1: 256, 128: 256}
"""Steps of a stretch by batch; 8 and 64 for others. Four long ones hold as many block boundaries on both sides."""
STEPS_A_FILL = 1024
"""Decode steps before the requests are made anew; half as many for large batches."""


class Instrument:
    """On and off as often as wanted, in the process that runs the engine."""

    asked = ""
    short = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attach(self, decoding: Decoding) -> Step:
        """The step as it is with the instrument; it is off after this."""
        from vllm.v1.engine.core import EngineCoreProc

        return EngineCoreProc._process_engine_step  # type: ignore[no-any-return]

    def on(self) -> None: ...

    def off(self) -> None: ...


class Level(Instrument):
    """kvtune's own plugin at a level, as vLLM loads it in EngineCore."""

    level = "light"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        multiprocessing.current_process().name = "EngineCore"
        os.environ.update(KVTUNE_PROBE=self.level, KVTUNE_RUN_DIR=str(folder))
        from kvtune.plugin.probe import plugin

        plugin.register()
        instruments = plugin.current()
        assert instruments is not None and instruments.collector is not None, "the probe did not start"
        assert instruments.phase is not None and not instruments.disabled(), instruments.disabled()
        self.instruments, self.collector, self.phase = instruments, instruments.collector, instruments.phase
        self._off_process = self._off_thread = 0
        self._since = (process_time_ns(), thread_time_ns())

    def attach(self, decoding: Decoding) -> Step:
        from kvtune.plugin.probe.phase import CULPRITS, MEASURING

        self.scheduler = decoding.scheduler
        names = ("schedule", "update_from_output")
        self.queue = getattr(self.scheduler.kv_cache_manager.block_pool.free_block_queue, "__dict__", {})
        self.watch = self.queue.get("popleft_n")  # how evictions of stock's queue are counted
        self.wraps = {name: vars(self.scheduler)[name] for name in names}
        self.phase.enter(CULPRITS if self.level == "sites" else MEASURING)
        self._count_only_when_on()
        sleep(0.2)  # the phase's watcher has seen it
        self.off()
        return super().attach(decoding)

    def _count_only_when_on(self) -> None:
        """Budgets are shares of the CPU time that passes: what passes while it is off must not count."""
        from kvtune.plugin.probe.objects import sites, step_sites

        sites.process_time_ns = lambda: process_time_ns() - self._off_process  # type: ignore[attr-defined]
        step_sites.thread_time_ns = lambda: thread_time_ns() - self._off_thread  # type: ignore[attr-defined]

    def on(self) -> None:
        self._off_process += process_time_ns() - self._since[0]
        self._off_thread += thread_time_ns() - self._since[1]
        vars(self.scheduler).update(self.wraps)
        if self.watch is not None:
            self.queue["popleft_n"] = self.watch
        self.collector.install()

    def off(self) -> None:
        self.collector.remove()
        for listener in self.collector.listeners:
            if tracemalloc.is_tracing() and hasattr(listener, "_stop"):
                listener._stop()
        for name in self.wraps:
            vars(self.scheduler).pop(name, None)
        self.queue.pop("popleft_n", None)
        failed = self.instruments.disabled()
        assert not failed, failed
        self._since = (process_time_ns(), thread_time_ns())


class Light(Level):
    asked = "1.01"


class Types(Level):
    level, asked = "types", "1.05"


class Sites(Level):
    short = False
    level, asked = "sites", "1.25"


INSTRUMENTS: dict[str, tuple[str, type[Instrument]]] = {
    "light": ("kvtune light", Light),
    "types": ("kvtune types", Types),
    "sites": ("kvtune sites (second pass)", Sites),
}


def measure(batch: int, core: str, kind: type[Instrument], fills: int) -> list[tuple[float, float]]:
    """CPU microseconds of a step without and with the instrument, by quad. The first fill warms up."""
    with tempfile.TemporaryDirectory() as folder:
        from vllm.v1.engine.core import EngineCoreProc

        bare: Step = EngineCoreProc._process_engine_step  # before a plugin wraps it
        instrument = kind(Path(folder))
        decoding = Decoding(batch, core)
        step = instrument.attach(decoding)
        steps = SHORT.get(batch, 8) if kind.short else LONG.get(batch, 64)
        quads = (STEPS_A_FILL if batch <= 128 else STEPS_A_FILL // 2) // (4 * steps)
        collected = []
        for number in range(max(1, quads) * (fills + 1)):
            if number % max(1, quads) == 0:
                decoding.fresh(bare)
            sums = [0, 0]
            order = (0, 1, 1, 0) if number % 2 else (1, 0, 0, 1)
            for at, side in enumerate(order):
                if side and (at == 0 or not order[at - 1]):
                    instrument.on()
                sums[side] += decoding.stretch(step if side else bare, steps)
                if side and (at == 3 or not order[at + 1]):
                    instrument.off()
            if number >= max(1, quads):
                collected.append((sums[0] / 2e3 / steps, sums[1] / 2e3 / steps))
        return collected


def row(title: str, kind: type[Instrument], found: list[tuple[float, float]]) -> str:
    without, with_it = np.array(found).T
    middle, low, high = ratio(without, with_it)
    return (
        f"| {title} | {np.median(without):,.0f} | {np.median(with_it - without):+,.1f} | {middle:.3f} "
        f"| {low:.3f} to {high:.3f} | {np.median(with_it / without):.3f} | {len(found)} | {kind.asked} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,128,1024")
    parser.add_argument("--cores", default="stock")
    parser.add_argument("--only", default=",".join(INSTRUMENTS))
    parser.add_argument("--fills", type=int, default=0, help="0: 12 of one request, 4 of 128, else 2")
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from kvtune.lab.sim.worker import prepare

    prepare("tiny-opt")
    print(f"Python {platform.python_version()}, {machine()}; load {os.getloadavg()[0]:.1f} at the start")
    for core in asked.cores.split(","):
        for batch in map(int, asked.batches.split(",")):
            print(f"\n### {batch} requests decode, {core} core\n")
            print("| instrument | step without (µs) | more (µs) | ratio | 95 % | median | quads | asked |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for name in asked.only.split(","):
                title, kind = INSTRUMENTS[name]
                fills = asked.fills or {1: 12, 128: 4}.get(batch, 2)

                def work(
                    batch: int = batch, core: str = core, kind: type[Instrument] = kind, n: int = fills
                ) -> Any:
                    return measure(batch, core, kind, n)

                print(row(title, kind, in_a_fork(work)), flush=True)
    print(f"\nLoad {os.getloadavg()[0]:.1f} at the end.")


if __name__ == "__main__":
    main()
