"""Counts a running server's missed prompt tokens by cause, from its KV events alone. Pure.

Only whole blocks are counted. The server's own counters have the hits, and what no event tells: totals.py joins both.

    a prompt opens    at a stretch (blocks that one request stored in one step) that is no chunk of an open prompt
    it grows          by a stretch that follows its last block, as long as one may come (`Prompt.may_grow`)
    it is judged      once none may come: the step of its last chunk had room left, or lies GROWING steps back, or the
                      server says that it computes no prompt (`settle`)

No rule here waits for a time. A stretch of one block that follows the newest block of a prompt may belong to the
answer: it counts as `answers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from kvtune.servers.watch.blocks import Blocks, Stretch
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Hash, Received
from kvtune.servers.watch.lists import Lists
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.prompt import GROWING, Prompt

MOST_ENDS = 10_000
"""Most ends of prompts that are remembered."""


@dataclass(slots=True)
class Account(Cache):
    """Missed tokens of whole blocks by cause, those that were `loaded`, and those that may be of `answers`."""

    tokens: Counter[str] = field(default_factory=Counter)
    lists: Lists = field(default_factory=Lists)
    others: Others | None = None
    """The other servers of a fleet."""
    _open: dict[Prompt, None] = field(default_factory=dict)
    """In the order of their newest chunks."""
    _ended: dict[tuple[int, int, Hash | None], dict[Prompt, None]] = field(default_factory=dict)
    """The same by where they end."""
    _ends: dict[tuple[int, Hash], int] = field(default_factory=dict)
    """The newest block of each prompt, with its step: a block after it may be its answer's."""

    @property
    def pending(self) -> int:
        """Tokens of the prompts that are not judged yet."""
        return sum(prompt.open_tokens for prompt in self._open)

    def add(self, received: Received) -> None:
        for stretch, blocks in self.stretches(received):
            self.store(stretch, blocks)
        rank = self.blocks[received.rank]
        self._judge_those(lambda prompt: prompt.blocks is rank and not prompt.may_grow(rank.step))

    def settle(self) -> None:
        """Judge all prompts: the server computes none, so none grows."""
        self._judge_those(lambda _: True)

    def forget(self, rank: int) -> None:
        """Begin with an empty cache and empty lists, because the rank was restarted."""
        if (blocks := self.blocks.get(rank)) is not None:
            self._judge_those(lambda prompt: prompt.blocks is blocks)
            self.lists.clear()
            self._ends = {end: step for end, step in self._ends.items() if end[0] != rank}
        Cache.forget(self, rank)

    def store(self, stretch: Stretch, blocks: Blocks) -> None:
        """Add a stretch to its prompt, before its blocks are stored."""
        ended = None if stretch.parent is None else self._ends.pop((stretch.rank, stretch.parent), None)
        self._ends[stretch.rank, stretch.hashes[-1]] = stretch.step
        if len(self._ends) > MOST_ENDS:
            del self._ends[next(iter(self._ends))]
        single = (
            ended is not None
            and stretch.parent is not None
            and len(stretch.hashes) == 1
            and not blocks.behind(stretch.parent)
        )
        if single and self.others is not None:
            self.others.one_block(stretch)
        steps = range(stretch.step - GROWING, stretch.step + 1)
        ended_there = (self._ended.get((stretch.rank, step, stretch.parent), ()) for step in steps)
        firsts = (prompt for prompts in ended_there for prompt in islice(prompts, 1))
        prompt = next((first for first in firsts if first.may_grow(stretch.step)), None)
        if prompt is not None:
            self._close(prompt)
        elif single:
            self.tokens["answers"] += stretch.block_size
            return
        else:
            prompt = Prompt.opened(stretch, blocks, self.before(stretch, blocks))
            prompt.gone_s = blocks.tier.age_s(stretch.hashes, blocks.groups, stretch.at)
            follows = ended is not None and stretch.step - ended <= GROWING  # a computed chunk
            if not follows and (count := blocks.loaded(stretch, prompt.chain)):
                prompt.hit += count
                self.tokens["loaded"] += count * prompt.size
                blocks.tier.asked["loadable"] += count * prompt.size
        if self.others is not None:
            self.others.ask(prompt, stretch)
        prompt.grow(stretch, [other for rank, other in self.blocks.items() if rank != stretch.rank])
        prompt.singles = prompt.singles + 1 if single else 0
        self._open[prompt] = None
        self._ended.setdefault(prompt.end, {})[prompt] = None

    def _close(self, prompt: Prompt) -> None:
        del self._open[prompt]
        del self._ended[prompt.end][prompt]
        if not self._ended[prompt.end]:
            del self._ended[prompt.end]

    def _judge_those(self, whole: Callable[[Prompt], bool]) -> None:
        for prompt in [prompt for prompt in self._open if whole(prompt)]:
            self._close(prompt)
            self._judge(prompt)

    def _judge(self, prompt: Prompt) -> None:
        if prompt.singles:
            self.tokens["answers"] += prompt.size * prompt.singles
            prompt.drop_singles()
        whole = self.complete and (self.others is None or self.others.known)
        self.tokens.update(causes := prompt.causes(whole=whole))
        tier = prompt.blocks.tier
        tier.count(prompt.causes(whole=whole, below=True) if tier.stored else causes, prompt.gone_s)
        if self.others is not None and not prompt.one_held:
            self.others.count(prompt)
        if prompt.rooted:
            size, seen = prompt.size, prompt.seen
            lost = seen - max(prompt.hit, prompt.held[0])
            self.lists.visit(prompt.chain[0], prompt.hit * size, lost * size, len(prompt.chain) * size)
            if prompt.differs is not None:
                self.lists.differ(prompt.differs, (len(prompt.chain) - seen) * size)
