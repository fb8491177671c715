"""The times of a stride's turns (a turn schedules and sends one step) and of their steps' ends.

Simulator's process only. A synchronous engine makes its next turn when the step that it has sent ends; an engine with
asynchronous scheduling, when the step before that one ends.
"""

from __future__ import annotations

from array import array

from kvtune.fake_device.cost import StepCost
from kvtune.sim.clock import VirtualClock


class Pace:
    """The times of one stride. `due`: the next arrival. `in_flight_end_s`: the end of the batch in flight, if any."""

    def __init__(
        self, clock: VirtualClock, cost: StepCost, due: float | None, in_flight_end_s: float | None
    ) -> None:
        self._cost, self._due = cost, due
        self.turn_s = clock.now_s
        """The time of the next turn. Requests that have arrived by then take part."""
        self.free_s = max(clock.now_s, clock.device_free_s)
        """When the device is free, so that the next step can start."""
        self.first_s = self.free_s
        self._ahead = in_flight_end_s is not None
        self._next_turn_s = self.free_s if in_flight_end_s is None else max(clock.now_s, in_flight_end_s)
        self._first_answer_s = self._next_turn_s

    @property
    def arrival_due(self) -> bool:
        """Whether a request may have arrived by the next turn."""
        return self._due is not None and self._due <= self.turn_s

    def step(self, decodes: int, context: int) -> float:
        """Make a turn that sends a step of `decodes` requests; return the step's end."""
        self.free_s += self._cost.seconds(0, decodes, context)
        if self._ahead:
            self.turn_s, self._next_turn_s = self._next_turn_s, self.free_s
        else:
            self.turn_s = self.free_s
        return self.free_s

    def ends(self, decodes: int, context: int, most: int) -> array[float]:
        """Make up to `most` turns, until one at which a request may have arrived; return the ends of their steps."""
        ends = array("d")
        for _ in range(most):
            if self.arrival_due:
                break
            ends.append(self.step(decodes, context))
            context += decodes
        return ends

    def answers(self, ends: array[float]) -> array[float]:
        """Return when each turn gets tokens: at its step's end or, with async scheduling, at the step before's."""
        return array("d", [self._first_answer_s]) + ends[:-1] if self._ahead and ends else ends
