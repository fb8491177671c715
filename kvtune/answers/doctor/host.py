"""Measures the most tokens/s that this host can drive, in vLLM's processes with steps that take no time."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.answers.doctor.finding import Finding
from kvtune.base.errors import KvtuneError
from kvtune.base.scratch import scratch
from kvtune.base.units import count
from kvtune.lab.device.settings import constant
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.host.ceiling import Ceiling
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.requests.loads.spec import build

MODEL, LOAD = "tiny-opt", "decode:requests=512,prompt=16,output={output}"
OUTPUTS = (200, 800, 3200)
"""Output tokens per request. The first measurement takes a second or two.

If it has too few samples of the processes, on a fast or busy host, the next one is four times as long.
"""

TOPIC = "host"
NAMES = {"front_end": "vLLM's front end", "engine_core": "EngineCore"}


def host_findings(lab: Lab = LAB) -> Iterator[Finding]:
    """Yield one finding. Starts vLLM's processes for some seconds, without a model."""
    try:
        ceiling = next(
            (measured for output in OUTPUTS if (measured := _measured(output, lab)) is not None), None
        )
    except KvtuneError as error:
        yield Finding(
            "note", TOPIC, f"how much this host can drive was not measured: {error.message}", error.hint
        )
        return
    if ceiling is None:
        yield Finding(
            "note",
            TOPIC,
            "how much this host can drive was not measured: too few samples of its processes, it is busy",
            "run `kvtune doctor` again when nothing else computes",
        )
        return
    each = ", ".join(
        f"{NAMES[name]} {us:.1f} us" for name, us in ceiling.cpu_us_per_token.items() if us is not None
    )
    yield Finding(
        "ok",
        TOPIC,
        f"drives at most {count(ceiling.tokens_s)} output tokens/s, which {NAMES[ceiling.process]} sets "
        f"(CPU time a token: {each}; kvtune's core, a device that takes no time)",
    )


def _measured(output: int, lab: Lab) -> Ceiling | None:
    """Measure once; return the ceiling, or None if the run was too short."""
    workload = build(LOAD.format(output=output), seed=0)
    with scratch("doctor-host") as folder:
        load, device = Load.of(workload), constant(0.0)
        done = lab.engine(folder).run(Setup(model=MODEL, load=load, core="kvtune", device=device))
        if done.error is not None:
            raise done.error
        return RunAnalysis(done.run).ceiling
