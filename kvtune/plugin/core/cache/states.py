"""Which recurrent states are kept for later prompts, and where prompts stop for them. Runs in EngineCore.

A prompt resumes only where the state of all tokens before was kept, and kernels leave a state only at the end of a
step's chunk. Stock ends a chunk at the last block boundary of a prompt and, once a second prompt shares a prefix, at
the end of that prefix. With `core.keep_states` prompts also end chunks

    |--prompt--------------------------------------------------|--output--|
           [spec]          [spec]      [spec]     [far]    [stock]   [output]
    at the last multiples of 4*slack, 2*slack, slack, and `slack` before stock's

so that the second prompt with a shared prefix can resume there (in stock: the third). No request begins in the room
that they leave before a state of stock's that it shares. Each is one more step of the prompt, and one block more of
each group of states, which is evicted before any block that stock keeps. With `core.output_states` the latest state of
an answer is kept, too: decoding made it, and kernels may round it otherwise than a prompt's (vLLM keeps the same states
with an interval of one block). Nothing is copied: a chunk's end leaves the state in its own block, and vLLM's worker
starts the next chunk in another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker, breaker_of
from kvtune.plugin.core.cache.windows import KeepingGroup
from kvtune.plugin.core.policies import FAR, OUTPUT, SPECULATIVE, WINDOW
from kvtune.plugin.vllm.plugin_state import STATE

PART = "cache.states"
SWITCH = "keep_states"


class Stops:
    """Where the prompts of one engine end chunks."""

    def __init__(self, settings: CoreSettings, block: int, backs_off: bool) -> None:
        self.settings = settings
        self.block = block
        self.backs_off = backs_off
        """Whether drafts make stock keep the state one block earlier."""
        self.why = ""
        """Why no prompt stops here; found once the scheduler is built."""
        self.steps = 0
        """Chunks that were ended for a state."""

    def places(self, prompt_tokens: int) -> dict[int, int]:
        """Return the tokens at which this prompt keeps a state that stock would not, each with its grade."""
        if self.why:
            return {}
        block, last = self.block, self.last(prompt_tokens)
        slack = max(1, -(-self.settings.slack // block))
        if last <= slack:
            return {}
        places = {(last - slack) * block: FAR}
        step = slack
        for _ in range(self.settings.windows):
            place = (last - slack) // step * step
            if place <= 0:
                break
            places.setdefault(place * block, SPECULATIVE)
            step *= 2
        return places

    def last(self, prompt_tokens: int) -> int:
        """Return the blocks before the last state that stock keeps of a prompt."""
        return prompt_tokens // self.block - 1 if self.backs_off else (prompt_tokens - 1) // self.block

    def awaits(self, request: Request, start: int, running: Sequence[Request], unit: int) -> bool:
        """Return whether a running prompt has yet to compute a state that stock keeps and this request can hit.

        `start`: the tokens that it hits now; `unit`: the tokens of one hash.
        """
        if request.skip_reading_prefix_cache:
            return False
        for other in running:
            if other.num_computed_tokens >= other.num_prompt_tokens:
                continue
            for blocks in (self.last(other.num_prompt_tokens), other.shared_prefix_boundary // self.block):
                place = blocks * self.block
                if max(start, other.num_computed_tokens) < place < request.num_tokens:
                    number = place // unit - 1
                    if request.block_hashes[number] == other.block_hashes[number]:
                        return True
        return False

    def shortened(self, prompt_tokens: int, start: int, tokens: int) -> int:
        """Return how many of these tokens a step computes, so that it ends at the first place inside them."""
        big = tokens >= self.settings.min_drop * self.block
        inside = [
            place
            for place, grade in self.places(prompt_tokens).items()
            if start < place < start + tokens and (big or grade == FAR)
        ]
        if not inside:
            return tokens
        self.steps += 1
        return min(inside) - start


class KeepingStateManager(KeepingGroup, MambaManager):  # type: ignore[misc]
    """vLLM's MambaManager, which also keeps the states at its `stops` and at an output's last block boundary."""

    stock = MambaManager
    need = 1
    """Blocks that a hit takes."""

    def adopt_states(self, stops: Stops, breaker: Breaker) -> None:
        """Set the attributes of a manager that vLLM has built. Called once."""
        self.stops = stops
        self.breaker = breaker
        # While drafts are checked, a block's state is ahead of the tokens that were taken.
        self.keeps_output = stops.settings.output_states and not self.num_speculative_blocks
        self.resumed = set()
        self.outputs: dict[str, tuple[KVCacheBlock, bytes]] = {}
        """The block with the latest state of each request's output, and the block's hash."""

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.outputs.pop(request_id, None)
        return KeepingGroup.pop_blocks_for_free(self, request_id)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        cached = self.num_cached_block.get(request.request_id, 0)
        extras: Mapping[int, int] = {}
        """The tokens of states that stock would not keep, each with its grade."""
        if num_tokens // self.block_size > cached or request.request_id in self.resumed:
            extras = self.breaker.attempt(self._extras, request, num_tokens, replay_boundaries) or {}
        MambaManager.cache_blocks(
            self,
            request,
            num_tokens,
            retention_interval=retention_interval,
            replay_boundaries=[*replay_boundaries, *extras],
        )
        if extras and not self.breaker.tripped:
            self.breaker.attempt(self._grade_kept, request, cached, extras)

    def _extras(self, request: Request, num_tokens: int, replay_boundaries: Sequence[int]) -> dict[int, int]:
        """Return the tokens of states to keep that stock would not, with their grades; adjust the one just hit."""
        unit, boundaries = (
            self.cache_hit_alignment_tokens,
            (*replay_boundaries, request.shared_prefix_boundary),
        )
        stocks = {int(boundary // unit * unit) for boundary in boundaries}
        if request.request_id in self.resumed:
            self.resumed.discard(request.request_id)
            blocks = self.req_to_blocks[request.request_id]
            hit = self.num_cached_block.get(request.request_id, 0)
            if hit * self.block_size in stocks and self.block_pool.is_extra(blocks[hit - 1]):
                self.block_pool.grade([blocks[hit - 1]], [WINDOW])
        extras = self.stops.places(request.num_prompt_tokens)
        latest = num_tokens // self.block_size * self.block_size
        if latest > request.num_prompt_tokens and self.keeps_output and not self.stops.why:
            extras[latest] = OUTPUT
        return {tokens: grade for tokens, grade in extras.items() if tokens not in stocks}

    def _grade_kept(self, request: Request, cached: int, extras: Mapping[int, int]) -> None:
        """Grade the states that were kept since the first `cached` blocks; of an output only the latest stays."""
        blocks, pool = self.req_to_blocks[request.request_id], self.block_pool
        end = self.num_cached_block.get(request.request_id, 0)
        for tokens, grade in extras.items():
            number = tokens // self.block_size
            block = blocks[number - 1] if cached < number <= end else None
            if block is None or block.is_null or block.block_hash is None:
                continue
            pool.grade([block], [grade])
            if grade == OUTPUT:
                before = self.outputs.get(request.request_id)
                self.outputs[request.request_id] = block, block.block_hash
                if before is not None and before[0].block_hash == before[1] and before[0] is not block:
                    pool.blank(before[0])


def supports(manager: MambaManager, block: int, retention: int | None) -> str:
    """Return why the states of this group stay as vLLM keeps them; empty if the group can keep more."""
    if type(manager) is not MambaManager:
        return f"{type(manager).__name__} is not a plain group of recurrent states"
    if manager.mamba_cache_mode != "align":
        return f"--mamba-cache-mode is {manager.mamba_cache_mode}"
    if retention != 0:
        return "vLLM keeps states at an interval (--prefix-cache-retention-interval)"
    if manager.block_size != block:
        return "states with blocks of several sizes"
    if manager.cache_hit_alignment_tokens != block:
        return "hits do not end at the ends of blocks"
    return ""


def kept(manager: KVCacheManager, settings: CoreSettings) -> list[MambaManager]:
    """Return the groups whose states are kept, if that is asked for; none, and a note why, if any group's cannot be."""
    if not settings.keep_states:
        return []
    groups = manager.coordinator.single_type_managers
    states = [group for group in groups if isinstance(group, MambaManager)]
    retention = manager.coordinator.retention_interval
    reasons = [supports(group, states[0].block_size, retention) for group in states]
    if not states:
        reasons = ["the model has no recurrent states"]
    if settings.policy == "pin":
        reasons = ["policy pin keeps windows only"]
    why = next(filter(None, reasons), "")
    if why:
        left(settings, why)
        return []
    state.part(SWITCH, True)
    return states


def left(settings: CoreSettings, why: str) -> None:
    """Record why states stay as vLLM keeps them, if more were asked for."""
    if settings.keep_states:
        state.part(SWITCH, False, why)


def adopt_groups(groups: Sequence[MambaManager], settings: CoreSettings, breaker: Breaker) -> None:
    """Give the groups of one manager the core's class, and one `Stops`."""
    stops = Stops(settings, groups[0].block_size, groups[0].drop_eagle_checkpoint_block)
    for group in groups:
        group.__class__ = KeepingStateManager
        breaker.on_trip(group.stand_down)
        group.adopt_states(stops, breaker)


def why_not(scheduler: Scheduler, block: int) -> str:
    """Return why prompts of this engine cannot stop for states; empty if they can."""
    if not scheduler.need_mamba_block_aligned_split:
        return "vLLM ends no chunk where a state is kept"
    if scheduler.connector is not None:
        return "a KV connector takes each state that is kept"
    if scheduler.cache_config.block_size != block:
        return "the scheduler's blocks are not those of the states"
    return ""


def adopt(scheduler: Scheduler) -> None:
    """Let the prompts of a scheduler that vLLM has built stop for states, if its manager keeps them."""
    manager = scheduler.kv_cache_manager
    groups: tuple[KeepingStateManager, ...] = getattr(manager, "states", ())
    if not groups:
        return
    stops = groups[0].stops
    stops.why = why_not(scheduler, stops.block)
    if stops.why:
        state.part(SWITCH, False, stops.why)
        return
    # An EngineCore on a CPU forgets a block that it was not given: see packed.py.
    scheduler.cache_config.user_specified_block_size = True
    breaker = breaker_of(manager)
    scheduler._mamba_block_aligned_split = wrap_split(scheduler, stops, breaker)
    breaker.on_trip(lambda: scheduler.__dict__.pop("_mamba_block_aligned_split", None))
    state.gauge(lambda: {"state_stops": stops.steps})


def wrap_split(scheduler: Scheduler, stops: Stops, breaker: Breaker) -> Callable[..., int]:
    """Return vLLM's rule for where a chunk ends, which also ends chunks at the stops.

    A chunk that ends at a stop leaves room in its step, in which stock would not start the next request: that one waits
    for the states that stock would have kept by then.
    """
    stock: Callable[..., int] = scheduler._mamba_block_aligned_split
    unit = scheduler.hash_block_size

    def split(request: Request, num_new_tokens: int, *computed: int, **named: int) -> int:
        tokens = stock(request, num_new_tokens, *computed, **named)
        if request.num_computed_tokens >= request.num_prompt_tokens:  # a decode
            return tokens
        start = request.num_computed_tokens + sum(computed) + sum(named.values())
        if breaker.tripped or start >= request.num_prompt_tokens:
            return tokens
        if computed:  # vLLM gives what a request hits only where it is to start
            waits = breaker.attempt(stops.awaits, request, start, scheduler.running, unit)
            if waits:
                return 0
        fewer = breaker.attempt(stops.shortened, request.num_prompt_tokens, start, tokens)
        return tokens if fewer is None else fewer

    return split


def install(settings: CoreSettings) -> None:
    """Let every scheduler built from now on stop for states, if the settings ask for it."""
    STATE.patches.undo(PART)
    if settings.keep_states:

        def built(scheduler: Scheduler) -> None:
            breaker_of(scheduler.kv_cache_manager).attempt(adopt, scheduler)

        STATE.patches.after(PART, Scheduler, "__init__", built)
