"""How much longer is said, on a clock that replays move: two at once, of which those with a host tier take longest."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from kvtune.answers.capacity.pace import Pace
from kvtune.answers.capacity.replays import Task
from tests.capacities import ENGINE, Quick, found
from tests.clocks import Skipping

LOAD = "agents:context=800,tools=60,output=40,turns=15,think=5,different=20,hours=0.03,max_think=20"


class Played(Quick):
    """Each replay takes two seconds and more by its work, with a host tier `tier` times as much."""

    each_s: float = 0.0005
    tier: float = 4.0

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.ends_s: dict[int, tuple[float, float]] = {}
        """Of each replay that runs: when it ends, and how long it plays."""

    def begin(self, task: Task) -> None:
        number = self.replays + len(self.running)
        super().begin(task)
        playing_s = (1.0 + 0.15 * (-1) ** number) * self.each_s * task.sessions * task.end_s(self.window)
        playing_s *= self.tier if task.times > 1 else 1.0
        self.ends_s[number] = self.pace.clock.now() + 2.0 + playing_s, playing_s

    def ended(self) -> Task:
        clock = self.pace.clock
        number = min(self.ends_s, key=lambda each: self.ends_s[each][0])
        ended_s, _ = self.ends_s.pop(number)
        clock.sleep(ended_s - clock.now())
        for other, (its_end_s, other_s) in self.ends_s.items():
            left_s = its_end_s - clock.now()
            self.pace.report(other, 1 - left_s / other_s, other_s - left_s)
            self.on_report()
        self.pace.end(number, 2.0 if self.running[number].times == 1 else 0.0)
        return self.take(number)


@pytest.mark.parametrize(
    ("each_s", "tier"),
    [
        (0.005, 4.0),
        *(
            pytest.param(*times, marks=pytest.mark.full)
            for times in ((0.05, 14.0), (0.02, 6.0), (0.01, 2.5), (0.01, 1.5), (0.0001, 3.0))
        ),
    ],
)
def test_from_a_third_of_the_time_on_what_is_left_is_said_within_half(each_s: float, tier: float) -> None:
    clock = Skipping()
    lines: list[tuple[float, str]] = []

    class OnClock(Played):
        def __init__(self, *words: object) -> None:
            super().__init__(*words)
            self.each_s, self.tier = each_s, tier
            self.pace = Pace(clock=clock)

    info = structs.replace(ENGINE, num_blocks=600)

    def phase(text: str) -> None:
        lines.append((clock.now(), text))

    capacity = found(LOAD, info=info, kind=OnClock, phase=phase)
    ended_s = clock.now()
    began_s = ended_s - capacity.elapsed_s
    told = [(now_s, re.search(r"about (\d+) s left", text)) for now_s, text in lines]
    assert told[0][1] is None, "nothing is known yet"
    late = [
        (int(match[1]), ended_s - now_s)
        for now_s, match in told
        if match is not None and now_s - began_s >= capacity.elapsed_s / 3 and ended_s - now_s >= 3
    ]
    assert len(late) >= 4
    for left_s, really_s in late:
        assert really_s / 1.5 <= left_s <= 1.5 * really_s, late


def test_nothing_is_said_of_replays_that_failed_or_told_no_time() -> None:
    clock = Skipping()
    pace = Pace(clock=clock)
    pace.begin(0, 1.0)
    pace.begin(1, 1.0)
    pace.end(0)
    assert pace.left_s() is None
    clock.sleep(5.0)
    pace.end(1, 1.0)
    assert pace.left_s([2.0, 1.0]) == pytest.approx(14.0) and pace.left_s() == 0.0


def test_a_machine_that_gets_other_work_is_noticed_at_once() -> None:
    clock = Skipping()
    pace = Pace(clock=clock)
    for number, took_s in enumerate((1.0, 1.0, 1.0, 3.0, 3.0)):
        pace.begin(number, 1.0)
        clock.sleep(took_s)
        pace.end(number, 1e-9)
    left_s = pace.left_s([1.0])
    assert left_s is not None and 3.0 / 1.5 < left_s < 3.0


def test_a_replay_that_is_slower_than_others_says_so_itself() -> None:
    clock = Skipping()
    pace = Pace(at_once=2, clock=clock)
    pace.begin(0, 1.0)
    pace.begin(1, 1.0)
    clock.sleep(10.0)
    pace.end(0, 1e-9)
    pace.report(1, 0.01, 10.0)
    assert pace.left_s() == 0.0
    pace.report(1, 0.1, 10.0)
    assert pace.left_s() == pytest.approx(90.0)
    clock.sleep(30.0)
    assert pace.left_s() == pytest.approx(60.0)
