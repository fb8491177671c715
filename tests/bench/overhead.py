"""What instruments cost the Python side of a decode step in CPU time, side by side and paired. No engine starts.

`python tests/bench/overhead.py [--rounds N] [--batch N]` prints a Markdown table. The step does what EngineCore's
does at decode: unpickle the sampled rows, append a token to each request, make an output for each. Steps without and
with an instrument alternate in stretches; CPU time of the thread, so a busy machine does not move the ratio.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import platform
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import thread_time_ns
from types import SimpleNamespace

import numpy as np

from kvtune.probe.census import Census
from kvtune.probe.gc import CollectorProbe
from kvtune.probe.phase import CULPRITS, MEASURING, Phase
from kvtune.probe.ring import STEP, Ring
from kvtune.probe.sites import Sites
from kvtune.probe.step_sites import StepSites

STRETCH = 200  # steps


@dataclass(slots=True)
class Request:
    tokens: list[int]
    blocks: tuple[list[int], ...]


@dataclass(slots=True)
class Output:
    request: int
    new: list[int]


def _nothing() -> None: ...


class Engine:
    """The host's part of a decode step, and where an instrument of steps hooks in."""

    def __init__(self, batch: int) -> None:
        self.requests = [Request([0] * 48, ([1, 2, 3],)) for _ in range(batch)]
        self.wire = pickle.dumps([[7] for _ in range(batch)])
        self.begin: Callable[[], None] = _nothing
        self.output_is_in: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing
        self.outputs: list[Output] = []

    def step(self) -> None:
        self.begin()
        blocks = [tuple(list(b) for b in request.blocks) for request in self.requests]
        rows = pickle.loads(self.wire)
        self.output_is_in()
        made = []
        for at, (request, row) in enumerate(zip(self.requests, rows, strict=True)):
            request.tokens.append(row[0])
            made.append(Output(at, row))
        self.outputs = made
        del blocks
        self.end()

    def stretch(self) -> float:
        """CPU nanoseconds of STRETCH steps."""
        for request in self.requests:
            del request.tokens[48:]
        start = thread_time_ns()
        for _ in range(STRETCH):
            self.step()
        return thread_time_ns() - start


@contextmanager
def kvtune(engine: Engine, folder: Path, level: str) -> Iterator[None]:
    ring, phase = Ring(folder / "ring", 1 << 22), Phase(folder)
    probe = CollectorProbe(ring)

    def record() -> None:
        ring.write(STEP, 0, 0, (thread_time_ns(), *(0,) * 9))

    engine.end = record
    if level == "types":
        probe.listeners.append(Census(folder, phase))
        phase.enter(MEASURING)
    if level == "sites":
        sampler = StepSites(phase)
        probe.listeners.append(Sites(folder, phase))
        engine.begin, engine.output_is_in, engine.end = sampler.begin, sampler.output_is_in, sampler.end
        phase.enter(CULPRITS)
    probe.install()
    try:
        yield
    finally:
        probe.remove()
        if tracemalloc.is_tracing():
            tracemalloc.stop()
        engine.begin = engine.output_is_in = engine.end = _nothing


@contextmanager
def vllm_debug(engine: Engine, folder: Path, setting: str) -> Iterator[None]:
    from vllm.utils.gc_utils import GCDebugConfig, GCDebugger

    handle = GCDebugger(GCDebugConfig(setting)).handle
    gc.callbacks.append(handle)
    try:
        yield
    finally:
        gc.callbacks.remove(handle)


@contextmanager
def traced(engine: Engine, folder: Path, setting: str) -> Iterator[None]:
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


INSTRUMENTS = {
    "kvtune light": (kvtune, "light", "1.01"),
    "kvtune types": (kvtune, "types", "1.05"),
    "kvtune sites (second pass)": (kvtune, "sites", "1.25"),
    "tracemalloc throughout (full)": (traced, "", ""),
    "VLLM_GC_DEBUG=1": (vllm_debug, "1", ""),
    "VLLM_GC_DEBUG top_objects 5": (vllm_debug, '{"top_objects": 5}', ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1024)
    asked: SimpleNamespace = SimpleNamespace(**vars(parser.parse_args()))
    engine = Engine(asked.batch)
    gc.collect()
    gc.freeze()
    engine.stretch()
    print(f"Python {platform.python_version()}, {platform.machine()}, batch {asked.batch}, "
          f"{asked.rounds} pairs of {STRETCH} steps, thread CPU time\n")  # fmt: skip
    print(
        "| instrument | CPU against none (median of pairs) | lowest to highest | target |\n|---|---|---|---|"
    )
    for name, (instrument, setting, target) in INSTRUMENTS.items():
        ratios = []
        try:
            for _ in range(asked.rounds):
                before = engine.stretch()
                with tempfile.TemporaryDirectory() as folder, instrument(engine, Path(folder), setting):
                    during = engine.stretch()
                ratios.append(during / ((before + engine.stretch()) / 2))
        except ImportError as error:
            print(f"| {name} | not installed: {error.name} | | |", flush=True)
            continue
        median = float(np.median(ratios))
        print(f"| {name} | {median:.3f} | {min(ratios):.3f} to {max(ratios):.3f} | {target} |", flush=True)


if __name__ == "__main__":
    main()
