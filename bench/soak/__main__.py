"""Hours of trouble for a server with the core, beside stock's: `make soak`.

    python -m bench.soak --minutes 60 [--seed 0] [--model tiny-llama ..] [-o FOLDER]
    python -m bench.soak --again FOLDER/failure.json     # the rounds of a failure, on fresh servers

Exit 1 at the first thing that does not hold; FOLDER then has failure.json, the servers' logs and a run file.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from time import strftime

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.soak import failure
from bench.soak.models import MODELS
from bench.soak.run import Failed, Report, soak


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--plant", default="", help="a defect to plant (plants.py)")
    parser.add_argument("--again", type=Path, help="a failure.json")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/soak"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the servers end with us
    if options.again:
        return failure.again(options.again)
    for model in options.model or MODELS:
        output = options.output / f"{model}-{options.seed}"
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            try:
                report = asyncio.run(
                    soak(model, options.seed, options.minutes, Path(folder), _say(model), options.plant)
                )
            except Failed as failed:
                print(f"{model}: {failed}", flush=True)
                if failed.report is not None:
                    print(table(failed.report), flush=True)
                failure.keep(failed, options.seed, output, _say(model))
                return 1
        print(table(report), flush=True)
    return 0


def _say(model: str) -> failure.Say:
    return lambda line: print(f"{strftime('%H:%M:%S')} {model} {line}", flush=True)


def table(report: Report) -> str:
    """A row a figure."""
    rows = [f"{name} | {count:,}" for name, count in sorted(report.counts.items())]
    rows += [
        f"{name}, bytes a request | {each.value:,.0f} ({each.low:,.0f} to {each.high:,.0f})"
        for name, each in report.slopes.items()
        if each is not None
    ]
    rows += [
        f"{name}, p99 between tokens at the end / at the start | {each[0]:.2f} ({each[1]:.2f} to {each[2]:.2f})"
        for name, each in report.p99.items()
        if each is not None
    ]
    head = [f"| {report.model}, seed {report.seed} | |", "|---|---|"]
    return "\n".join([*head, *(f"| {row} |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
