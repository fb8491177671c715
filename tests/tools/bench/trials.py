"""What simulated trials cost: seconds of each, how busy the cores are, and the memory of all processes of the tuner.

python tests/tools/bench/trials.py [--trials 24] [-w WORKLOAD]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SAMPLE_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("-w", "--workload", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study.jsonl"
        command = [sys.executable, "-c", "from kvtune.cli.app import main; main()", "sweep", "tiny-gemma3"]
        command += ["--pin", "--min-drop", "--retention", "--trials", str(options.trials), "--json"]
        command += ["--study", str(study), "-o", folder]
        command += ["-w", options.workload] if options.workload else []
        command += ["--", "--num-gpu-blocks-override", "800"]
        begun = time.monotonic()
        with (Path(folder) / "out").open("wb") as out:
            process = psutil.Popen(command, stdout=out)
        peak, first_s, at_first = 0, 0.0, 0.0
        while process.poll() is None:
            time.sleep(SAMPLE_S)
            memory, cpu_s = 0, 0.0  # of who lives, and of whom they have reaped
            for one in [process, *process.children(recursive=True)]:
                try:
                    memory += one.memory_full_info().pss
                    cpu_s += sum(one.cpu_times()[:4])
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            peak = max(peak, memory)
            if not first_s and study.is_file() and study.read_bytes().count(b"\n") > 1:
                first_s, at_first = time.monotonic() - begun, cpu_s
        whole_s = time.monotonic() - begun
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        told = json.loads((Path(folder) / "out").read_text())
        times = sorted(t["elapsed_s"] for t in told["trials"])
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        after_s = spent.ru_utime + spent.ru_stime - at_first
        busy = after_s / (whole_s - first_s)
        print(
            f"{len(times)} trials: {times[len(times) // 2]:.2f} s each (median; slowest {times[-1]:.2f}), first after "
            f"{first_s:.1f} s, all after {whole_s:.1f} s; {(whole_s - first_s) / len(times):.2f} s of wall and "
            f"{after_s / len(times):.2f} s of CPU time each\n"
            f"cores busy after the first: {busy:.2f} of {len(os.sched_getaffinity(0))}; "
            f"memory at its highest (PSS of all processes): {peak / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
