"""The front end's side: puts a step's columns into the requests' states in a few loops, and wakes the callers.

Contract: after each step, states and statistics are as if OutputProcessor.process_outputs had processed the outputs one
by one. Requests that are not served by column get an ordinary output, which vLLM's code processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from kvtune.plugin.core import state
from kvtune.plugin.core.outputs.message import Columns, Slots, columns_of
from kvtune.plugin.core.outputs.rows import ColumnCollector, Kind, Row, is_ready, row_of

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, RequestStateStats

logger = logging.getLogger("vllm.kvtune")

AT_ONCE = 128
"""How many callers are woken at most per turn of the event loop, as in vLLM (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)."""


class States(dict[str, RequestState]):
    """Replaces OutputProcessor.request_states. Removing a request also removes its row, so that its state is freed."""

    def __init__(self, states: dict[str, RequestState], on_error: Callable[[Exception], None]) -> None:
        super().__init__(states)
        self.rows: dict[str, Row] = {}
        """The requests that are served by column, by their id."""
        self.on_error = on_error

    def collectors(self) -> list[ColumnCollector]:
        """Return the collectors of all requests that are served by column."""
        return [row.collector for row in self.rows.values() if row.collector is not None]

    def pop(self, name: str, *default: RequestState | None) -> RequestState | None:
        request = super().pop(name, *default)
        try:
            self._drop_row(name)
        except Exception as error:
            self.on_error(error)
        return request

    def _drop_row(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None and row.leave is not None:
            row.leave(row)


@dataclass(slots=True)
class Layout:
    """The requests of one message's slots, grouped by what is done with their tokens."""

    rows: list[Row] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """Whether the request of each slot of the message is in `rows`."""
    whole: bool = False
    """Whether every slot's request is in `rows`."""
    text: list[tuple[int, Row]] = field(default_factory=list)
    """Rows whose tokens are detokenized here, with their indices in `rows`."""
    takers: list[ColumnCollector] = field(default_factory=list)
    made: list[Row] = field(default_factory=list)
    stats: list[RequestStateStats] = field(default_factory=list)
    others: list[tuple[int, str]] = field(default_factory=list)
    """Requests that vLLM's code serves, with their indices in the message."""
    version: str | None = None
    lasts: bool = True
    """Whether this layout can be reused for the next message with the same slots."""


class EngineRows:
    """The requests of one EngineCore, by slot: the number that stands for a request in messages."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[Row | None] = []
        self._slots: Slots = np.empty(0, np.int32)
        self._layout: Layout | None = None

    def name(self, slot: int, name: str, row: Row | None) -> None:
        """Record that EngineCore gave this slot to a request. `row`: None if vLLM's code serves it."""
        missing = slot + 1 - len(self.names)
        self.names += [""] * missing
        self.rows += [None] * missing
        before = self.rows[slot]
        if before is not None:
            before.leave = None
        self.names[slot], self.rows[slot] = name, row
        if row is not None:
            row.leave, row.slot = self.leave, slot
        self._layout = None

    def leave(self, row: Row) -> None:
        self.rows[row.slot] = row.leave = None
        self._layout = None

    def learn(self, columns: Columns, rows: dict[str, Row]) -> None:
        """Take in what a message says about its slots. `rows`: the requests that are served by column."""
        for slot, name in columns.named:
            self.name(slot, name, rows.get(name))
        if columns.slots is not None:
            self._slots, self._layout = columns.slots, None

    def outputs(
        self, columns: Columns, states: dict[str, RequestState]
    ) -> list[tuple[int, EngineCoreOutput]]:
        """Return an output of each request of the message that columns stand for, with its index."""
        chunks = _chunks(columns)
        names = [self.names[slot] for slot in self._slots.tolist()]
        return [
            (number, EngineCoreOutput(name, chunks[number]))
            for number, name in enumerate(names)
            if name in states
        ]

    def layout(self, version: str | None, states: dict[str, RequestState]) -> Layout:
        layout = self._layout
        if layout is None or layout.version != version or not layout.lasts:
            self._layout = layout = self._lay_out(version, states)
        return layout

    def _lay_out(self, version: str | None, states: dict[str, RequestState]) -> Layout:
        layout = Layout(version=version)
        for number, slot in enumerate(self._slots.tolist()):
            row = self.rows[slot]
            if row is not None and is_ready(row.state, version):
                layout.mask.append(True)
                self._add(layout, row)
                continue
            layout.mask.append(False)
            name = self.names[slot]
            if name in states:
                layout.others.append((number, name))
                layout.lasts = layout.lasts and row is None
        layout.whole = all(layout.mask)
        return layout

    @staticmethod
    def _add(layout: Layout, row: Row) -> None:
        if row.decode is not None:
            layout.text.append((len(layout.rows), row))
        layout.rows.append(row)
        if row.stats is not None:
            layout.stats.append(row.stats)
        if row.collector is not None:
            if row.collector.whole is None:
                row.collector.learn(row.state)
            layout.takers.append(row.collector)
        elif row.kind is Kind.MADE:
            layout.made.append(row)


class ColumnReader:
    """Reads the columns that one OutputProcessor receives."""

    def __init__(self, processor: OutputProcessor) -> None:
        processor.request_states = self._states = States(processor.request_states, self.retire)
        self._engines: dict[int, EngineRows] = {}
        self._to_wake: list[ColumnCollector] = []
        self._yields = False
        self._retired = False

    def retire(self, error: Exception) -> None:
        """Serve no request by column from now on: columns become one output a request, which vLLM's code processes.

        Collectors that a caller holds stay until their requests end; `ColumnCollector.put` takes vLLM's outputs.
        """
        if self._retired:
            return
        self._retired = True
        state.part("front_end", False)
        state.note(f"front_end: outputs are vLLM's own from here on: {type(error).__name__}: {error}")
        logger.error("kvtune: outputs are vLLM's own from here on", exc_info=error)
        with suppress(Exception):
            for collector in self._states.collectors():
                collector.wake()

    def add(self, request_id: str) -> None:
        """Make a row for a request that vLLM has just added, if it can be served by column."""
        try:
            request = None if self._retired else self._states.get(request_id)
            row = None if request is None or request_id in self._states.rows else row_of(request)
            if row is not None:
                self._states.rows[request_id] = row
        except Exception as error:
            self.retire(error)

    def process(
        self,
        outputs: list[EngineCoreOutput],
        timestamp: float | None,
        iteration: IterationStats | None,
        version: str | None,
    ) -> list[EngineCoreOutput]:
        """Put a step's columns (its last output) into the requests' states. Return the outputs for vLLM to process.

        These keep the step's order, because a caller with n > 1 answers gets them in that order.
        """
        columns = columns_of(outputs[-1])
        engine = self._engines.setdefault(columns.engine, EngineRows())
        engine.learn(columns, self._states.rows)
        planned = None
        if not self._retired:
            try:
                planned = _plan(columns, engine.layout(version, self._states))
            except Exception as error:
                self.retire(error)
        if planned is None:
            return _placed(columns, outputs, engine.outputs(columns, self._states))
        planned.put()
        try:
            planned.count(timestamp, iteration)
            self._wake(planned.layout.takers, sum(row.hand_out() for row in planned.layout.made))
        except Exception as error:
            self.retire(error)
        return _placed(columns, outputs, planned.others) if planned.others else outputs[:-1]

    def _wake(self, takers: list[ColumnCollector], woken: int) -> None:
        """Wake the first `AT_ONCE` takers of a step. `woken`: how many callers vLLM's collectors have woken already."""
        if self._to_wake:
            self.wake_some(len(self._to_wake))
        self._to_wake = [taker for taker in takers if taker.waiter is not None]
        self._yields = len(takers) + woken > AT_ONCE
        self.wake_some(AT_ONCE)

    def wake_some(self, count: int) -> None:
        some, self._to_wake = self._to_wake[:count], self._to_wake[count:]
        for taker in some:
            taker.wake()

    async def wake_all(self) -> None:
        """Wake the remaining callers of a step, with turns of the event loop in between.

        With more than `AT_ONCE` callers, each can take its token before the next step is read, as in stock.
        """
        while self._yields:
            self._yields = bool(self._to_wake)
            await asyncio.sleep(0)
            self.wake_some(AT_ONCE)


@dataclass(slots=True)
class Planned:
    """A step's columns, sorted out: what is put into the requests' states, and what vLLM's code processes."""

    layout: Layout
    tokens: list[int]
    """A token for each of the layout's rows; empty with `chunks`."""
    chunks: list[list[int]] | None
    """The tokens of each of the layout's rows, if some have several."""
    others: list[tuple[int, EngineCoreOutput]]

    def put(self) -> None:
        """Add the tokens to the requests' states, and decode them."""
        layout = self.layout
        if self.chunks is not None:
            for row, chunk in zip(layout.rows, self.chunks, strict=True):
                row.detokenizer.update(chunk, False)
            return
        for row, token in zip(layout.rows, self.tokens, strict=True):
            row.append(token)
        for number, row in layout.text:
            assert row.decode is not None
            row.detokenizer.output_text += row.decode(self.tokens[number])

    def count(self, timestamp: float | None, iteration: IterationStats | None) -> None:
        """Count the tokens in vLLM's statistics."""
        if iteration is not None:
            assert timestamp is not None
            counts = None if self.chunks is None else list(map(len, self.chunks))
            _count(self.layout, timestamp, iteration, sum(counts) if counts else len(self.tokens), counts)


def _plan(columns: Columns, layout: Layout) -> Planned:
    if columns.counts is None:
        tokens: list[int] = columns.tokens.tolist()
        ours = tokens if layout.whole else list(compress(tokens, layout.mask))
        others = [(number, EngineCoreOutput(name, [tokens[number]])) for number, name in layout.others]
        return Planned(layout, ours, None, others)
    chunks = _chunks(columns)
    others = [(number, EngineCoreOutput(name, chunks[number])) for number, name in layout.others]
    return Planned(layout, [], list(compress(chunks, layout.mask)), others)


def _placed(
    columns: Columns, outputs: list[EngineCoreOutput], others: list[tuple[int, EngineCoreOutput]]
) -> list[EngineCoreOutput]:
    """Return a step's outputs without its columns, and with `others` where the step has them."""
    count = len(outputs) - 1
    placed = list(zip(columns.before[len(columns.before) - count :], outputs[:count], strict=True))
    return [output for _, output in sorted([*placed, *others], key=itemgetter(0))]


def _chunks(columns: Columns) -> list[list[int]]:
    """Return each slot's tokens."""
    if columns.counts is None:
        return [[token] for token in columns.tokens.tolist()]
    flat, ends = columns.tokens.tolist(), np.cumsum(columns.counts).tolist()
    return [flat[end - count : end] for end, count in zip(ends, columns.counts.tolist(), strict=True)]


def _count(
    layout: Layout, timestamp: float, iteration: IterationStats, made: int, counts: list[int] | None
) -> None:
    """Count what IterationStats.update_from_output counts for an output that has only tokens."""
    iteration.num_generation_tokens += made
    latency = iteration.inter_token_latencies_iter.append
    for stats in layout.stats:
        latency(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp
    if counts is None:
        for stats in layout.stats:
            stats.num_generation_tokens += 1
    else:
        for stats, count in zip(layout.stats, counts, strict=True):
            stats.num_generation_tokens += count
