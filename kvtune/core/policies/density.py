"""The default: by age, but what was used once may go before older blocks that came back, while that pays. O(1) a block.

    tier         holds                                                   given out
    speculative  windows at doubling distances, never hit                first, oldest first
    far          slack for suffixes of unknown length, never hit         then
    near         slack close to a prompt's end, never hit                then, but for what by age pays (extras.py)
    output       windows at an output's end, never hit                   the same
    single       ordinary blocks, used once                              the older head; the single one, too, where
    reused       those that were hit, or came back after their eviction  the reused one is worth more (ages.py)

A reused block never goes before an older single one: what follows it in its prefix is always older. `guard.py`
turns the policy back to age alone when that would have hit more. It starts so, too: before the first hits
nothing is worth more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvtune.core.policies import FAR, NEAR, OUTPUT, OUTPUT_END, WINDOW, ages
from kvtune.core.policies.placing import (
    A_WINDOW_LEFT,
    AGAIN,
    FAR_TIER,
    HIT,
    LEFT,
    LEFT_FREE,
    MANY,
    NEAR_TIER,
    NEEDED,
    ONCE,
    OUTPUT_TIER,
    REUSED,
    SINGLE,
    SPECULATIVE_TIER,
    Placing,
)
from kvtune.core.policies.remembered import mark, mark_of_output

WORTH = 2.0
"""What a reused block's value counts, of which more depends than of its own hits."""
RUN = 16
"""Blocks that one comparison of values may decide: those of one request stand together and are of one age."""


class Density(Placing):
    name = "density"
    tiers = ("speculative", "far", "near", "output", "single", "reused")
    replaces = True

    def _look(self, free: int) -> None:
        """How far back a pool with so many free blocks would reach: by age, with other extras, preferring reused."""
        self.stale = False
        size, reach = self.shelves.size, self.ages.reach
        self.near.lent = self.guard.lent
        self.output.learn(self.left, size(OUTPUT_TIER), self.ages.epoch, self.reach)
        self.near.look(size(NEAR_TIER))
        self.output.look(size(OUTPUT_TIER))
        free = max(0, free - self.near.held - self.output.held)
        extras = (self.near, ages.NEAR), (self.output, ages.OUTPUT)
        counted = {ages.SINGLE, ages.REUSED} | {kind for account, kind in extras if account.full}
        self.reach = reach(free, counted)
        if self.shelves.window_groups:
            for account, kind in extras:
                account.kept = reach(free + account.held, counted | {kind})
                account.first = reach(free + account.held, counted - {kind})
        self.ahead = {epoch: count for epoch, count in self.ahead.items() if epoch >= int(self.reach)}
        self.staked = sum(self.ahead.values())
        if self.guard.by_age:
            self.single_since, self.reused_since = self.ages.traded(self.reach)

    def choose(self, wanted: int) -> tuple[int, int]:
        shelves, freed_at = self.shelves, self.freed_at
        size, head = shelves.size, shelves.head
        for tier in (SPECULATIVE_TIER, FAR_TIER):
            if size(tier):
                return tier, min(wanted, size(tier))
        if self.stale:
            self._look(shelves.num_free_blocks)
        heads = []
        for tier in (NEAR_TIER, OUTPUT_TIER, SINGLE, REUSED):
            block_id = head(tier)
            if block_id >= 0:
                if tier < SINGLE:
                    over = size(tier) - (self.near if tier == NEAR_TIER else self.output).room
                    if over > 0:
                        return tier, min(wanted, over) if tier == NEAR_TIER else -min(wanted, over)
                heads.append((freed_at[block_id], tier))
        if len(heads) == 1:
            return heads[0][1], min(wanted, size(heads[0][1]))
        heads.sort()
        (again, tier), (then, _) = heads[:2]
        if tier == REUSED and self.reuse and not self.guard.by_age and head(SINGLE) >= 0:
            value, an_epoch = self.ages.value, self.an_epoch
            epoch, room = freed_at[head(SINGLE)] // an_epoch, int(self.guard.stake) - self.staked
            if room > 0 and value(0, epoch) < WORTH * value(1, again // an_epoch):
                count = min(wanted, size(SINGLE), RUN, room)
                self.ahead[epoch] = self.ahead.get(epoch, 0) + count
                self.staked += count
                return SINGLE, count
        return tier, shelves.before(tier, freed_at, then, min(wanted, RUN))

    def hit(self, block_ids: Sequence[int]) -> None:
        use, freed_at = self.use, self.freed_at
        if not block_ids:
            return
        if self.stale:
            touched = sum(1 for block_id in block_ids if freed_at[block_id])
            self._look(self.shelves.num_free_blocks + touched)
        self.guard.asked += len(block_ids)
        self.guard.new_or_hit()
        self.beyond = self.near.beyond = self.output.beyond = False
        if self.shelves.window_groups:
            self._came_again(block_ids)
        an_epoch = self.an_epoch
        if len(block_ids) == 1:
            block_id = block_ids[0]
            when, freed_at[block_id], use[block_id] = freed_at[block_id], 0, HIT
            if when:
                self._hit(when & 3, when // an_epoch, 1)
            return
        if len(block_ids) < MANY:
            keys = [when // an_epoch << 2 | when & 3 for when in map(freed_at.__getitem__, block_ids)]
            for block_id in block_ids:
                freed_at[block_id] = 0
                use[block_id] = HIT
        else:
            blocks = np.array(block_ids)
            times = self._freed_at[blocks]
            keys = (times // an_epoch << 2 | times & 3).tolist()
            self._freed_at[blocks] = 0
            self._use[blocks] = HIT
        # Most blocks of a prompt are of one epoch and class; a dict keeps the order in which they come.
        for key, count in Counter(keys).items():
            if key > 3:
                self._hit(key & 3, key >> 2, count)

    def _came_again(self, block_ids: Sequence[int]) -> None:
        if len(block_ids) < MANY:
            again = sum(self.use[block_id] == LEFT_FREE for block_id in block_ids)
        else:
            again = int(np.count_nonzero(self._use[np.array(block_ids)] == LEFT_FREE))
        if again:
            self.left.came_again(again)

    def _hit(self, kind: int, epoch: int, count: int) -> None:
        """Blocks of one class and epoch were hit, behind those of the same prompt that were hit before."""
        self.ages.hit(kind, epoch, count)
        # Blocks that follow one which another order had evicted would have been of no use to it.
        middle = epoch + 0.5
        if self.beyond or middle < self.reach:
            self.beyond = True
            self.guard.won += count
        elif not kind and middle < self.single_since:
            self.guard.promised -= count
        if kind > ages.REUSED or not self.shelves.window_groups:
            return
        self.near.hit(middle, count)
        self.output.hit(middle, count)

    def resumed(self, blocks: int, kept: int, grade: int) -> None:
        """A prompt resumed behind so many blocks in a window of this grade; `kept` of the window are an output's."""
        if grade == NEAR:
            self.near.earn(blocks)
        elif grade == OUTPUT_END:
            self.output.earn(kept)
        self.near.useless = self.output.useless = 0

    def retired(self, block_ids: Sequence[int]) -> None:
        grade_of = self.shelves.grade_of
        for block_id in block_ids:
            self.use[block_id] = LEFT
            if grade_of[block_id] != WINDOW:
                grade_of[block_id] = FAR

    def needed(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.use[block_id] = NEEDED if self.use[block_id] in (LEFT, NEEDED) else HIT

    def expected(self, block_ids: Sequence[int]) -> None:
        """What an output adds is a matter of its account all the same."""
        grade_of = self.shelves.grade_of
        for block_id in block_ids:
            self.use[block_id] = ONCE if grade_of[block_id] in (OUTPUT, OUTPUT_END) else HIT

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool, anyway: bool) -> None:
        marks = list(map(mark, keys))
        mark_of, use = self.mark_of, self.use
        self.guard.asked += len(marks)
        for block_id, number, key in zip(block_ids, marks, keys, strict=True):
            mark_of[block_id] = number
            if resident and not anyway:
                use[block_id] = HIT
                if self.output.useless:
                    self._behind_an_output(key)
            elif resident and key[-4:] not in self.shelves.window_groups:
                use[block_id] = HIT
        if resident:
            return
        self.output.useless = 0
        for block_id, key, known in zip(block_ids, keys, self.remembered.take_each(marks), strict=True):
            if known is not None:
                self._came_back(block_id, key, anyway, *known)
            elif not anyway and key[-4:] not in self.shelves.window_groups:
                self.guard.new_or_hit()

    def _came_back(self, block_id: int, key: bytes, anyway: bool, kind: int, epoch: int) -> None:
        """A block was stored again after it had been evicted. What is computed anyway, no window would have saved."""
        if kind != A_WINDOW_LEFT:
            self.ages.hit(kind, epoch)
        epoch = self.ages.epoch - ((self.ages.epoch - epoch) & 0xFFFF)
        if kind == A_WINDOW_LEFT:
            if not anyway and epoch + 0.5 >= self.reach:
                self.left.missed()
            return
        if kind > 1:
            if anyway or kind == ages.OUTPUT:
                return
            self.near.missed(epoch)
            # Ordinary blocks alone would have been of no use.
            self.near.cost = self.output.cost = 0
            return
        self.use[block_id] = AGAIN
        self.ghost_hits += 1
        kept_by_age = epoch + 0.5 >= self.reach
        self.guard.lost_or_not(kept_by_age)
        if not kept_by_age:
            if kind and epoch >= self.reused_since:
                self.guard.promised += 1
            if not anyway:
                self.near.came_back(epoch)
                self.output.came_back(epoch)
        if key[-4:] in self.shelves.window_groups and not anyway:
            # Without the extra windows this prompt could have resumed.
            self.near.charge()
            self.output.charge()

    def _behind_an_output(self, key: bytes) -> None:
        """A block was computed again; where an output's window ended that is gone, it need not have been."""
        known = self.remembered.take(mark_of_output(key))
        if known is None:
            return
        kind, epoch = known
        self.ages.hit(kind, epoch)
        self.output.missed(self.ages.epoch - ((self.ages.epoch - epoch) & 0xFFFF))

    def replaced(self, block_id: int, anyway: bool) -> None:
        freed = self.freed_at[block_id]
        if freed:
            epoch = freed / self.an_epoch
            self.ages.hit(freed & 3, int(epoch))
            self.freed_at[block_id] = 0
            if epoch >= self.reach:
                self.guard.computed_again(anyway)
            if not anyway:
                self.near.computed_again(epoch)
                self.output.computed_again(epoch)
        self.use[block_id] = ONCE

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        freed_at, use, mark_of, an_epoch = self.freed_at, self.use, self.mark_of, self.an_epoch
        grade_of = self.shelves.grade_of
        marks, kinds, epochs = [], [], []
        for block_id, key in zip(block_ids, keys, strict=True):
            freed = freed_at[block_id]
            if freed:
                kind = freed & 3
                # Windows of outputs are stored but once: their ends are looked for by the prompt's ordinary blocks.
                marks.append(mark_of_output(key) if grade_of[block_id] == OUTPUT_END else mark_of[block_id])
                kinds.append(kind)
                epochs.append(freed // an_epoch)
                freed_at[block_id] = 0
                if use[block_id] == LEFT_FREE:
                    self.left.ended()
            elif use[block_id] == LEFT_FREE:
                marks.append(mark_of[block_id])
                kinds.append(A_WINDOW_LEFT)
                epochs.append(self.freed // an_epoch)
                self.output.give_back(self.freed // an_epoch)
            use[block_id] = ONCE
        self.remembered.add_all(marks, kinds, epochs)

    def counters(self) -> dict[str, int]:
        return {
            "ghost_hits": self.ghost_hits,
            "turns_to_age_and_back": self.guard.turns,
            "turns_of_near_windows": self.near.turns,
            "turns_of_output_windows": self.output.turns,
            "turns_of_left_windows": self.left.turns,
        }
