"""One simulated run, from set-up to run file: `kvtune profile --on sim`. In the CLI's process; imports no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtune.base.errors import KvtuneError
from kvtune.base.masking import without_secrets
from kvtune.data.run.extras import GIVEN
from kvtune.data.run.file import write_run
from kvtune.data.run.types import Run
from kvtune.lab.engine.profile import Profiled, check_output, interrupted, reserved, run_name
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.routing import with_other_routings
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import Report


@dataclass(frozen=True, slots=True)
class SimulatorBench:
    """Runs set-ups in the simulator. `output`: the folder of its run files."""

    simulators: Simulators
    output: Path = Path("reports")
    command: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))

    def run(self, setup: Setup, watch: Callable[[Report], None] = lambda report: None) -> Profiled:
        """Replay the set-up's load and write the run file. If Ctrl-C ends the replay, the run file is partial."""
        check_output(self.output)
        setup = setup.sized()
        with reserved(self.output, run_name(setup)) as (_, path):
            run, error = self._replayed(setup, watch, path)
            if setup.simulated.router == GIVEN and error is None:
                run = with_other_routings(self.simulators, run, setup, watch)
            run = run.with_extra(slo=setup.load.slo)
            write_run(run, path, new=True)
        return Profiled(run, path, error)

    def _replayed(
        self, setup: Setup, watch: Callable[[Report], None], path: Path
    ) -> tuple[Run, KvtuneError | None]:
        """Return the run and None; after Ctrl-C, the partial run and an error. `path`: where it will be written."""
        error: KvtuneError | None = None
        self.simulators.submit(0, setup, again=True)
        try:
            _, run = self.simulators.next_done(watch)
        except KeyboardInterrupt:
            self.simulators.stop()
            error = interrupted("the replay so far", path)
            _, run = self.simulators.next_done(watch)
        if isinstance(run, KvtuneError):
            raise run
        header = msgspec.structs.replace(run.header, command=without_secrets(self.command))
        return Run(header, run.tables), error
