"""A soak's failure: what is kept of it, the fewest requests that show it, and seeing it again."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, monotonic_ns

from kvtune.engine.launch import HostOutcome
from kvtune.engine.messages import HostPlan
from kvtune.engine.record import record
from kvtune.errors import KvtuneError
from kvtune.run.file import write_run
from kvtune.run.types import CoreInfo
from kvtune.workload.spec import build
from tests.engine.serving import tokenizer_in
from tests.soak.judge import Finding
from tests.soak.run import Failed, play_of, replay
from tests.soak.servers import Kind
from tests.soak.shrink import shrink
from tests.soak.trouble import Ask, Round

REPLAYS = 24
Say = Callable[[str], None]


def keep(failed: Failed, seed: int, folder: Path, output: Path, minutes: float, say: Say) -> None:
    """Write the failure into `output`, then shrink its round for so many minutes."""
    shutil.rmtree(output, ignore_errors=True)  # an earlier failure of this model and seed
    output.mkdir(parents=True)
    for each in failed.servers:
        shutil.copy(each.log, output / f"{each.core}.log")
    (output / "trace.jsonl").write_bytes(failed.trace)
    _write(failed, seed, failed.trouble, output)
    if failed.trace:
        _write_run(failed, output)
    say(f"kept in {output}: {', '.join(sorted(each.name for each in output.iterdir()))}")
    if not failed.trouble.asks or not minutes:
        return
    end = monotonic() + 60.0 * minutes

    def fails(asks: Sequence[Ask]) -> bool:
        if monotonic() > end:
            return False
        found = _replayed(failed.kind, seed, play_of(asks, failed.trouble))
        say(f"{len(asks)} requests: {'fails still' if found else 'holds'}")
        return bool(found)

    if not fails(failed.trouble.asks):
        say("the round alone holds: it needs what was before it (the same command and seed)")
        return
    few = shrink(failed.trouble.asks, fails, REPLAYS)
    _write(failed, seed, play_of(few, failed.trouble), output)
    say(
        f"shrunk to {len(few)} of {len(failed.trouble.asks)} requests; see it again: --again {output}/failure.json"
    )


def again(path: Path) -> int:
    """Replay a failure.json; 1 if it fails still."""
    data = json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        kind = Kind(
            data["model"], tokenizer_in(Path(folder) / "tokenizer"), data["speculate"], None, data["plant"]
        )
        found = _replayed(kind, data["seed"], Round.from_json(data["round"]))
    for each in found:
        print(f"{each.kind}: {each.text}")
    print("fails still" if found else "holds")
    return int(bool(found))


def _replayed(kind: Kind, seed: int, round_: Round) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        fresh = Kind(kind.model, kind.tokenizer, kind.speculate, Path(folder) / "trace.jsonl", kind.plant)
        return asyncio.run(replay(fresh, seed, [round_], Path(folder)))


def _write(failed: Failed, seed: int, round_: Round, output: Path) -> None:
    data = {
        "model": failed.kind.model,
        "seed": seed,
        "speculate": failed.kind.speculate,
        "plant": failed.kind.plant,
        "findings": [{"kind": each.kind, "text": each.text, "asks": each.asks} for each in failed.findings],
        "round": round_.to_json(),
    }
    (output / "failure.json").write_text(json.dumps(data, indent=1))


def _write_run(failed: Failed, output: Path) -> None:
    """A partial run of the core's server: steps, collections, pool and memory; its load is what was recorded."""
    server = failed.servers[0]
    workload = build(f"trace:path={output / 'trace.jsonl'},sort=1", seed=0)
    outcome = HostOutcome(
        "", server.since_ns, start_ns=server.since_ns, end_ns=monotonic_ns(), sampler=server.sampler
    )
    outcome.error = KvtuneError("the soak failed: " + failed.findings[0].text.splitlines()[0])
    plan = HostPlan(model=failed.kind.model, vllm_args=[], workload=workload.spec, seed=0)
    run = record(
        server.folder,
        plan,
        workload,
        outcome,
        command=("python", "-m", "tests.soak"),
        core=CoreInfo(name="kvtune"),
        probe_level="light",
        engine_args=(),
    )
    write_run(run, output / "failure.kvrun")
