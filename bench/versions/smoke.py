"""What of kvtune works with the vLLM of this environment: `python bench/versions/smoke.py [RESULTS.json]`.

Two engine starts of tiny-opt (stock and core), their pages, a comparison, an export, the load in the simulator. The
answer is added to the results, from which `make docs` writes the table of docs/vllm.md. Exit code 1 where something
fails that this version should do: everything on a known version; all but the parts that do not load on another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvtune.data.knobs import CoreSettings
from kvtune.data.run.file import read_run
from kvtune.plugin.core.plugin import switches_of
from kvtune.plugin.vllm.parts import standing
from kvtune.plugin.vllm.symbols import PARTS

LOAD = "rounds:prefixes=3,prefix=400,suffix=16,output=8,rounds=2"
RESULTS = Path(__file__).parents[2] / "reports" / "tables" / "versions.json"


def kvtune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def profile(folder: Path, name: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The facts of a run, or nothing and the reason."""
    done = kvtune(
        folder,
        "profile",
        "tiny-opt",
        "-w",
        LOAD,
        "-o",
        str(folder / name),
        "--tries",
        "0",
        "--json",
        *arguments,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("kvtune: ")]
        return {}, (lines or done.stderr.splitlines() or ["no message"])[-1].removeprefix("kvtune: ")
    return json.loads(done.stdout), ""


def said(why: str) -> str:
    return why or "ok"


def try_out(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What works, and what should and does not."""
    found = standing()
    faults: list[str] = []
    works: dict[str, Any] = {"known": found.known, "left_out": found.left_out}
    runs: dict[str, dict[str, Any]] = {}
    for core in ("stock", "kvtune"):
        facts, why = profile(folder, core, "--core", core)
        works[core] = said(why)
        if not facts:
            faults.append(f"--core {core}: {why}")
            continue
        runs[core] = facts
        run = read_run(Path(facts["run_file"]))
        steps = len(run.tables["steps"]["t_s"])
        works[f"{core}_disabled"] = sorted(set(run.header.probe.disabled.values()))
        faults += [f"--core {core}: {text}" for text in works[f"{core}_disabled"]]
        faults += [] if steps else [f"--core {core}: no step was recorded"]
        faults += [] if any((folder / core).glob("*.html")) else [f"--core {core}: no page"]
        if core == "kvtune":
            asked, off = CoreSettings().switches(), set(switches_of(found.left_out))
            in_force = {name for name, on in run.header.core.parts.items() if on}
            works["in_force"] = sorted(in_force)
            # tiny-opt has no windows, and stock's queue is its policy: what the model allows of the rest.
            wanted = set(asked) - off - {"pinning"}
            faults += [f"{name} did not load" for name in sorted(wanted - in_force)]
            faults += [f"{name} loaded" for name in sorted(in_force & off)]
    if len(runs) == 2:
        files = [runs[core]["run_file"] for core in ("stock", "kvtune")]
        compared = kvtune(folder, "compare", *files, "--json")
        exported = kvtune(folder, "export", files[1], "--csv")
        works["compare"], works["export"] = (
            "ok" if not d.returncode else "fails" for d in (compared, exported)
        )
        faults += [f"{name}: {works[name]}" for name in ("compare", "export") if works[name] != "ok"]
        same = runs["stock"]["prefix_cache"]["hit_tokens"] == runs["kvtune"]["prefix_cache"]["hit_tokens"]
        faults += [] if same else ["stock and core hit different tokens"]
        works["hit_tokens"] = runs["stock"]["prefix_cache"]["hit_tokens"]
    facts, why = profile(folder, "sim", "--on", "sim", "--core", "stock")
    works["simulator"] = said(why)
    if facts and facts["prefix_cache"]["hit_tokens"] != works.get("hit_tokens"):
        faults.append(
            f"simulated hits: {facts['prefix_cache']['hit_tokens']}, measured: {works.get('hit_tokens')}"
        )
    if bool(why) != ("simulator" in found.left_out):
        faults.append(f"simulator: {why or 'runs, though it should not load'}")
    return works, faults


def main() -> int:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    version = standing().version
    with tempfile.TemporaryDirectory(prefix="versions-of-vllm-") as folder:
        works, faults = try_out(Path(folder))
    known = json.loads(results.read_text()) if results.exists() else {}
    known[version] = works
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    loads = [name for name in PARTS if name not in works["left_out"]]
    print(f"vLLM {version}: {len(loads)} of {len(PARTS)} parts load: {', '.join(loads) or 'none'}")
    for name, why in works["left_out"].items():
        print(f"  left out: {name}: {why}")
    for fault in faults:
        print(f"  FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
