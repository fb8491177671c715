"""Runs a check: asks for the cold answers, and for each path's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom

from kvtune.answers.check.asking import Asker
from kvtune.answers.check.judge import Answer, distance
from kvtune.answers.check.paths import EMPTY, FULL, Layout, Path, Prompt, exchanged, way
from kvtune.answers.check.result import Compared

TURNED_OVER = 1.5
"""Pools of other tokens behind which nothing of a prompt is left."""
JUNK_TOKENS = 1000


@dataclass
class Course:
    """One check. `say` is told what begins. `salts`, `cold`: of the prompts' first requests. `unsalted`: see Check."""

    asker: Asker
    layout: Layout
    prompts: Sequence[Prompt]
    tokens: int
    say: Callable[[str], None]
    draw: Random = field(default_factory=SystemRandom)
    salts: list[str] = field(default_factory=list)
    cold: list[Answer] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    unsalted: int = 0

    def run(self, paths: Mapping[str, Path], salts: Sequence[str]) -> None:
        """Ask for the cold answers, and for those of each path. `salts`: what a tier was primed with before."""
        self._begin()
        for name, path in paths.items() if not self.unsalted else ():
            self._take(name, path, salts)

    def _begin(self) -> None:
        """Ask for cold answers: alone, again, and two at a time, so that the server computes them in other batches."""
        self.say("cold answers")
        for prompt, other in self._pairs():
            self.salts.append(self._salt())
            self.cold.append(self._cold(prompt.ids, self.salts[-1]))
            self._compare("null", prompt, self._cold(prompt.ids))
            if prompt.number % 2:
                pair = [self.prompts[prompt.number - 1], prompt]
                together, _ = self.asker.answers([each.ids for each in pair], self._salt(), self.tokens)
                for each, answer in zip(pair, together, strict=True):
                    self._compare("null", each, answer)
            self._compare("exchanged", prompt, self._cold(exchanged(self.layout, prompt, other)))

    def _take(self, name: str, path: Path, salts: Sequence[str]) -> None:
        """Ask for one path's answers, all prompts at a time if the cache is cleared for it."""
        self.say(path.title)
        rows = [
            (prompt, way(name, self.layout, prompt, other, self.tokens)) for prompt, other in self._pairs()
        ]
        if path.clears in (FULL, EMPTY):  # what is primed must fit
            longest = max(len(prompt.ids) for prompt in self.prompts)
            rows = rows[: max(1, self.layout.pool // (2 * longest))]
        step = len(rows) if path.clears else 1
        for first in range(0, len(rows), step):
            since, primed = self.asker.sent, []
            for prompt, plan in rows[first : first + step]:
                salt = salts[prompt.number] if salts else self._salt()
                grown = [] if salts else self._prime(plan.primers, salt, turn=plan.turn)
                primed.append((prompt, plan, salt, grown))
            self._clear(path, sum(len(prompt.ids) for prompt, *_ in primed))
            for prompt, plan, salt, grown in reversed(primed):
                self._prime(plan.later, salt)
                ids = [*grown, *prompt.ids[len(grown) :]]
                cold = self._cold(ids) if grown else self.cold[prompt.number]
                age, heard = self.asker.sent - since, self.asker.ask(ids, salt, self.tokens)
                local, loads = heard.cached > heard.loaded, heard.loaded > 0
                taken = plan.least < heard.cached <= plan.most and loads == path.loads
                taken = taken and (not loads or local == bool(plan.later))
                nats = distance(cold, heard.answer)
                facts = (nats, taken, heard.cached, age)
                self.compared.append(Compared(name, prompt.number, ids, cold, heard.answer, *facts))

    def _clear(self, path: Path, kept: int) -> None:
        """Fill the pool with other prompts, so that half of what was kept is left; or empty it."""
        if path.clears not in (FULL, EMPTY) or (path.clears == EMPTY and self.asker.emptied()):
            return
        wanted = self.layout.pool - kept // 2 if path.clears == FULL else TURNED_OVER * self.layout.pool
        words = [word for prompt in self.prompts for word in prompt.ids]
        size = min(JUNK_TOKENS, len(self.prompts[0].ids))
        for _ in range(int(wanted / size) + 1):
            self.asker.ask(self.draw.choices(words, k=size), self._salt())

    def _prime(self, primers: Sequence[Sequence[int]], salt: str, *, turn: bool = False) -> list[int]:
        """Fill the cache. Return the last primer with its answer, if the prompt goes on from there."""
        heard = [self.asker.ask(ids, salt, self.tokens if turn else 1) for ids in primers]
        return [*primers[-1], *heard[-1].answer.tokens] if turn else []

    def _cold(self, ids: Sequence[int], salt: str = "") -> Answer:
        heard = self.asker.ask(ids, salt or self._salt(), self.tokens)
        self.unsalted += heard.cached > 0
        return heard.answer

    def _compare(self, path: str, prompt: Prompt, answer: Answer) -> None:
        cold = self.cold[prompt.number]
        self.compared.append(Compared(path, prompt.number, prompt.ids, cold, answer, distance(cold, answer)))

    def _pairs(self) -> zip[tuple[Prompt, Prompt]]:
        """Return each prompt with another one."""
        return zip(self.prompts, [*self.prompts[1:], *self.prompts[:1]], strict=True)

    def _salt(self) -> str:
        return f"kvtune-{self.draw.getrandbits(64):016x}"
