"""Bookkeeping of a steady decode: which requests decode in lockstep, and when each needs more than a token.

Runs in EngineCore. `Rows` is a set of requests in scheduling order. It is never changed, so a step in flight keeps
the rows that it was scheduled with. `Cohort` is the current rows and two counters: of schedule() calls and of
update_from_output() calls. A row advances by one token per call, so the count at which it next needs a block, a hash or
a stop is known in advance. vLLM's requests hold all state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from vllm.v1.request import RequestStatus

from kvtune.plugin.core.steps.empty import NoopLimits
from kvtune.plugin.vllm.types import Request

VLLM_HASHER = "get_request_block_hasher.<locals>.request_block_hasher"
"""The qualified name of vLLM's own block hasher."""
ALWAYS, NO_HASHER = -2, -1
"""Values of `hash_phase` for rows whose hasher is called after every token, or never."""
PREEMPTED = int(RequestStatus.PREEMPTED)  # the last status of a request that is not finished


class Rows:
    """Requests that decode together: one list or array per property, one entry per request.

    `stop_at` is the value of `Cohort.updated` at which a row reaches its last token, `hash_phase` its number of
    tokens modulo the hash block (or ALWAYS, NO_HASHER), `eos` its end token or -1.
    """

    def __init__(
        self,
        requests: list[Request],
        eos: NDArray[np.int64],
        stop_at: NDArray[np.int64],
        hash_phase: NDArray[np.int64],
        fresh: bool = True,
    ) -> None:
        self.requests = requests
        self.ids = [request.request_id for request in requests]
        self.outputs = [request._output_token_ids for request in requests]
        self.all_tokens = [request._all_token_ids for request in requests]
        self.one_each = dict.fromkeys(self.ids, 1)
        clients = [request.client_index for request in requests]
        self.client = clients[0] if clients else 0
        self.clients = clients if len(set(clients)) > 1 else None
        self.eos = eos
        self.stop_at = stop_at
        self.hash_phase = hash_phase
        self.hashed_by_block = bool(len(hash_phase)) and int(hash_phase.min()) >= 0
        # Whether some row's next output may carry more than a token, as first outputs do: prefill statistics, events.
        self.fresh = fresh

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, dropped: Sequence[int]) -> Rows:
        """Return the rows without those dropped, in the same order."""
        requests = self.requests.copy()
        for index in sorted(dropped, reverse=True):
            del requests[index]
        keep = _all_but(dropped, len(self.ids))
        eos, stop_at, phase = self.eos[keep], self.stop_at[keep], self.hash_phase[keep]
        return Rows(requests, eos, stop_at, phase, fresh=self.fresh)


class Cohort:
    """The current rows, and when each next needs more than a token.

    `due`: for each row, the value of `scheduled` at which it next needs more than a token. `ahead`: how many
    scheduled tokens of each row have no output yet (0 or 1).
    """

    __slots__ = ("ahead", "due", "hash_size", "rows", "running", "scheduled", "stop_table", "updated")

    def __init__(
        self, running: list[Request], due: NDArray[np.int64], rows: Rows, ahead: int, hash_size: int
    ) -> None:
        self.running = running.copy()
        self.rows = rows
        self.due = due
        self.ahead = ahead
        self.hash_size = hash_size
        self.scheduled = 0
        self.updated = 0
        self.stop_table = _stop_table(rows.requests)

    def drop(self, rows: Sequence[int]) -> None:
        """Stop scheduling these rows."""
        self.due = self.due[_all_but(rows, len(self.due))]
        self.rows = self.rows.without(rows)

    def sync(self, running: list[Request]) -> bool:
        """Drop requests that have finished. Return False if `running` has changed in any other way."""
        if running == self.running:
            return True
        if [r for r in self.running if not is_finished(r)] != running:
            return False
        self.running = running.copy()
        finished = [i for i, r in enumerate(self.rows.requests) if is_finished(r)]
        if finished:
            self.drop(finished)
        return True

    def may_stop(self, rows: Rows, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of rows that may stop with these tokens at the next update (a superset of those that do)."""
        marked: NDArray[np.bool_] = (rows.stop_at <= self.updated + 1) | (tokens == rows.eos)
        if self.stop_table is not None:
            marked |= self.stop_table[np.minimum(tokens, len(self.stop_table) - 1)]
        return marked

    def completing_blocks(self, rows: Rows) -> NDArray[np.int64]:
        """Return the rows that complete a block of tokens to hash at the next update."""
        phase = rows.hash_phase
        ends: NDArray[np.bool_] = (phase + self.updated + 1) % self.hash_size == 0
        if not rows.hashed_by_block:
            ends = (ends & (phase >= 0)) | (phase == ALWAYS)
        completing: NDArray[np.int64] = ends.nonzero()[0]
        return completing


def _all_but(dropped: Sequence[int], count: int) -> NDArray[np.bool_]:
    keep = np.ones(count, bool)
    keep[list(dropped)] = False
    return keep


def is_finished(request: Request) -> bool:
    """Return what vLLM's `Request.is_finished` would, without the cost of that call."""
    return bool(request.status > PREEMPTED)


def is_plain_decode(request: Request, ahead: int) -> bool:
    """Whether a running request decodes one token per step, with `ahead` outputs in flight, and needs nothing else."""
    sampling = request.sampling_params
    return not (
        request.num_output_placeholders != ahead
        or len(request._all_token_ids) + ahead - request.num_computed_tokens != 1
        or request.is_prefill_chunk
        or request.num_stale_output_tokens
        or request.spec_token_ids
        or sampling is None
        or sampling.num_logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.repetition_detection is not None
        or request.structured_output_request is not None
        or request.mm_features
        or request.resumable
        or request.lora_request is not None
        or request.prompt_embeds is not None
        or request.trace_headers is not None
        or request.kv_transfer_params is not None
        or request.ec_transfer_params is not None
    )


def carries_extras(request: Request) -> bool:
    """Whether a request's next output carries more than its token: statistics, events, a stop reason."""
    return bool(
        request.prefill_stats is not None
        or request.events
        or request.stop_reason is not None
        or request.num_nans_in_logits
    )


def next_event(request: Request, limits: NoopLimits, ahead: int, max_model_len: int) -> int:
    """Return the number of computed tokens at which a row next needs more than a token: a block, a hash, a stop."""
    last = max_model_len - 1
    if ahead:
        last = min(last, request.num_prompt_tokens + request.max_tokens - 2 + ahead)
    return min(limits.slots, limits.cached - 1 + ahead, limits.window + ahead, last)


def gather(
    running: list[Request],
    limits_of: Callable[[Request], NoopLimits],
    max_model_len: int,
    hash_size: int,
) -> Cohort | Request | None:
    """Return a cohort of all running requests, or the first request that is not a plain decode."""
    if not running:
        return None
    ahead = running[0].num_output_placeholders
    if ahead > 1:
        return running[0]
    count = len(running)
    due = np.empty(count, dtype=np.int64)
    eos = np.empty(count, dtype=np.int64)
    stop_at = np.empty(count, dtype=np.int64)
    phase = np.empty(count, dtype=np.int64)
    hashed = lru_cache(_hashed)  # most requests have one hasher
    for i, request in enumerate(running):
        if not is_plain_decode(request, ahead):
            return request
        sampling = request.sampling_params
        assert sampling is not None
        tokens = len(request._all_token_ids) + ahead
        event = next_event(request, limits_of(request), ahead, max_model_len)
        due[i] = max(1, event - request.num_computed_tokens + 1)
        eos[i] = -1 if sampling.eos_token_id is None else sampling.eos_token_id
        stop_at[i] = min(max_model_len, request.num_prompt_tokens + request.max_tokens) - tokens
        phase[i] = hashed(request._block_hasher, hash_size) or tokens % hash_size
    return Cohort(running, due, Rows(running.copy(), eos, stop_at, phase), ahead, hash_size)


def _hashed(hasher: Callable[..., object] | None, hash_size: int) -> int:
    """Return NO_HASHER, ALWAYS, or 0 for a hasher that only needs to be called when a block of tokens is full."""
    if hasher is None:
        return NO_HASHER
    # A hasher other than vLLM's is called after every token, as in stock, unless it names its block size.
    if getattr(hasher, "hash_block_size", None) == hash_size:
        return 0
    if getattr(hasher, "__qualname__", "") != VLLM_HASHER:
        return ALWAYS
    closure = dict(zip(hasher.__code__.co_freevars, hasher.__closure__ or (), strict=True))
    size = closure.get("hash_block_size")
    return 0 if size is not None and size.cell_contents == hash_size else ALWAYS


def _stop_table(requests: list[Request]) -> NDArray[np.bool_] | None:
    """Return, by token id, whether any request stops at that token. The last entry is for all larger ids."""
    stops: set[int] = set()
    for request in requests:
        sampling = request.sampling_params
        if sampling is not None and sampling.stop_token_ids:
            stops.update(sampling.stop_token_ids)
    if not stops:
        return None
    table = np.zeros(max(stops) + 2, dtype=np.bool_)
    table[list(stops)] = True
    return table
