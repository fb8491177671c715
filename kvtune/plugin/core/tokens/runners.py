"""Makes workers return sampled tokens as PassingRows when each request has exactly one.

Runs in workers, and in EngineCore with the uni executor. Steps with unfinished prefills, drafts or masks keep
stock's lists, because vLLM shortens or stores their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvtune.plugin.core import state
from kvtune.plugin.core.tokens.rows import PassingRows
from kvtune.plugin.vllm.plugin_state import STATE

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

Output = TypeVar("Output")

PART = "tokens.runners"


def install() -> None:
    """Wrap the worker's methods that return the rows on this platform."""
    if not STATE.workers:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _install_cpu_runner()
    else:
        install_gpu_outputs()


def _install_cpu_runner() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def wrap(to_list: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        def passing(self: CPUModelRunner, sampled_token_ids: torch.Tensor) -> list[list[int]]:
            try:
                rows = _passing(self, sampled_token_ids)
            except Exception as error:
                _give_up(error)
                rows = None
            return to_list(self, sampled_token_ids) if rows is None else rows

        return passing

    STATE.patches.wrap(PART, CPUModelRunner, "_to_list", wrap)


def _passing(runner: CPUModelRunner, sampled_token_ids: torch.Tensor) -> PassingRows | None:
    """Return a step's tokens as PassingRows, or None if they must be lists."""
    # The runner clears the rows of unfinished prefills, and drafters keep rows: both need real lists.
    discards = runner.discard_request_mask.np[: runner.input_batch.num_reqs].any()
    if discards or runner.speculative_config is not None or not len(sampled_token_ids):
        return None
    return PassingRows.of_flat(sampled_token_ids.flatten().tolist())


def _give_up(error: Exception) -> None:
    """Make stock's lists from here on, in this process."""
    STATE.patches.undo(PART)
    state.part("rows", False, f"workers make stock's lists from here on: {error!r}")


class Singles:
    """Replaces a host tensor of sampled tokens, of shape (n, 1); its `tolist` returns PassingRows."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.shape = tokens.shape
        self._tokens = tokens

    def tolist(self) -> PassingRows:
        return PassingRows.of_flat(self._tokens.flatten().tolist())


class NothingToTrim:
    """Replaces an array of counts, all 1, that vLLM uses only to cut each row to its length."""

    def tolist(self) -> list[int]:
        return []


def single_async(output: AsyncGPUModelRunnerOutput) -> None:
    """Make an AsyncGPUModelRunnerOutput (model runner V1) return PassingRows if each request has one token."""
    if not output._invalid_req_indices and output.sampled_token_ids_cpu.shape[-1] == 1:
        output.sampled_token_ids_cpu = Singles(output.sampled_token_ids_cpu)


def single_v2(output: AsyncOutput) -> None:
    """Make an AsyncOutput (model runner V2) return PassingRows if each request has one token."""
    if output.sampled_token_ids.shape[-1] != 1 or output.sampling_mask_tensors is not None:
        return
    output.copy_event.synchronize()
    if output.pending_aux_output is None and bool((output.num_sampled_tokens_np == 1).all()):
        output.sampled_token_ids = Singles(output.sampled_token_ids)
        output.num_sampled_tokens_np = NothingToTrim()


def install_gpu_outputs() -> None:
    """Wrap `get_output` of GPU workers' outputs. The simulated device also calls this, on any platform."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    for kind, prepare in ((AsyncGPUModelRunnerOutput, single_async), (AsyncOutput, single_v2)):
        prepared_once(kind, prepare)


def prepared_once(kind: type[Output], prepare: Callable[[Output], None]) -> None:
    def wrap(get_output: Callable[[Output], object]) -> Callable[[Output], object]:
        def prepared(self: Output) -> object:
            try:
                prepare(self)
            except Exception as error:
                _give_up(error)
            return get_output(self)

        return prepared

    STATE.patches.wrap(PART, kind, "get_output", wrap)
