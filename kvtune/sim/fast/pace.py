"""When the turns of a stride happen, and when their steps end. Simulator's process only.

A synchronous engine makes its next turn when a step has ended; one that schedules ahead, when the step before the one
that it has just sent has ended.
"""

from __future__ import annotations

from array import array

from kvtune.fake_device.cost import StepCost
from kvtune.sim.clock import VirtualClock


class Pace:
    """The times of one stride. `in_flight_end_s`: when the batch in flight ends; None for a synchronous engine."""

    def __init__(
        self, clock: VirtualClock, cost: StepCost, due: float | None, in_flight_end_s: float | None
    ) -> None:
        self._cost, self._due = cost, due
        self.turn_s = clock.now_s
        """When the next turn is made. Requests that have arrived by then take part in it."""
        self.free_s = max(clock.now_s, clock.device_free_s)
        """When the device is free: the next step starts then."""
        self.first_s = self.free_s
        self._ahead = in_flight_end_s is not None
        self._next_turn_s = self.free_s if in_flight_end_s is None else max(clock.now_s, in_flight_end_s)
        self._first_answer_s = self._next_turn_s

    @property
    def arrival_due(self) -> bool:
        """Whether a request may have arrived by the next turn."""
        return self._due is not None and self._due <= self.turn_s

    def step(self, decodes: int, context: int) -> float:
        """Make a turn that sends a step of this size; returns the step's end."""
        self.free_s += self._cost.seconds(0, decodes, context)
        if self._ahead:
            self.turn_s, self._next_turn_s = self._next_turn_s, self.free_s
        else:
            self.turn_s = self.free_s
        return self.free_s

    def ends(self, decodes: int, context: int, most: int) -> array[float]:
        """The ends of the single steps, added up as they are, up to the turn before which a request may arrive."""
        ends = array("d")
        for _ in range(most):
            if self.arrival_due:
                break
            ends.append(self.step(decodes, context))
            context += decodes
        return ends

    def answers(self, ends: array[float]) -> array[float]:
        """When each turn gets its tokens: at the end of its step or, with async scheduling, of the step before it."""
        return array("d", [self._first_answer_s]) + ends[:-1] if self._ahead and ends else ends
