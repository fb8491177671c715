"""How long a step takes by the work in it, and a copy by its bytes, for the simulator and the simulated device.

`kvtune/lab/device/fit.py` fits a `StepCost` to a recorded run.
"""

from __future__ import annotations

import msgspec

from kvtune.base.bounded import decode_json_as
from kvtune.base.errors import KvtuneError
from kvtune.plugin.probe.work import Work

TRUSTED_SHARE = 0.1
"""Largest relative error (10 %) with which predictions count as valid timings."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """A step's cost in microseconds, and the error of its fit.

    `error_share`: mean absolute error divided by the mean step. `held_out_share`: relative error with which a fit to
    the first part of the run predicts the summed time of the rest; predictions of means may have the same error.
    """

    step_us: float
    prefill_token_us: float
    decode_us: float
    kv_token_us: float
    prefill_step_us: float = 0.0  # extra, for a step that prefills
    prefill_kv_us: float = 0.0  # per pair of a prompt token and a KV token that it attends to
    between_us: float = 0.0  # from a step's end to the next one's begin, while requests run
    enter_us: float = 0.0  # from the client's send until the scheduler gets the request
    leave_us: float = 0.0  # from a step's end until the client gets its tokens
    fitted: bool = False
    clock: str = (
        ""  # what was fitted: the steps' wall, cpu (of EngineCore's thread) or device time; or requests
    )
    machine: str = ""
    source: str = ""  # the run it was fitted to
    steps: int = 0
    error_share: float = 0.0
    held_out_share: float = 0.0
    unexplained_share: float = 0.0
    """Share of the time with requests in flight that steps and delays do not account for."""

    @property
    def trusted(self) -> bool:
        """Whether the cost was fitted, predicts held-out steps, and accounts for the time of the run's requests."""
        return self.fitted and max(self.held_out_share, self.unexplained_share) <= TRUSTED_SHARE

    def seconds(self, prefill_tokens: int, decodes: int, kv_tokens: int, prefill_kv: float = 0.0) -> float:
        """Return the seconds from a step's begin until the next step can begin.

        `kv_tokens`: of requests that decode. `prefill_kv`: KV tokens attended to, summed over the prompt tokens.
        """
        time_us = self.step_us + self.between_us + self.decode_us * decodes + self.kv_token_us * kv_tokens
        if prefill_tokens:
            time_us += self.prefill_step_us + self.prefill_token_us * prefill_tokens
            time_us += self.prefill_kv_us * prefill_kv
        return time_us * 1e-6

    def device_us(self, work: Work) -> float:
        """Return how many microseconds a device computes a step. `work`: see data/run/step_work.py."""
        decodes = max(work.scheduled - work.prefill, 0)
        context = max(work.context_tokens - work.prefill_context_tokens, 0)
        time_us = self.step_us + self.decode_us * decodes + self.kv_token_us * context
        if work.prefill:
            prefills = max(work.requests - decodes, 1)
            attended = work.prefill * (work.prefill_context_tokens + work.prefill / 2) / prefills
            time_us += (
                self.prefill_step_us + self.prefill_token_us * work.prefill + self.prefill_kv_us * attended
            )
        return time_us


NOMINAL = StepCost(step_us=8_000.0, prefill_token_us=12.0, decode_us=60.0, kv_token_us=0.0002)
"""Round figures for one large accelerator, for replays in which only the order of events matters."""


def read_cost(text: str) -> StepCost:
    """Read a StepCost from JSON, as in `header.extra.step_cost` of a run."""
    try:
        return decode_json_as(text, StepCost)
    except ValueError as error:
        raise KvtuneError(f"not a step cost: {error}", "give the `step_cost` object of a run") from error


GIB = 1 << 30


class CopyTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long a copy between the KV cache and a tier of host memory takes.

    store_gib_s: speed of copies to the tier. load_gib_s: of copies from the tier. 0 GiB/s: the bytes take no time.
    latency_s: added to each copy.
    """

    store_gib_s: float = 25.0
    load_gib_s: float = 25.0
    latency_s: float = 0.0

    def seconds(self, size: int, gib_s: float) -> float:
        return self.latency_s + (size / (gib_s * GIB) if gib_s else 0.0)


INSTANT = CopyTime(store_gib_s=0.0, load_gib_s=0.0)
"""Copies within memory, as a CPU engine makes them: done when they are submitted."""
