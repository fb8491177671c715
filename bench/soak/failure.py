"""A soak's failure: what is kept of it, and seeing it again."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns

from bench.soak.judge import Finding
from bench.soak.run import Failed, replay
from bench.soak.servers import Kind
from bench.soak.trouble import Round
from kvtune.base.errors import KvtuneError
from kvtune.data.run.file import write_run
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.messages import HostPlan
from kvtune.lab.engine.record import record
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from tests.lab.engine.serving import tokenizer_in

Say = Callable[[str], None]


def keep(failed: Failed, seed: int, output: Path, say: Say) -> None:
    """Write the failure and its last rounds into `output`."""
    shutil.rmtree(output, ignore_errors=True)  # an earlier failure of this model and seed
    output.mkdir(parents=True)
    for each in failed.servers:
        shutil.copy(each.log, output / f"{each.core}.log")
    (output / "trace.jsonl").write_bytes(failed.trace)
    _write(failed, seed, failed.rounds, output)
    if failed.trace:
        _write_run(failed, output)
    say(f"kept in {output}: {', '.join(sorted(each.name for each in output.iterdir()))}")
    if failed.rounds:
        say(f"see it again: --again {output}/failure.json")


def again(path: Path) -> int:
    """Replay a failure.json; 1 if it fails still."""
    data = json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tokenizer = tokenizer_in(Path(folder) / "tokenizer")
        kind = Kind(data["model"], tokenizer, data["speculate"], None, data["plant"])
        found = _replayed(kind, data["seed"], [Round.from_json(each) for each in data["rounds"]])
    for each in found:
        print(f"{each.kind}: {each.text}")
    print("fails still" if found else "holds")
    return int(bool(found))


def _replayed(kind: Kind, seed: int, rounds: Sequence[Round]) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        fresh = Kind(kind.model, kind.tokenizer, kind.speculate, Path(folder) / "trace.jsonl", kind.plant)
        return asyncio.run(replay(fresh, seed, rounds, Path(folder)))


def _write(failed: Failed, seed: int, rounds: Sequence[Round], output: Path) -> None:
    data = {
        "model": failed.kind.model,
        "seed": seed,
        "speculate": failed.kind.speculate,
        "plant": failed.kind.plant,
        "findings": [{"kind": each.kind, "text": each.text, "asks": each.asks} for each in failed.findings],
        "rounds": [each.to_json() for each in rounds],
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
    plan = HostPlan(setup=Setup(model=failed.kind.model, core="kvtune"), vllm_args=[])
    run = record(
        server.folder,
        plan,
        workload,
        outcome,
        command=("python", "-m", "bench.soak"),
        probe_level="light",
        decided={},
    )
    write_run(run, output / "failure.kvrun")
