"""EngineCore's side: a step's plain outputs become one output with columns, for clients that asked for it.

An output is plain if it has tokens and nothing else. All others stay as they are, and precede the columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput

from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.outputs.message import MARK, Columns, Slots, output_of

FEWEST = 4
"""A step with fewer plain outputs than this is sent without columns."""
SPARE = 64
"""Slots of ended requests are reused once there would be more than 2 x live requests + this many slots."""

_NOTHING_ELSE = msgspec.structs.astuple(EngineCoreOutput("", []))[2:]


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether an output has tokens and nothing else."""
    try:
        return bool(output.new_token_ids) and msgspec.structs.astuple(output)[2:] == _NOTHING_ELSE
    except (ValueError, RuntimeError):  # an array does not compare to None
        return False


class Rows(Protocol):
    """Requests of one client that decode together (`Rows` of steps/steady.py). The object never changes."""

    @property
    def ids(self) -> list[str]: ...
    @property
    def client(self) -> int: ...


class Outlet:
    """Makes columns in one EngineCore, for the clients for which `ask` was called.

    After an error every output is sent as stock sends it; clients can read both.
    """

    def __init__(self, engine: int, breaker: Breaker) -> None:
        self._engine = engine
        self._clients: dict[int, _Client] = {}
        self._breaker = breaker
        breaker.on_trip(self._clients.clear)

    def ask(self, client: int) -> None:
        """Send columns to this client from now on. A second call changes nothing."""
        if not self._breaker.tripped:
            self._clients.setdefault(client, _Client(self._engine))

    def reads_columns(self, client: int) -> bool:
        return client in self._clients

    def pack(
        self, client: int, outputs: list[EngineCoreOutput], alive: Collection[str]
    ) -> list[EngineCoreOutput]:
        """Return the step's outputs with the plain ones as columns. `alive`: ids of the scheduler's requests."""
        return self._breaker.attempt(self._packed, client, outputs, alive) or outputs

    def rest(self) -> None:
        """Drop the references to the last steady step's requests; called when no request is left."""
        for client in self._clients.values():
            client.rows = None

    def _packed(
        self, client: int, outputs: list[EngineCoreOutput], alive: Collection[str]
    ) -> list[EngineCoreOutput]:
        to = self._clients.get(client)
        if to is None or len(outputs) < FEWEST or outputs[-1].request_id == MARK:
            return outputs
        plain: list[EngineCoreOutput] = []
        others: list[EngineCoreOutput] = []
        before: list[int] = []
        for output in outputs:
            if is_plain(output):
                plain.append(output)
            else:
                others.append(output)
                before.append(len(plain))
        if len(plain) < FEWEST:
            return outputs
        rows = [output.new_token_ids for output in plain]
        tokens = np.fromiter(chain.from_iterable(rows), np.int32)
        counts = None
        if len(tokens) != len(rows):
            counts = np.fromiter(map(len, rows), np.int32, count=len(rows))
        slots = to.slots([output.request_id for output in plain], alive)
        others.append(to.columns(slots, tokens, counts, before))
        return others

    def steady(
        self,
        rows: Rows,
        sampled: Sequence[int],
        special: Sequence[int],
        dead: Sequence[int],
        alive: Collection[str],
    ) -> EngineCoreOutput | None:
        """Return a decode step's columns for the client of `rows`: a token for each row that is not special or dead.

        `special`: indices of rows whose output is not plain; `dead`: indices of finished rows. None if no row is left.
        """
        to = self._clients[rows.client]
        slots, tokens = to.slots_of_rows(rows, alive), np.array(sampled, np.int32)
        before: list[int] = []
        if special or dead:
            ours = np.ones(len(tokens), np.bool_)
            ours[[*special, *dead]] = False
            before = np.cumsum(ours)[list(special)].tolist() if special else []
            slots, tokens = slots[ours], tokens[ours]
        return to.columns(slots, tokens, None, before) if len(tokens) else None


class _Client:
    """The slots of one client's requests."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._named: list[tuple[int, str]] = []
        self.rows: Rows | None = None
        self._of_rows = self._last = np.empty(0, np.int32)

    def slots(self, ids: list[str], alive: Collection[str]) -> Slots:
        slot_of = self._slot_of
        slots = list(map(slot_of.get, ids))
        if None in slots:
            self._name([name for name, slot in zip(ids, slots, strict=True) if slot is None], ids, alive)
            return np.array([slot_of[name] for name in ids], np.int32)
        return np.array(slots, np.int32)

    def slots_of_rows(self, rows: Rows, alive: Collection[str]) -> Slots:
        if rows is not self.rows:
            self._of_rows, self.rows = self.slots(rows.ids, alive), rows
        return self._of_rows

    def columns(
        self,
        slots: Slots,
        tokens: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        before: list[int],
    ) -> EngineCoreOutput:
        same = slots is self._last or np.array_equal(slots, self._last)
        named, self._named, self._last = self._named, [], slots
        state.count("column_steps")
        return output_of(Columns(self._engine, None if same else slots, tokens, counts, named, before))

    def _name(self, new: list[str], ids: list[str], alive: Collection[str]) -> None:
        """Give slots to new requests. `ids`: all requests of the step; some may have ended since it was scheduled."""
        slot_of = self._slot_of
        if len(slot_of) + len(new) > 2 * len(alive) + SPARE:
            wanted = set(ids)
            for name in [name for name in slot_of if name not in alive and name not in wanted]:
                self._free.append(slot_of.pop(name))
        for name in new:
            slot = self._free.pop() if self._free else len(slot_of)
            slot_of[name] = slot
            self._named.append((slot, name))
