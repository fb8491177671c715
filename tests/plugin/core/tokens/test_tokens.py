"""Rows of sampled tokens behave like stock's lists, whatever a consumer does with them."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import types
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.plugin.core import state
from kvtune.plugin.core.tokens import install, runners
from kvtune.plugin.core.tokens.rows import (
    OneToken,
    PackedRows,
    PassingRows,
    TokenRows,
    one_each,
    pack,
    unpack,
)
from kvtune.plugin.vllm.plugin_state import STATE

token = st.integers(-1, 2**31 - 1)
ragged = st.lists(st.lists(token, max_size=4), min_size=1, max_size=30)


def unpacked(rows: list[list[int]]) -> PackedRows:
    packed = pack(rows)
    assert packed is not None
    return unpack(pickle.loads(pickle.dumps(packed)))


@given(ragged)
def test_rows_survive_pickling(rows: list[list[int]]) -> None:
    made = unpacked(rows)
    assert isinstance(made, list)
    assert len(made) == len(rows)
    assert made == rows
    assert type(made) is TokenRows
    assert all(type(row) is list for row in made)


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows[1],
        lambda rows: rows[-1],
        lambda rows: rows[:2],
        lambda rows: list(rows),
        lambda rows: [*reversed(rows)],
        lambda rows: bool(rows),
        lambda rows: [5] in rows,
        lambda rows: rows.index([5]),
        lambda rows: rows.__add__([[9]]),
        lambda rows: [[9], *rows],
        lambda rows: rows == [[4], [5], [6]],
        lambda rows: sorted(rows),
        lambda rows: rows.copy(),
        lambda rows: repr(rows),
        lambda rows: list(zip(rows, range(3), strict=True)),
        lambda rows: pickle.loads(pickle.dumps(rows)),
        lambda rows: len(rows),
    ],
)
@pytest.mark.parametrize("kind", ["packed", "passing"])
def test_every_list_operation_gives_what_a_list_gives(read: Any, kind: str) -> None:
    plain = [[4], [5], [6]]
    rows = unpacked(plain) if kind == "packed" else PassingRows.of_flat([4, 5, 6])
    assert read(rows) == read(plain)


def test_a_row_that_is_changed_stays_changed() -> None:
    # The runner clears rows of unfinished prefills, V2 cuts rows, the scheduler trims after a stop.
    rows = unpacked([[1, 2, 3], [4, 5], [6]])
    rows[0].clear()
    del rows[1][1:]
    rows[2].append(7)
    assert rows == [[], [4], [6, 7]]
    assert rows[0] is rows[0]


@given(ragged)
def test_one_each_is_strict(rows: list[list[int]]) -> None:
    single = all(len(row) == 1 for row in rows)
    for given_rows in (rows, unpacked(rows)):
        tokens = one_each(given_rows)
        assert (tokens is not None) == single
        if tokens is not None:
            assert tokens.tolist() == [row[0] for row in rows]


@pytest.mark.parametrize("odd", [None, [], [None], [(1,)], "ab"])
def test_anything_but_rows_of_tokens_is_left_alone(odd: Any) -> None:
    assert pack(odd) is None


@given(st.lists(token, min_size=1, max_size=20))
def test_one_token_encodes_as_the_list_it_stands_for(values: list[int]) -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[list[int]]).decode
    as_tokens = [OneToken(value) for value in values]
    as_lists = [[value] for value in values]
    assert encode(as_tokens) == encode(as_lists)
    assert decode(encode(as_tokens)) == as_lists
    assert as_tokens == as_lists
    assert [one[0] for one in as_tokens] == values
    assert [one[:] for one in as_tokens] == as_lists
    assert not any(gc.is_tracked(one) for one in as_tokens)


class Output:
    def __init__(self, shape: int, values: list[int], counts: list[int]) -> None:
        self.sampled_token_ids = np.array(values).reshape(-1, shape)
        self.num_sampled_tokens_np: Any = np.array(counts)
        self.sampling_mask_tensors = self.pending_aux_output = None
        self.copy_event = types.SimpleNamespace(synchronize=lambda: None)

    def get_output(self) -> Any:
        rows = self.sampled_token_ids.tolist()
        for row, count in zip(rows, self.num_sampled_tokens_np.tolist(), strict=False):
            del row[count:]
        return rows


@pytest.mark.parametrize(
    ("shape", "values", "counts", "passes"),
    [(1, [4, 5], [1, 1], True), (1, [4, 5], [1, 0], False), (2, [4, 5, 6, -1], [2, 1], False)],
)
def test_v2_rows(shape: int, values: list[int], counts: list[int], passes: bool) -> None:
    kind = type("Wrapped", (Output,), {"get_output": Output.get_output})
    runners.prepared_once(kind, runners.single_v2)
    rows = kind(shape, values, counts).get_output()
    STATE.remove(runners.PART)
    assert (type(rows) is PassingRows) == passes
    assert rows == Output(shape, values, counts).get_output()


def test_the_first_error_leaves_all_rows_to_stock() -> None:
    def fails(output: Output) -> None:
        raise RuntimeError("ours")

    kind = type("Wrapped", (Output,), {"get_output": Output.get_output})
    runners.prepared_once(kind, fails)
    assert kind(1, [4, 5], [1, 1]).get_output() == Output(1, [4, 5], [1, 1]).get_output()
    assert kind.get_output is Output.get_output
    assert state.state()["parts"] == {"rows": False} and "ours" in state.state()["notes"][0]


def test_v1_async_rows() -> None:
    for invalid in ([], [1]):
        output = types.SimpleNamespace(
            _invalid_req_indices=invalid, sampled_token_ids_cpu=np.array([[4], [5]])
        )
        runners.single_async(output)
        assert type(output.sampled_token_ids_cpu) is (np.ndarray if invalid else runners.Singles)
        assert output.sampled_token_ids_cpu.shape[-1] == 1
        assert output.sampled_token_ids_cpu.tolist() == [[4], [5]]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
def test_a_model_output_is_pickled_as_bytes() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput(
        req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[4], [5]], pooler_output=[]
    )
    stock = pickle.loads(pickle.dumps(output))
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {**copyreg.dispatch_table, ModelRunnerOutput: install.reduce_output}
    pickler.dump(output)
    unpickled = pickle.loads(buffer.getvalue())
    assert type(unpickled) is ModelRunnerOutput
    assert type(unpickled.sampled_token_ids) is PackedRows
    assert unpickled == stock
    assert output.sampled_token_ids == [[4], [5]]
