"""Where set-ups run: a lab makes benches, a bench takes a set-up and returns its run.

Commands are handed a lab and pass it on. Who wants other benches hands over another lab, as tests do
(tests/labs.py). Many commands are handed a lab and run nothing, so a bench is imported when one is made.

    real, timed device   `engine()`: vLLM's own processes (kvtune/lab/engine/profile.py)
    simulated            `simulators()`: many replays in one process (kvtune/lab/sim/simulators.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtune.base.children import Interpreter
from kvtune.base.clock import Clock
from kvtune.data.platforms import Platform
from kvtune.lab.setup.setup import Setup, Simulated

if TYPE_CHECKING:
    from kvtune.lab.engine.profile import EngineBench, Profiled
    from kvtune.lab.sim.simulators import Simulators


class Lab:
    """vLLM's own processes and kvtune's simulator, on this machine."""

    def engine(
        self,
        output: Path,
        *,
        probe: str = "light",
        stacks: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> EngineBench:
        """Return the bench for real and timed devices. `output`: the folder of its run files."""
        from kvtune.lab.engine.profile import EngineBench

        return EngineBench(output, probe=probe, stacks=stacks, environment=environment or {})

    def simulators(
        self, model: str = "", platform: Platform | None = None
    ) -> AbstractContextManager[Simulators]:
        """Return what replays set-ups, some at once; open it with `with`. Most replays have `model` and `platform`."""
        from kvtune.lab.sim.simulators import Simulators

        return Simulators(model=model, platform=platform)

    def simulators_of(
        self, interpreter: Interpreter, platform: Platform | None = None
    ) -> AbstractContextManager[Simulators]:
        """Return the same with the vLLM of another environment, whose interpreter this is."""
        from kvtune.lab.sim.simulators import Simulators

        return Simulators(1, platform=platform, interpreter=interpreter)

    def clock(self) -> Clock:
        """Return what a command waits by."""
        return Clock()

    def run(self, setup: Setup, output: Path, watch: Callable[[Any], None] = lambda now: None) -> Profiled:
        """Run a set-up once, where its device says, and write its run file into `output`."""
        if not isinstance(setup.device, Simulated):
            return self.engine(output).run(setup, watch)
        from kvtune.lab.sim.profile import SimulatorBench

        with self.simulators(setup.model, setup.platform) as simulators:
            return SimulatorBench(simulators, output).run(setup, watch)


class Replaying(Lab):
    """A lab for the replays of several searches: its simulators stay open, as each start of them imports vLLM."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._stack = lab, ExitStack()
        self._open: dict[tuple[str, str], Simulators] = {}

    def __enter__(self) -> Replaying:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def simulators(
        self, model: str = "", platform: Platform | None = None
    ) -> AbstractContextManager[Simulators]:
        key = model, platform.key if platform is not None else ""
        if key not in self._open:
            self._open[key] = self._stack.enter_context(self._lab.simulators(model, platform))
        return nullcontext(self._open[key])


LAB = Lab()
