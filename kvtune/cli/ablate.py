"""`kvtune profile --ablate`: what each switch of the core and each setting of the collector is worth."""

from __future__ import annotations

import json
import sys

from kvtune.engine.ablate import BASELINE, Variant, ablate, variants
from kvtune.engine.profile import Job, Profiled
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError

FEWEST = 2
"""Runs of each variant below which nothing can be said about chance."""


def run_ablation(job: Job, only: str, repeats: int, *, as_json: bool) -> int:
    """Run every variant, print the table. Raises KvtuneError when the baseline never ran."""
    from kvtune.analysis.ablation import ablation
    from kvtune.cli.progress import ProgressView
    from kvtune.report.ablation_text import plain, print_ablation

    chosen = variants(job, tuple(name for name in only.split(",") if name))
    repeats = max(repeats, FEWEST)
    failed: list[str] = []
    interrupted = False

    def start(name: str, number: int, total: int) -> ProgressView:
        print(f"{number}/{total} {name}", file=sys.stderr, flush=True)
        return ProgressView(len(job.workload.requests), name, quiet=True)

    def end(variant: Variant, done: Profiled) -> None:
        nonlocal interrupted
        if done.error is not None:
            interrupted |= done.error.exit_code == EXIT_INTERRUPTED
            failed.append(f"{variant.name}: {done.error.message}")

    runs = ablate(job, chosen, repeats, start, end)
    if not runs[BASELINE]:
        why = failed[0] if failed else "no run"
        raise KvtuneError(f"the baseline of --ablate did not run: {why}", "run it alone, without --ablate")
    found = ablation(
        [done.run for done in runs[BASELINE]],
        {name: [done.run for done in of] for name, of in runs.items() if name != BASELINE},
    )
    if as_json:
        files = {name: [str(done.path) for done in of] for name, of in runs.items()}
        print(
            json.dumps({"ablation": plain(found), "repeats": repeats, "run_files": files, "failed": failed})
        )
    else:
        print_ablation(found, {v.name: v.turned for v in chosen}, repeats)
        for line in failed:
            print(f"failed  {line}")
    return EXIT_INTERRUPTED if interrupted else 0
