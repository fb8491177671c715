"""The host process: launch.py starts it as `python -m kvtune.lab.engine.host FOLDER EVENTS_FD`.

It starts vLLM's front end (front_end.py), warms it up, runs the workload, and sends events over a pipe. Its standard
output and error are the engine's log. SIGTERM and SIGINT end the measuring phase early; its results are kept.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic_ns

import msgspec

from kvtune.base.dialogue import tell
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.lab.engine.driver import Driver, RequestLog, unless_dead
from kvtune.lab.engine.front_end import FrontEnd
from kvtune.lab.engine.messages import PLAN_FILE, REQUESTS_FILE, Event, HostPlan
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.probe.phase import CULPRITS, MEASURING, OVER, Phase
from kvtune.plugin.probe.status import FRONT_END
from kvtune.requests.types import Request, Span, Workload

WARM_UP_STREAM = (1 << 61) + 1
PROGRESS_S = 0.25
COUNTS_WRITTEN_S = 0.3
"""Seconds that the probes in the engine's processes have to write their counts after the run."""


class Reporter:
    """The writing end of the event pipe. If the launcher has ended, the run is lost and the host stops itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: Event) -> None:
        try:
            tell(self._descriptor, event)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)


def check_fits(workload: Workload, max_model_len: int) -> None:
    """Raise UsageError if a request is longer than `max_model_len`. Called before the engine starts."""
    over = [r for r in workload.requests if r.prompt_tokens + r.output_tokens > max_model_len]
    if over:
        worst = max(over, key=lambda r: r.prompt_tokens + r.output_tokens)
        raise UsageError(
            f"{len(over)} of {len(workload.requests)} requests exceed max-model-len {max_model_len}; the longest, "
            f"{worst.id}, has {worst.prompt_tokens} prompt + {worst.output_tokens} output tokens",
            "shorten the workload, or raise `-- --max-model-len` where the model allows it",
        )


def warm_up_workload(workload: Workload, max_model_len: int) -> Workload:
    """Return up to three requests with the workload's shortest, median and longest prompt, of tokens it never uses."""
    picked = sorted(workload.requests, key=lambda r: r.prompt_tokens)
    shapes = {r.prompt_tokens for r in (picked[0], picked[len(picked) // 2], picked[-1])} if picked else set()
    requests = tuple(
        Request(f"warm-up-{i}", (Span(WARM_UP_STREAM + i, 0, min(n, max_model_len - 8)),), 4)
        for i, n in enumerate(sorted(shapes))
    )
    return Workload("warm-up", "warm-up", {}, workload.seed, requests, "", concurrency=max(1, len(requests)))


async def serve(plan: HostPlan, folder: Path, reporter: Reporter) -> None:
    workload = plan.setup.load.built()
    front = FrontEnd(plan, folder, lambda most: check_fits(workload, most))
    try:
        reporter.send(Event(kind="engine", facts=front.facts))
        if plan.warm_up:
            reporter.send(Event(kind="phase", name="warm-up"))
            shapes = warm_up_workload(workload, int(str(front.facts["max_model_len"])))
            warm = front.driver(shapes, RequestLog(folder / "warm-up.bin"))
            await unless_dead(front.engine, warm.run(lambda start_ns: None))
            if warm.failure is not None:
                raise warm.failure
            await unless_dead(front.engine, front.forget())
        driver = front.driver(workload, RequestLog(folder / REQUESTS_FILE))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, driver.stop)
        await front.begin()
        watch = asyncio.create_task(_watch(driver, front, reporter))
        phase = Phase(folder)

        def measuring(start: int) -> None:
            phase.enter(MEASURING)
            reporter.send(Event(kind="phase", name="measuring", at_ns=start))

        await unless_dead(front.engine, driver.run(measuring))
        end = monotonic_ns()
        watch.cancel()
        await front.end()
        _progress(driver, reporter)
        if driver.failure is not None:
            raise driver.failure
        reporter.send(Event(kind="phase", name="finishing", at_ns=end))
        level = os.environ.get("KVTUNE_PROBE", "off")
        if level == "sites" and not driver.stopped:
            phase.enter(CULPRITS)
            await unless_dead(front.engine, front.forget())
            second = front.driver(workload, RequestLog(folder / "culprits.bin"))
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, second.stop)
            culprits = second.run(
                lambda at_ns: reporter.send(Event(kind="phase", name="culprits", at_ns=at_ns))
            )
            await unless_dead(front.engine, culprits)
            why = f"the second pass (allocation sites) failed: {second.failure}" if second.failure else ""
            reporter.send(Event(kind="phase", name="over", at_ns=monotonic_ns(), message=why))
        phase.enter(OVER)
        if level != "off":
            await asyncio.sleep(COUNTS_WRITTEN_S)
    except Exception:
        reporter.send(Event(kind="died", codes=front.died()))
        raise
    finally:
        await front.close()
    reporter.send(Event(kind="done"))


async def _watch(driver: Driver, front: FrontEnd, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        front.keep()
        _progress(driver, reporter)


def _progress(driver: Driver, reporter: Reporter) -> None:
    reporter.send(
        Event(
            kind="progress",
            sent=driver.sent,
            finished=driver.finished,
            output_tokens=driver.output_tokens,
            hit_tokens=driver.hit_tokens,
            query_tokens=driver.query_tokens,
        )
    )


def main() -> None:
    folder = Path(sys.argv[1])
    reporter = Reporter(int(sys.argv[2]))
    os.environ[FRONT_END] = str(os.getpid())
    # Until the driver handles these signals, they raise SystemExit, so that the engine is shut down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    die_with_parent(signal.SIGTERM)
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=HostPlan)
    try:
        reporter.send(Event(kind="phase", name="starting"))
        asyncio.run(serve(plan, folder, reporter))
    except KvtuneError as error:
        reporter.send(Event(kind="failed", message=error.message, hint=error.hint, exit_code=error.exit_code))
        sys.exit(error.exit_code)
    except Exception as error:
        import traceback

        traceback.print_exc()
        reporter.send(Event(kind="failed", name=type(error).__name__, message=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
