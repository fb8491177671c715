"""Messages between launcher and host: the host's plan and its events. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtune.data.tally import Hits
from kvtune.lab.device.settings import Timed
from kvtune.lab.setup.setup import Setup

PLAN_FILE = "plan.json"
LOG_FILE = "engine.log"
REQUESTS_FILE = "requests.bin"
COUNTS_FILE = "vllm-counts.json"
RECEIPTS_FILE = "receipts.bin"
"""A file with the time at which the front end received each step's tokens: monotonic ns, packed int64."""

ROUTES_FILE = "routes.json"
"""A file that says which EngineCore each request was sent to, if there are several."""


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the host runs: a set-up, and the flags that vLLM's parser gets for it (lab/setup/resolve.py)."""

    setup: Setup
    vllm_args: list[str]
    warm_up: bool = True

    @property
    def device(self) -> Timed | None:
        """The device in place of the model, if there is one."""
        return self.setup.device if isinstance(self.setup.device, Timed) else None


class Event(Hits, frozen=True, kw_only=True, omit_defaults=True):
    """A message on the event pipe (`kvtune/base/dialogue.py`).

    phase: starting, warm-up, measuring, finishing; with `--probe sites` also culprits (the second pass) and over.
    engine: `facts` about the engine's configuration. progress: counts. failed: an error with its message and hint.
    died: `codes`, the exit codes of the engine's processes that had ended when it failed.
    """

    kind: Literal["phase", "engine", "progress", "died", "failed", "done"]
    name: str = ""
    at_ns: int = 0
    facts: dict[str, object] = {}
    sent: int = 0
    finished: int = 0
    output_tokens: int = 0
    message: str = ""
    hint: str = ""
    exit_code: int = 1
    codes: dict[str, int] = {}


class Served(msgspec.Struct, frozen=True, array_like=True):
    """One request as the front end measured it. Times are monotonic ns.

    `times` and `counts` (tokens): one entry per delivery, as packed int64 and int32. `made`: monotonic seconds at which
    EngineCore made the last token of each delivery, as packed doubles.
    """

    index: int
    sent_ns: int
    finished_ns: int  # 0: unfinished
    hit_tokens: int  # -1: not reported
    output_tokens: int
    finish: str
    times: bytes
    counts: bytes
    answer_crc: int = 0
    made: bytes = b""
    tier_hit_tokens: int = 0  # the part of hit_tokens from a tier of host memory
