"""The one EngineCoreOutput that carries a step's plain outputs as columns, and how a client asks for it.

A request has a slot: a small number that EngineCore chooses per client, and sends once together with the request's id.
A message without slots is about the same requests, in the same order, as the message before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

MARK = "kvtune-columns/1"
"""The request id of the output that carries columns, with the version of this format. No real request has this id."""

OUTLET = "kvtune_outlet"
"""Name of the attribute that holds the Outlet, on an EngineCore and on its scheduler."""

Slots = NDArray[np.int32]


class Columns(NamedTuple):
    """Plain outputs (only tokens) of one step. `counts`: tokens per request, None if each has one.

    `named`: new slots and their request ids. `before`: for each other output of the step, how many plain outputs come
    before it.
    """

    engine: int
    slots: Slots | None
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None
    named: list[tuple[int, str]]
    before: list[int]


def output_of(columns: Columns) -> EngineCoreOutput:
    """Return the output that carries these columns."""
    from vllm.v1.engine import EngineCoreOutput

    fields = {
        name: value.tobytes() if isinstance(value, np.ndarray) else value
        for name, value in columns._asdict().items()
        if isinstance(value, np.ndarray) or value not in (None, [])
    }
    return EngineCoreOutput(MARK, [], kv_transfer_params=fields)


def columns_of(output: EngineCoreOutput) -> Columns:
    """Return the columns that `output_of` put into this output."""
    fields = output.kv_transfer_params
    assert fields is not None
    slots, counts = fields.get("slots"), fields.get("counts")
    return Columns(
        cast("int", fields["engine"]),
        None if slots is None else np.frombuffer(slots, np.int32),
        np.frombuffer(fields["tokens"], np.int32),
        None if counts is None else np.frombuffer(counts, np.int32),
        [(slot, name) for slot, name in fields.get("named", ())],
        fields.get("before", []),
    )


def asking(client: int) -> str:
    """Return the request id that a client aborts to tell EngineCore that it reads columns."""
    return f"{MARK}/{client}"


def asked_by(request_id: str) -> int | None:
    """Return the client that asks for columns by aborting this id, or None for a real request's id."""
    name, _, client = request_id.rpartition("/")
    return int(client) if name == MARK and client.isdigit() else None
