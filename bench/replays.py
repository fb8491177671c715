"""Cost of stock replays: `python bench/replays.py --traces FOLDER [--only NAME] [--profile]`.

Agents with a large pool and several KV groups, decodes of 2,000 tokens (also with windows), chats of short prompts. One
line per load: user CPU seconds of this process, which other processes on the machine lengthen little, and a checksum
over all tables, the same before and after a change that decides nothing. To compare two checkouts, run it in each by
turns.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import zlib
from pathlib import Path

import numpy as np

from kvtune.data.platforms import DEVICES
from kvtune.data.run.file import write_run
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.worker import IN_TRANSIT, prepare
from kvtune.requests.loads.spec import build

LOADS = {
    "agents": ("gpt-oss-20b", "trace:format=weka,path={traces},sessions=24,hours=0.2"),
    "decode": ("llama-3.1-8b", "decode:requests=400,prompt=48,output=2000,rate=4"),
    "windows": ("gpt-oss-20b", "decode:requests=100,prompt=48,output=2000,rate=4"),
    "chats": ("llama-3.1-8b", "chat:sessions=400,turns=6,first=300,output=80,rate=20"),
}
SHORT = "decode:requests=2,prompt=64,output=4"


def checksum(run: Run) -> str:
    """Return a checksum over the columns that the engine's decisions make."""
    total = 0
    for table in ("requests", "steps", "pool", "tokens"):
        for name, values in sorted(run.table(table).items()):
            total = zlib.crc32(name.encode() + np.ascontiguousarray(values).tobytes(), total)
    return f"{total:08x}"


def measure(name: str, model: str, load: str, folder: Path) -> None:
    from kvtune.lab.sim.replay import replay

    setup = Setup(model=model, device=Simulated(), platform=DEVICES["h100"]).sized()
    workload = build(load, seed=0)
    began = os.times().user
    run = replay(workload, setup)
    write_run(run, folder / f"{name}.kvrun", level=IN_TRANSIT)
    took_s = os.times().user - began
    requests = run.table("requests")
    share = requests["hit_tokens"].clip(0).sum() / requests["prompt_tokens"].sum()
    print(
        f"{name:<8} {took_s:7.2f} CPU-s  {len(requests['id']):>6} requests  {run.header.extra.sim.steps:>7} steps  "
        f"{100 * share:5.2f} % hits  tables {checksum(run)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", required=True, help="a folder of recorded agent sessions")
    parser.add_argument("--only", default="", help=", ".join(LOADS))
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    options = parser.parse_args()
    prepare("", "h100")
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, load) in LOADS.items():
            if options.only not in ("", name):
                continue
            measure(f"({name})", model, SHORT, Path(folder))  # imports, and vLLM's own first times
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            measure(name, model, load.format(traces=options.traces), Path(folder))
            profile.disable()
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
