"""How much longer is said, on a clock that replays move: two at once, of which those with a host tier take longest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
from msgspec import structs

from kvtune.answers.capacity.pace import Pace
from kvtune.answers.capacity.replays import Seed, Task
from kvtune.base.errors import KvtuneError
from tests.capacities import ENGINE, Quick, found
from tests.clocks import Skipping

LOAD = "agents:context=800,tools=60,output=40,turns=15,think=5,different=20,hours=0.03,max_think=20"


class Played(Quick):
    """Each replay takes two seconds and more by its work, with a host tier `tier` times as much."""

    each_s: float = 0.0005
    tier: float = 4.0

    def replayed(self, tasks: Sequence[Task], unit: int) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        self.pace.at_once = 2
        self.pace.plan(task.work(self.window) for task in tasks)
        return self.played(tasks)

    def played(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        clock = self.pace.clock
        running: list[tuple[float, int, float]] = []
        waiting = iter(enumerate(tasks))

        def fill() -> None:
            while len(running) < 2 and (begun := next(waiting, None)) is not None:
                number, task = begun
                uneven = 1.0 + 0.15 * (-1) ** number
                playing_s = uneven * self.each_s * task.sessions * task.within(self.window).end_s
                playing_s *= self.tier if task.times > 1 else 1.0
                self.pace.begin(number)
                running.append((clock.now() + 2.0 + playing_s, number, playing_s))

        fill()
        while running:
            ended_s, number, playing_s = min(running)
            running.remove((ended_s, number, playing_s))
            clock.sleep(ended_s - clock.now())
            for its_end_s, other, other_s in running:
                left_s = its_end_s - clock.now()
                self.pace.report(other, 1 - left_s / other_s, other_s - left_s)
                self.on_report()
            self.made += 1
            if tasks[number].times == 1:
                self.pace.end(number, 2.0, playing_s)
            else:
                self.pace.end(number)
            fill()
            yield from self.parts(tasks[number])


@pytest.mark.parametrize(
    ("each_s", "tier"),
    [
        (0.005, 4.0),
        *(
            pytest.param(*times, marks=pytest.mark.full)
            for times in ((0.05, 14.0), (0.01, 1.5), (0.0001, 3.0))
        ),
    ],
)
def test_from_a_third_of_the_time_on_what_is_left_is_said_within_half(each_s: float, tier: float) -> None:
    clock = Skipping()
    lines: list[tuple[float, str]] = []

    class OnClock(Played):
        def __init__(self, *words: object) -> None:
            super().__init__(*words)  # type: ignore[arg-type]
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
    pace = Pace(clock=Skipping())
    pace.plan([1.0, 1.0])
    pace.begin(0)
    pace.begin(1)
    pace.end(0)
    assert pace.left_s() is None
    pace.end(1, 1.0, 4.0)
    assert pace.left_s([2.0, 1.0]) == pytest.approx(14.0) and pace.left_s() == 0.0


def test_a_machine_that_gets_other_work_is_noticed_at_once() -> None:
    pace = Pace(clock=Skipping())
    pace.plan([1.0] * 6)
    for number, took_s in enumerate((1.0, 1.0, 1.0, 3.0, 3.0)):
        pace.begin(number)
        pace.end(number, 0.0, took_s)
    left_s = pace.left_s()
    assert left_s is not None and 3.0 / 1.5 < left_s < 3.0


def test_a_replay_that_is_slower_than_others_says_so_itself() -> None:
    clock = Skipping()
    pace = Pace(at_once=2, clock=clock)
    pace.plan([1.0, 1.0])
    pace.begin(0)
    pace.begin(1)
    clock.sleep(10.0)
    pace.end(0, 0.0, 10.0)
    pace.report(1, 0.01, 10.0)
    assert pace.left_s() == 0.0
    pace.report(1, 0.1, 10.0)
    assert pace.left_s() == pytest.approx(90.0)
    clock.sleep(30.0)
    assert pace.left_s() == pytest.approx(60.0)
