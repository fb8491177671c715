"""How to repeat the run: command, versions, machine, engine settings, and the end of the run's log."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.base.units import count, size
from kvtune.data.knobs import changed_settings
from kvtune.data.run.types import Run
from kvtune.data.show.parts import Cell, Grid, Section, cell, grid
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.again import left_out_of_run, repeating
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.names import command_text, process_name, when

PLACE = 120


def section(analysis: RunAnalysis) -> Section:
    run, h = analysis.run, analysis.run.header
    facts = [
        ("model", h.model),
        ("workload", f"{h.workload.spec}, seed {h.workload.seed}, hash {h.workload.hash}"),
        ("core", _core(run)),
        ("engine", _engine(run)),
        ("KV cache", h.engine.pool),
        ("probe", h.probe.level),
        ("Python", h.python),
        ("machine", f"{h.host.cpu}, {h.host.cores} cores, {size(h.host.memory_bytes)}, {h.host.os}"),
        ("started", when(h.started_at)),
        ("engine start", f"{h.startup_s:.1f} s"),
        ("kvtune", f"{h.kvtune}, run file schema {h.schema}"),
    ]
    settings = [(name, _text(value)) for name, value in sorted(h.engine.settings.items())]
    processes = [(process_name(run, i), str(p.pid), _collector(p.gc)) for i, p in enumerate(h.processes)]
    tables = [
        _groups(h.engine.groups),
        grid(("process", "pid", Column("garbage collector", right=False)), processes, "Processes"),
    ]
    folded = {
        "The command, as the file has it": command_text(run),
        "Engine settings as resolved": grid(("setting", "value"), settings) if settings else "",
        "End of the engine's log": "\n".join(h.log_tail) or "This run kept no engine log.",
    }
    again, without = repeating(run), left_out_of_run(run)
    return Section(
        "environment",
        "Repeat this run",
        facts=tuple((name, value) for name, value in facts if value),
        tables=tuple(table for table in tables if table is not None),
        commands=(again,) if again else (),
        notes=(without,) if again and without else (),
        folded={title: content for title, content in folded.items() if content},
    )


def _core(run: Run) -> str:
    core = run.header.core
    state = " (active)" if core.active else f" (not active: {core.why or 'no reason given'})"
    if core.name == "stock":
        state = ""
    settings = ", ".join(f"{k}={_text(v)}" for k, v in changed_settings(core.settings).items())
    return f"{core.name}{state}{': ' + settings if settings else ''}"


def _engine(run: Run) -> str:
    e = run.header.engine
    scheduling = "async scheduling" if e.async_scheduling else "synchronous scheduling"
    parts = [
        f"vLLM {e.vllm}" if e.vllm else "",
        f"torch {e.torch}" if e.torch else "",
        e.device_name or e.device,
    ]
    parts += [f"{e.executor} executor" if e.executor else "", scheduling]
    parts += [f"at most {count(e.max_model_len)} tokens a request" if e.max_model_len else ""]
    return ", ".join(p for p in parts if p)


def _collector(gc: Mapping[str, Any]) -> str:
    parts = []
    if not gc.get("enabled", True):
        parts.append("switched off")
    if "thresholds" in gc:
        parts.append(f"thresholds {', '.join(_text(t) for t in gc['thresholds'])}")
    if "frozen" in gc:
        parts.append(f"{count(gc['frozen'])} objects frozen")
    return ", ".join(parts) or "–"


def _groups(groups: Sequence[Mapping[str, object]]) -> Grid | None:
    """Make the table of KV cache groups; equal groups share a row."""
    alike = Counter(
        (
            _kind(str(group.get("kind", "?"))),
            *(_number(group.get(key)) for key in ("block_size", "sliding_window", "layers")),
            size(bytes_) if isinstance(bytes_ := group.get("page_bytes"), int) else "–",
        )
        for group in groups
    )
    heads = ("groups of", "number", "block (tokens)", "window (tokens)", "layers in each", "page of a block")
    rows = [(kind, cell(n, str), *rest) for (kind, *rest), n in alike.items()]
    return grid(heads, rows, "KV cache groups") if rows else None


def _kind(name: str) -> str:
    """Return a KV cache spec's name in words: `sliding window` for vLLM's `SlidingWindowSpec`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removesuffix("Spec")).replace("_", " ").lower()


def _number(value: object) -> Cell | str:
    return cell(value, count) if isinstance(value, int) else "–"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
