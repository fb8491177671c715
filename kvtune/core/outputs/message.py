"""The one EngineCoreOutput that carries a step's plain outputs as columns, and how a client asks for it.

Requests have slots: small numbers, which EngineCore gives out per client and names once. A message without slots is of
the same requests, in the same order, as the one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

MARK = "kvtune-columns/1"
"""The id of the output that carries columns; with the version of this format. No request has it: ids end in letters."""

OUTLET = "kvtune_outlet"
"""The attribute that holds the Outlet, of an EngineCore and of its scheduler."""

Slots = NDArray[np.int32]


class Columns(NamedTuple):
    """Plain outputs of one step. `counts`: tokens of each request; None where each has one. `named`: slots and ids.

    `before`: for each other output of the step, how many plain outputs come before it.
    """

    engine: int
    slots: Slots | None
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None
    named: list[tuple[int, str]]
    before: list[int]


def output_of(columns: Columns) -> EngineCoreOutput:
    """The output that carries these columns."""
    from vllm.v1.engine import EngineCoreOutput

    fields: dict[str, object] = {"engine": columns.engine, "tokens": columns.tokens.tobytes()}
    if columns.slots is not None:
        fields["slots"] = columns.slots.tobytes()
    if columns.counts is not None:
        fields["counts"] = columns.counts.tobytes()
    if columns.named:
        fields["named"] = columns.named
    if columns.before:
        fields["before"] = columns.before
    return EngineCoreOutput(MARK, [], kv_transfer_params=fields)


def columns_of(output: EngineCoreOutput) -> Columns:
    """The columns that `output_of` put into this output."""
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
    """The request id that a client aborts to tell EngineCore that it reads columns."""
    return f"{MARK}/{client}"


def asked_by(request_id: str) -> int | None:
    """The client that asks for columns by aborting this id; None for the id of a request."""
    name, _, client = request_id.rpartition("/")
    return int(client) if name == MARK and client.isdigit() else None
