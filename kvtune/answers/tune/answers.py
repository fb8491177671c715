"""Whether hits of a winner's server answer as recomputations do: its settings are served once, and checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from kvtune.answers.check.course import Course, layout_of, prompts
from kvtune.answers.check.document import headline
from kvtune.answers.check.paths import KERNEL
from kvtune.answers.check.result import answer
from kvtune.base.clock import Clock
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import flag_value
from kvtune.data.layout.model_config import shape_at_hand
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.resolve import resolve
from kvtune.lab.setup.setup import Setup
from kvtune.servers.watch.server import Server

PROMPTS, TOKENS = 24, 8
"""They show a fault in one of ten hits with 92 %, if each answer tells a block exchanged."""
START_S, LOOK_S = 900.0, 1.0


def checked(setup: Setup, bench: EngineBench, clock: Clock) -> tuple[bool, str]:
    """Check a set-up's server. Return whether its hits are wrong, and a sentence; "" where weights say nothing."""
    words = resolve(setup.model, dummy=setup.dummy, engine_args=setup.engine_args).args
    if flag_value(words, "load-format") == "dummy":  # all of its answers are alike
        return False, ""
    try:
        with bench.serve(setup) as (url, ended), closing(Server(url)) as server:
            _until_up(server, ended, clock)
            layout = layout_of(server, shape_at_hand)
            asked = [*prompts(server, layout, PROMPTS, 0)], [""] * PROMPTS, server, TOKENS, False
            course = Course(*asked, model=server.card().id, layout=layout)
            made = answer(course.run(lambda path: None))
    except KvtuneError as error:
        return False, f"hits of the best setting were not checked: {error.message}"
    # Behind a hit inside what a kernel of states computes together, right answers are rounded otherwise, too.
    wrong = made.unsalted or any(row.cached % KERNEL == 0 for row in made.differ)
    return made.verdict == "differs" and bool(wrong), f"check of the best setting: {headline(made)}"


def _until_up(server: Server, ended: Callable[[], str], clock: Clock) -> None:
    end = clock.now() + START_S
    while True:
        try:
            server.scrape()
            return
        except KvtuneError:
            if (why := ended()) or clock.now() > end:
                raise KvtuneError(f"its server did not start: {why or 'no answer'}", "") from None
        clock.sleep(LOOK_S)
