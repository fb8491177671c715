"""The pool's free blocks in several queues; a policy chooses the queue to evict from. Runs in EngineCore.

    block is                          it is in
    in use (ref_cnt > 0)              no queue: its byte in `queue_of` is 0
    free, without a hash ("blank")    queue 1, given out first, newest first (as stock)
    free, with a hash                 queue 1 + the policy's number, given out from its head

Contract: every free block is in exactly one queue; every operation is O(1) per block; the free count is the sum of all
queues; only `popleft_n` (in get_new_blocks) gives blocks out, so admission checks see no difference to stock.
A policy or a queue that raises does so in a method of PolicyPool, which hands the blocks back to vLLM's one queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.policies.in_order import InOrder
from kvtune.plugin.core.policies.make import make

BLANK = 1


class Queues:
    """Several queues with the methods of vLLM's FreeKVCacheBlockQueue, which this replaces.

    Queue numbers here: 0 is "not free", 1 is blank, 2 is the policy's queue 1, and so on.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], policy_name: str, settings: CoreSettings) -> None:
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.queue_of = bytearray(len(blocks))
        self.grade_of = bytearray(len(blocks))
        self.num_free_blocks = 0
        self.use(make(policy_name, self, settings))
        self.names = ("blank", *self.policy.queues)
        self.queues = [FreeKVCacheBlockQueue([]) for _ in range(len(self.policy.queues) + 2)]
        self.taken = [0] * len(self.queues)  # blocks given out, by queue
        self.handed: list[KVCacheBlock] = []
        """The blocks that `popleft_n` gave out last."""

    def use(self, policy: InOrder) -> None:
        """Use this policy from now on. Hooks that it does not override are never called, which saves host time."""
        kind = type(policy)
        self.policy = policy
        self.tells_stored = kind.stored is not InOrder.stored
        self.tells_evicted = kind.evicted is not InOrder.evicted
        self.tells_hit = kind.hit is not InOrder.hit
        self.tells_left = kind.left is not InOrder.left

    # The policy's view of the pool (`PoolView`).

    def size(self, queue: int) -> int:
        return int(self.queues[queue + 1].num_free_blocks)

    def head(self, queue: int) -> int:
        linked = self.queues[queue + 1]
        if not linked.num_free_blocks:
            return -1
        block = linked.fake_free_list_head.next_free_block
        assert block is not None
        return int(block.block_id)

    def before(self, queue: int, times: Sequence[float], time: float, most: int) -> int:
        block = self.queues[queue + 1].fake_free_list_head.next_free_block
        most = min(most, self.queues[queue + 1].num_free_blocks)
        for count in range(most):
            if times[block.block_id] >= time:
                return count
            block = block.next_free_block
        return most

    # Called by vLLM's BlockPool.

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        taken: list[KVCacheBlock] = []
        queue_of = self.queue_of
        while len(taken) < n:
            number, count = self._choose(n - len(taken))
            blocks = self.queues[number].popleft_n(count)
            self.taken[number] += len(blocks)
            for block in blocks:
                if queue_of[block.block_id] != number:
                    raise RuntimeError(f"block {block.block_id} is linked in the wrong queue")
                queue_of[block.block_id] = 0
            self.num_free_blocks -= len(blocks)
            taken += blocks
        self.handed = taken
        return taken

    def _choose(self, wanted: int) -> tuple[int, int]:
        blank = self.queues[BLANK].num_free_blocks
        if blank:
            return BLANK, min(blank, wanted)
        number, count = self.policy.choose(wanted)
        if not 0 < count <= min(wanted, self.size(number)):
            raise ValueError(
                f"policy {self.policy.name} chose {count} of {self.size(number)} blocks in queue {number}"
            )
        return number + 1, count

    def remove(self, block: KVCacheBlock) -> None:
        block_id = block.block_id
        queue_of = self.queue_of
        if not queue_of[block_id]:
            raise RuntimeError(f"block {block_id} is free but in no queue")
        self.queues[queue_of[block_id]].remove(block)
        queue_of[block_id] = 0
        self.num_free_blocks -= 1

    def use_again(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Do as vLLM's `touch`: remove free blocks from their queues, and add 1 to each block's reference count."""
        queue_of, queues = self.queue_of, self.queues
        last, count = 0, 0
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                before, after, number = block.prev_free_block, block.next_free_block, queue_of[block.block_id]
                if number != last:
                    queues[last].num_free_blocks -= count
                    self.num_free_blocks -= count
                    last, count = number, 0
                if before is None or after is None or not number:
                    raise RuntimeError(f"block {block.block_id} is free but in no queue")
                before.next_free_block = after
                after.prev_free_block = before
                block.prev_free_block = block.next_free_block = None
                queue_of[block.block_id] = 0
                count += 1
            block.ref_cnt += 1
        queues[last].num_free_blocks -= count
        self.num_free_blocks -= count

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blank blocks that became free at the head of their queue."""
        if blocks:
            self.queues[BLANK].prepend_n(blocks)
            self._mark(blocks, BLANK)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put hashed blocks that became free at the tails of the queues that the policy chooses."""
        if not blocks:
            return
        numbers = self._placed(blocks)
        if numbers.count(numbers[0]) == len(numbers):
            self.queues[numbers[0] + 1].append_n(blocks)
            self._mark(blocks, numbers[0] + 1)
            return
        start = 0
        for end in range(1, len(blocks) + 1):
            if end == len(blocks) or numbers[end] != numbers[start]:
                run = blocks[start:end]
                self.queues[numbers[start] + 1].append_n(run)
                self._mark(run, numbers[start] + 1)
                start = end

    def _placed(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Ask the policy for each block's queue; the policy counts its queues from 1."""
        numbers = self.policy.place([block.block_id for block in blocks])
        unique = set(numbers)
        if len(numbers) != len(blocks) or not 0 < min(unique) <= max(unique) < len(self.queues) - 1:
            raise ValueError(f"policy {self.policy.name} placed a block in a queue that it does not have")
        return numbers

    def blank_all(self) -> None:
        """Move all free blocks to the blank queue, in eviction order. Called when no block has a hash any more."""
        for queue in self.queues[BLANK + 1 :]:
            blocks = queue.popleft_n(queue.num_free_blocks)
            self.queues[BLANK].append_n(blocks)
            for block in blocks:
                self.queue_of[block.block_id] = BLANK

    @property
    def fake_free_list_head(self) -> KVCacheBlock:
        """The head sentinel of the first queue that is not empty. A walk from it sees only that queue."""
        return self._first().fake_free_list_head

    @property
    def fake_free_list_tail(self) -> KVCacheBlock:
        """The tail sentinel of the first queue that is not empty."""
        return self._first().fake_free_list_tail

    def _first(self) -> FreeKVCacheBlockQueue:
        return next((q for q in self.queues[BLANK:] if q.num_free_blocks), self.queues[BLANK])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return every free block, queue by queue."""
        return [block for queue in self.queues[BLANK:] for block in queue.get_all_free_blocks()]

    def _mark(self, blocks: list[KVCacheBlock], number: int) -> None:
        queue_of = self.queue_of
        for block in blocks:
            queue_of[block.block_id] = number
        self.num_free_blocks += len(blocks)

    def in_order(self) -> list[KVCacheBlock]:
        """Return the free blocks in the order in which they would be given out, as far as the links lead."""
        blocks: dict[int, KVCacheBlock] = {}
        for queue in self.queues[BLANK:]:
            block = queue.fake_free_list_head.next_free_block
            while block is not None and block.block_id >= 0 and block.block_id not in blocks:
                blocks[block.block_id] = block
                block = block.next_free_block
        return list(blocks.values())

    def counters(self) -> dict[str, int]:
        """Return counters for the run file: blocks given out per queue."""
        return {f"given_out_{name}": n for name, n in zip(self.names, self.taken[BLANK:], strict=True)}
