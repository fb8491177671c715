"""Tells the role of each process in a run, and what a run through a server cannot record. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.engine.launch import HostOutcome
from kvtune.probe.process import Sample
from kvtune.probe.status import ProcessFacts
from kvtune.run.types import ProcessInfo

SERVER = "kvtune.engine.front_end.api_servers"
"""A word in the command line of the process that runs `vllm serve`."""


def processes_of(
    statuses: list[ProcessFacts], samples: Sequence[Sample], outcome: HostOutcome, api_servers: int
) -> list[ProcessInfo]:
    """Return processes with a status file, then others that psutil saw while measuring (helpers, trackers)."""
    names = outcome.sampler.names if outcome.sampler is not None else {}
    reporting = [
        ProcessInfo(pid=s["pid"], role=s["role"], name=s.get("name", ""), gc={**s.get("gc", {})})
        for s in statuses
    ]
    known = {p.pid for p in reporting}
    measured = {s.pid for s in samples if outcome.start_ns <= s.at_ns <= outcome.end_ns}
    root = outcome.sampler.root if outcome.sampler is not None else 0
    others = (
        ProcessInfo(pid=pid, role=_role(pid, root, names.get(pid, ""), api_servers), name=names.get(pid, ""))
        for pid in sorted(measured - known)
    )
    return [*reporting, *others]


def _role(pid: int, root: int, name: str, api_servers: int) -> str:
    """Return a process's role by its title, for runs without a probe: vLLM titles each of its processes."""
    if pid == root:
        return "client" if api_servers else "front_end"
    if "APIServer" in name or (api_servers == 1 and SERVER in name):
        return "front_end"
    if "EngineCore" in name:
        return "engine_core"
    return "worker" if "Worker" in name else "helper"


def server_note(api_servers: int) -> list[str]:
    """Return the note on what an HTTP client cannot see; [] without API servers."""
    if not api_servers:
        return []
    servers = "one API server" if api_servers == 1 else f"{api_servers} API servers"
    return [
        f"{servers} of `vllm serve` answered an HTTP client: not recorded are preemptions by request, when "
        "EngineCore made a token, and when the front end took a step's tokens"
    ]
