"""Jumps: while no request can arrive or finish, k steady decode steps are scheduled as one. Simulator's process only.

vLLM takes the k - 1 tokens in advance as speculative ones that are all accepted. Exact, because between two events the
scheduler would repeat itself: it hands out the same number of blocks (one full-attention group), or none at all (a
jump ends before any other group takes or gives back a block), and looks no prompt up in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.sched.interface import PauseState

from kvtune.core.vllm_types import has_window
from kvtune.sim.clock import VirtualClock
from kvtune.sim.front_end import FrontEnd
from kvtune.sim.steps import EngineStepper, StepResult
from kvtune.sim.vllm_types import EngineCore, EngineRequest, EngineScheduler

LONGEST = 4096
"""Steps of one jump."""

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


class JumpStepper:
    """Makes one step of the engine, and turns it into a jump where it can.

    `blocked`: the first waiting request does not fit, and no other will be tried before a running one ends.
    `after_strides`: a stride was tried before; then only what strides cannot take is left to jumps.
    """

    def __init__(
        self, engine: EngineCore, front: FrontEnd, clock: VirtualClock, *, after_strides: bool
    ) -> None:
        assert engine.batch_queue is None, "blocked.py does this for asynchronous scheduling"
        self._scheduler, self._front, self._clock = engine.scheduler, front, clock
        self._executor = engine.model_executor
        self._engine_step = EngineStepper(engine)
        self._cost = self._executor.machine.cost
        self._events = _event_residues(self._scheduler)
        self._limits = (
            self._scheduler.max_num_scheduled_tokens,
            self._scheduler.scheduler_config.max_num_batched_tokens,
        )
        self._after_strides = after_strides
        self._update = self._scheduler._update_request_with_output
        self.blocked = False

    def try_step(self) -> StepResult | None:
        scheduler = self._scheduler
        if self._after_strides and not scheduler.waiting:
            self.blocked = False
            return None
        before = (len(scheduler.running), len(scheduler.waiting))
        decoding = self._all_decode() and self._tier_is_quiet()
        steps = self._steps() if decoding else 1
        ends = self._ends(steps) if steps > 1 else []
        result = self._jump(ends) if len(ends) > 1 else self._engine_step.try_step()
        after = (len(scheduler.running), len(scheduler.waiting))
        # A step that only decodes has tokens left for a waiting request; none was admitted for lack of blocks.
        self.note_blocked(decoding and before[1] > 0 and after == before)
        return result

    def note_blocked(self, blocked: bool) -> None:
        """`blocked`: the last step only decoded and admitted no waiting request."""
        self.blocked = blocked

    def _jump(self, ends: list[float]) -> StepResult:
        scheduler, executor = self._scheduler, self._executor
        extra = [0] * (len(ends) - 1)
        for request in scheduler.running:
            request.spec_token_ids = extra
        # No request ends inside a jump: vLLM need not look at each of its tokens.
        scheduler._update_request_with_output = _append_all
        executor.jump_ends_s = ends
        # Pause new requests: a jump looks none of them up, and the kvtune core's steady path stands aside.
        scheduler._pause_state = PauseState.PAUSED_NEW
        self._limit(max(len(ends) * len(scheduler.running), limit) for limit in self._limits)
        result = self._engine_step.try_step()
        scheduler._update_request_with_output = self._update
        scheduler._pause_state = PauseState.UNPAUSED
        executor.jump_ends_s = None
        self._limit(self._limits)
        self._clock.now_s = self._clock.device_free_s = ends[-1]
        manager = scheduler.kv_cache_manager
        if (
            manager.enable_caching
        ):  # single steps would have cached what they filled; the next step may preempt
            for request in scheduler.running:
                manager.cache_blocks(request, request.num_computed_tokens)
        return StepResult(result.outputs, result.executed, ends)

    def _limit(self, limits: Iterable[int]) -> None:
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens = limits

    def _all_decode(self) -> bool:
        running = self._scheduler.running
        return bool(
            running
            and self._events is not None
            and len(running) < min(self._limits)
            and all(r.num_tokens - r.num_computed_tokens == 1 and not r.spec_token_ids for r in running)
        )

    def _tier_is_quiet(self) -> bool:
        """Each step may have copies started or see them end."""
        tier, scheduler = self._executor.tier, self._scheduler
        return tier is None or (not scheduler.kv_holding_waiting and tier.quiet(scheduler.connector))

    def _steps(self) -> int:
        """How many steps from here are alike, as far as requests and blocks are concerned."""
        scheduler = self._scheduler
        running = scheduler.running
        if (scheduler.waiting or scheduler.kv_holding_waiting) and not self.blocked:
            return 1
        left = min(request.max_tokens - request.num_output_tokens - 1 for request in running)
        return self._until_blocks(running, min(left, LONGEST)) if left >= 2 else 1

    def _until_blocks(self, running: Sequence[EngineRequest], steps: int) -> int:
        events = self._events
        assert events is not None
        manager = self._scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks()
        if events:
            if free < len(running) * len(manager.coordinator.single_type_managers):
                return 1
            for request in running:
                computed = request.num_computed_tokens
                for period, residue in events:
                    steps = min(steps, (residue - computed - 1) % period + 1)
            return steps
        block = manager.coordinator.single_type_managers[0].block_size
        while steps >= 2:
            needed = sum(
                -(-(r.num_computed_tokens + steps) // block) - -(-r.num_computed_tokens // block)
                for r in running
            )
            if needed <= free:
                return steps
            steps //= 2
        return 1

    def _ends(self, steps: int) -> list[float]:
        """The ends of the single steps, added up as the exact mode does; stops where a request arrives."""
        due = self._front.next_time()
        running = self._scheduler.running
        context = sum(r.num_computed_tokens for r in running)
        decodes = len(running)
        ends: list[float] = []
        at = max(self._clock.now_s, self._clock.device_free_s)
        seconds = self._cost.seconds
        for _ in range(steps):
            if due is not None and due <= at:
                break
            at += seconds(0, decodes, context)
            context += decodes
            ends.append(at)
        return ends


def _append_all(
    request: EngineRequest, new_token_ids: list[int], is_stale: bool = False
) -> tuple[list[int], bool]:
    request.append_output_token_ids(new_token_ids)
    return new_token_ids, False


def _event_residues(scheduler: EngineScheduler) -> list[tuple[int, int]] | None:
    """(period, residue) of computed tokens at which a group takes or gives back blocks; a jump may only start there.

    Empty for one full-attention group, where only the number of blocks counts; None where no jump is exact.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    kinds = [type(m.kv_cache_spec).__name__ for m in managers]
    if len(managers) == 1 and kinds[0] in FULL_ATTENTION:
        return []
    residues = set()
    for manager, kind in zip(managers, kinds, strict=True):
        block = manager.block_size
        if kind in FULL_ATTENTION:
            residues.add((block, 0))
        elif kind == "SlidingWindowSpec" and has_window(manager):
            residues |= {(block, 0), (block, (manager.sliding_window - 1) % block)}
        elif kind == "MambaSpec":
            residues |= {(block, 0), (block, 1 % block), (block, block - 1)}
        else:
            return None
    return sorted(residues)
