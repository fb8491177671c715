"""Whole answers of `kvtune capacity` with a bench that answers at once: estimates stand for the replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from kvtune.answers.capacity.estimate import Window, estimate
from kvtune.answers.capacity.question import Question, answer, engine_of
from kvtune.answers.capacity.replays import Bench, Seed, Task, estimated
from kvtune.answers.capacity.result import Capacity
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import flag_value
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.sessions import Slots
from kvtune.requests.loads.spec import session_load

GROUP = {"kind": "FullAttentionSpec", "layers": 80, "page_bytes": 65_536, "block_size": 16}
ENGINE = EngineInfo(
    block_size=16,
    num_blocks=33_379,
    max_model_len=131_072,
    groups=[GROUP],
    settings={"max_num_batched_tokens": 8192, "max_num_seqs": 256},
)


class Quick(Bench):
    """Replays by the estimate, with `share` of the pool that the engine has."""

    engine_info: EngineInfo = ENGINE
    share: float = 1.0
    fails: str = ""
    twice: bool = False
    less: float = 0.0

    def engine(self, setup: Setup) -> EngineInfo:
        return self.engine_info

    def replayed(self, tasks: Sequence[Task], unit: int) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        for task in tasks:
            self.made += 1
            yield from self.parts(task)

    def parts(self, task: Task) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        for part in task.parts():
            if self.fails and self.fails in task.setup.engine_args:
                yield part, KvtuneError(f"no {self.fails} here", "leave it out")
            else:
                yield part, self.figures(part)

    def figures(self, task: Task) -> Seed:
        engine = engine_of(self.engine_info, task.setup.simulated.cost)
        given = flag_value(task.setup.engine_args, "num-gpu-blocks-override")
        pool = 16 * int(given) if given else engine.pool
        engine = replace(engine, pool=int(self.share * pool))
        slots, window = Slots(session_load(self.spec), task.seed), task.within(self.window)
        figures = estimated(estimate(slots, task.sessions, engine, window), task.seed, window)
        figures = structs.replace(figures, kept=figures.kept - self.less * (task.seed == 0))
        some = 40 if self.twice and "--watermark" not in task.setup.engine_args else 0
        return structs.replace(
            figures,
            preempted=int(some > 0),
            computed_twice={"evicted": some, "partial_block": some // 4} if some else {},
            computed_tokens=1000,
            met=estimate(slots, task.sessions, engine, window).met(self.slo) if self.slo else None,
            busy=0.5,
            pool_mean=0.2,
            pool_most=0.5,
        )


def found(
    spec: str,
    *,
    share: float = 1.0,
    fails: str = "",
    twice: bool = False,
    less: float = 0.0,
    info: EngineInfo = ENGINE,
    phase: Callable[[str], None] = lambda _: None,
    kind: type[Quick] = Quick,
    **asked: Any,
) -> Capacity:
    def made(wanted: str, hours: float, window: Window) -> Bench:
        bench = kind(None, wanted, hours, window)  # type: ignore[arg-type]
        bench.share, bench.fails, bench.engine_info = share, fails, info
        bench.twice, bench.less = twice, less
        return bench

    setup = asked.pop("setup", Setup(model="m"))
    return answer(Question(model="m", spec=spec, setup=setup, **asked), made, phase)
