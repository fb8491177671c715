"""What the launcher tells the host, and the events the host sends back. Plain data, JSON at the edge."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PLAN_FILE = "plan.json"
LOG_FILE = "engine.log"
REQUESTS_FILE = "requests.bin"
COUNTS_FILE = "vllm-counts.json"


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`vllm_args` go through vLLM's own parser; `workload` and `seed` rebuild the requests in the host."""

    model: str  # as given; what vLLM loads stands in vllm_args
    vllm_args: list[str]
    workload: str
    seed: int
    warm_up: bool = True


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line on the event pipe.

    phase: starting, warm-up, measuring, finishing; with `--probe sites` then culprits, over. engine: `facts` about
    the resolved engine. progress: counts.
    failed: the run cannot go on, with the two lines for the person.
    """

    kind: Literal["phase", "engine", "progress", "failed", "done"]
    name: str = ""
    at_ns: int = 0
    facts: dict[str, Any] = {}
    sent: int = 0
    finished: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    message: str = ""
    hint: str = ""
    exit_code: int = 1


class Served(msgspec.Struct, frozen=True, array_like=True):
    """One request as the front end saw it; times are monotonic ns, `times` and `counts` packed int64 and int32."""

    index: int
    sent_ns: int
    finished_ns: int  # 0: did not finish
    hit_tokens: int  # -1: the engine did not say
    output_tokens: int
    finish: str
    times: bytes
    counts: bytes
    answer_crc: int = 0
