"""A set-up in the words of the commands that repeat it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.lab.device.settings import Timed
from kvtune.lab.setup.setup import Setup
from kvtune.reading.analysis.again import Invocation


def of_setup(setup: Setup, objectives: Sequence[str] = ("hit-rate",)) -> Invocation:
    """Return a study's set-up for commands. Only a simulation is like another device."""
    where = ["--on", "host"] if isinstance(setup.device, Timed) else []
    where = ["--on", "sim", "--like-device", setup.platform.key] if setup.platform is not None else where
    return Invocation(
        model=setup.model,
        spec=setup.load.spec,
        seed=setup.load.seed,
        core=setup.core,
        core_settings=setup.core_settings,
        flags=setup.engine_args,
        where=where,
        dummy=setup.dummy,
        slo=setup.load.slo,
        objective=",".join(objectives),
    )
