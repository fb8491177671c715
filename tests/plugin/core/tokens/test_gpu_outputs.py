"""The rows of vLLM's own GPU outputs, made from CPU tensors: with the core's arrays what they are without.

Both classes are vLLM's; only CUDA's events and streams, which no CPU has, are stand-ins.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtune.plugin.core.tokens import runners
from kvtune.plugin.core.tokens.rows import PassingRows
from kvtune.plugin.vllm.plugin_state import STATE

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PLAIN = [[7], [8], [9]]
DRAFTED = [[7, 70], [8, -1], [9, 90]]
"""Tokens by request; -1 was rejected."""

Rows = list[list[int]]


class Event:
    """Stands in for torch.cuda.Event: an output must be read only after it was waited for."""

    def __init__(self, **options: object) -> None:
        self.recorded = self.waited = False

    def record(self, stream: object = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.waited = True


class Stream:
    def wait_stream(self, other: object) -> None: ...


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("vllm")
    import torch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    yield
    STATE.patches.undo(runners.PART)


def shell(rows: Rows) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    names = [f"r{i}" for i in range(len(rows))]
    return ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)})


def v1(rows: Rows, discarded: list[int]) -> Any:
    """AsyncGPUModelRunnerOutput; `discarded`: requests whose prompts are not done."""
    import torch
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    return AsyncGPUModelRunnerOutput(
        model_runner_output=shell(rows),
        sampled_token_ids=torch.tensor(rows, dtype=torch.int32),
        logprobs_tensors=None,
        invalid_req_indices=discarded,
        async_output_copy_stream=Stream(),
        vocab_size=1000,
    )


def v2(rows: Rows, discarded: list[int]) -> Any:
    """AsyncOutput of model runner V2: how many of each row's tokens count is a tensor of its own."""
    import torch
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    counts = [0 if i in discarded else sum(token >= 0 for token in row) for i, row in enumerate(rows)]
    fields = dict.fromkeys(SamplerOutput.__dataclass_fields__)
    sampled = SamplerOutput(**{**fields, "sampled_token_ids": torch.tensor(rows, dtype=torch.int32)})
    return AsyncOutput(
        model_runner_output=shell(rows),
        sampler_output=sampled,
        num_sampled_tokens=torch.tensor(counts, dtype=torch.int32),
        main_stream=Stream(),
        copy_stream=Stream(),
        check_ep_fault=False,
        pending_aux_output=None,
    )


Made = Callable[[Rows, list[int]], Any]
BOTH = pytest.mark.parametrize("made", [v1, v2])


def both(made: Made, rows: Rows, discarded: list[int]) -> tuple[Any, Any]:
    """Stock's rows and those with the core's arrays."""
    stock = made(rows, discarded).get_output().sampled_token_ids
    runners.install_gpu_outputs()
    return stock, made(rows, discarded).get_output().sampled_token_ids


@BOTH
def test_one_token_each_passes_as_an_array(made: Made) -> None:
    stock, ours = both(made, PLAIN, [])
    assert type(stock) is list and isinstance(ours, PassingRows)
    assert ours == stock == PLAIN


@BOTH
def test_discarded_rows_are_stocks(made: Made) -> None:
    stock, ours = both(made, PLAIN, [1])
    assert type(ours) is list
    assert ours == stock == [[7], [], [9]]


@BOTH
def test_rows_of_several_lengths_are_stocks(made: Made) -> None:
    stock, ours = both(made, DRAFTED, [2])
    assert type(ours) is list
    assert ours == stock == [[7, 70], [8], []]


@BOTH
def test_what_is_read_has_been_waited_for(made: Made) -> None:
    runners.install_gpu_outputs()
    output = made(PLAIN, [])
    event = output.async_copy_ready_event if made is v1 else output.copy_event
    assert event.recorded and not event.waited
    output.get_output()
    assert event.waited


@BOTH
def test_an_output_that_crosses_to_another_process_is_the_same(made: Made) -> None:
    stock, ours = both(made, PLAIN, [])
    assert pickle.loads(pickle.dumps(ours)) == stock
