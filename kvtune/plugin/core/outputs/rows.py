"""Which requests the front end serves by column, and what their callers take.

A row's state is vLLM's own RequestState, which is updated in each step. `ColumnCollector` makes an output only when a
caller takes it, from all tokens since the last output. Callers get the same outputs as from stock's collector, which
makes an output in each step and merges those that a slow caller has not taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

_NEW_OUTPUT, _NEW_COMPLETION = RequestOutput.__new__, CompletionOutput.__new__


class Kind(Enum):
    """What a caller gets in each step. END: nothing before the last; TAKE: the new tokens; MADE: vLLM's own output."""

    END = 1
    TAKE = 2
    MADE = 3


class ColumnCollector(RequestOutputCollector):  # type: ignore[misc]
    """A collector that makes an output when the caller takes it. At most one caller waits, as in AsyncLLM.

    An error here reaches the request's caller, as an error in vLLM's own collector does; all other requests go on.
    The request's state refers to the collector, not vice versa, so both are freed when vLLM drops the request.
    """

    detokenizer: IncrementalDetokenizer
    token_ids: list[int]
    """The request's tokens so far; the detokenizer's own list."""
    taken: int
    """How many of `token_ids` are in outputs already."""
    output: RequestOutput | PoolingRequestOutput | Exception | None
    waiter: asyncio.Future[None] | None
    whole: dict[str, object] | None
    """Fields of every RequestOutput except the last; None until the prompt is computed."""
    part: dict[str, object]
    """Fields of that RequestOutput's only CompletionOutput."""

    def adopt(self, detokenizer: IncrementalDetokenizer) -> None:
        self.detokenizer = detokenizer
        self.token_ids = detokenizer.token_ids
        self.taken = len(self.token_ids)
        self.waiter = self.whole = None

    def learn(self, state: RequestState) -> None:
        """Keep the fields that all outputs except the last share, as RequestState.make_request_output sets them."""
        completion = CompletionOutput(state.request_index, "", (), None, None)
        self.whole = vars(state._new_request_output(state.external_req_id, [completion], False))
        self.part = vars(completion)

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Store an output that vLLM made: all text not taken yet, but only the last tokens. Add the earlier tokens."""
        try:
            self._put_earlier(output)
        except Exception as error:
            output = error  # rather than an answer without some of its tokens
        super().put(output)
        self.wake()

    def _put_earlier(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        token_ids = self.token_ids
        if isinstance(output, RequestOutput):
            before = len(token_ids) - sum(len(part.token_ids) for part in output.outputs)
            if before > self.taken:
                waiting = self._make(token_ids[self.taken : before], "")
                if self.output is None:
                    self.output = waiting
                elif isinstance(self.output, RequestOutput):
                    self.output.add(waiting, aggregate=True)
        self.taken = len(token_ids)

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        while True:
            if self.output is not None or self.taken < len(self.token_ids):
                output = self.get_nowait()
                assert output is not None
                return output
            self.waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self.waiter = None

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        taken, token_ids = self.taken, self.token_ids
        if self.output is None:
            return self._take() if taken < len(token_ids) else None
        if taken < len(token_ids) and isinstance(self.output, RequestOutput):
            self.output.add(self._take(), aggregate=True)
        output: RequestOutput | PoolingRequestOutput | None = super().get_nowait()
        return output

    def _take(self) -> RequestOutput:
        token_ids = self.token_ids[self.taken :]
        self.taken += len(token_ids)
        return self._make(token_ids, self.detokenizer.get_next_output_text(False, True))

    def _make(self, token_ids: list[int], text: str) -> RequestOutput:
        assert self.whole is not None
        completion = _NEW_COMPLETION(CompletionOutput)
        fields = completion.__dict__
        fields.update(self.part)
        fields["token_ids"] = token_ids
        fields["text"] = text
        output: RequestOutput = _NEW_OUTPUT(RequestOutput)
        fields = output.__dict__
        fields.update(self.whole)
        fields["outputs"] = [completion]
        return output


class Row:
    """One request that is served by column."""

    __slots__ = ("append", "collector", "decode", "detokenizer", "kind", "leave", "slot", "state", "stats")

    def __init__(self, state: RequestState, kind: Kind) -> None:
        self.state = state
        self.kind = kind
        self.stats = state.stats
        self.detokenizer = state.detokenizer
        self.append: Callable[[int], None] = state.detokenizer.token_ids.append
        self.decode: Callable[[int], str] | None = getattr(state.detokenizer, "decode_next", None)
        self.collector: ColumnCollector | None = None
        self.slot = -1
        self.leave: Callable[[Row], None] | None = None
        """Function that gives the slot back; None while the request has no slot."""
        if kind is Kind.TAKE:
            ColumnCollector.adopt(state.queue, state.detokenizer)
            state.queue.__class__ = ColumnCollector
            self.collector = state.queue

    def hand_out(self) -> bool:
        """Queue the output that vLLM makes in this step, for kind MADE. Return whether vLLM makes one."""
        state, made = self.state, len(self.detokenizer.token_ids)
        sent, interval = state.sent_tokens_offset, state.stream_interval
        if interval > 1 and sent and made - sent < interval:
            return False
        output = state.make_request_output([self.detokenizer.token_ids[-1]], None, None, None)
        if output is not None:
            state.queue.put(output)
        return output is not None


def row_of(state: RequestState) -> Row | None:
    """Return a new request's row, or None if vLLM's code serves the request."""
    kind = _kind(state)
    return None if kind is None else Row(state, kind)


def _kind(state: RequestState) -> Kind | None:
    """Return what the caller gets, or None for a request with options whose outputs only vLLM's code makes."""
    detokenizer, logprobs = state.detokenizer, state.logprobs_processor
    of_vllm = type(state) is RequestState and type(state.queue) is RequestOutputCollector
    decodes = type(detokenizer) in (IncrementalDetokenizer, FastIncrementalDetokenizer)
    if not of_vllm or not decodes or logprobs is None:
        return None
    asked = (logprobs.num_logprobs, logprobs.num_prompt_logprobs, state.parent_req, state.lora_request)
    fed = (state.prompt_embeds, state.input_chunk_queue)
    if any(option is not None for option in (*asked, *fed)):
        return None
    if state.streaming_input or getattr(detokenizer, "stop", None):
        return None
    if state.output_kind == RequestOutputKind.FINAL_ONLY:
        return Kind.END
    if state.output_kind == RequestOutputKind.DELTA and state.stream_interval == 1:
        return Kind.TAKE
    return Kind.MADE


def is_ready(state: RequestState, weight_version: str | None) -> bool:
    """Whether a step only adds tokens. If not (a first token, changed weights), vLLM's code processes the output."""
    if state.is_prefilling:
        return False
    starts = state.weight_version_starts
    return weight_version is None or bool(starts and starts[-1][0] == weight_version)
