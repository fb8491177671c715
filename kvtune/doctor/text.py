"""A diagnosis as lines of text, each with the level that colours it. Formats, computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from kvtune.doctor.diagnosis import Diagnosis
from kvtune.doctor.facts import Visits
from kvtune.doctor.finding import Finding, Level
from kvtune.doctor.model import ModelReport, block_why
from kvtune.layout.choice import Layouts
from kvtune.units import count, size

Line = tuple[Level | None, str]

MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
WIDTH = 110
LEFT = 24


def lines(diagnosis: Diagnosis) -> Iterator[Line]:
    yield None, "Environment"
    yield from _findings(diagnosis.environment)
    if diagnosis.model is not None:
        yield None, ""
        yield from _model(diagnosis.model)
        yield None, ""
        yield None, "Settings"
        if diagnosis.settings:
            yield from _findings(diagnosis.settings)
        else:
            yield "ok", "  ok    every given setting has an effect, and none is known to hurt"
    yield None, ""
    yield None, f"{diagnosis.count('error')} errors, {diagnosis.count('warning')} warnings"


def _findings(findings: Iterable[Finding]) -> Iterator[Line]:
    for finding in findings:
        first, *rest = wrap(finding.text, WIDTH - LEFT) or [""]
        yield finding.level, f"  {MARKS[finding.level]:<5} {finding.topic:<15} {first}"
        for more in rest:
            yield finding.level, " " * LEFT + more
        for more in wrap(f"next: {finding.hint}", WIDTH - LEFT) if finding.hint else ():
            yield None, " " * LEFT + more


def _pair(name: str, text: str) -> Iterator[Line]:
    first, *rest = wrap(text, WIDTH - LEFT) or [""]
    yield None, f"  {name:<{LEFT - 2}}{first}"
    for more in rest:
        yield None, " " * LEFT + more


def _model(report: ModelReport) -> Iterator[Line]:
    facts = report.facts
    yield None, f"Model {facts.model}" + (f" ({facts.architecture})" if facts.architecture else "")
    if facts.source == "config":
        yield from _pair("source", "config.json only, without vLLM: block sizes are planned")
        yield from _pair("assumed", facts.assumed)
    yield from _pair("block", f"{facts.block_tokens} tokens: {block_why(facts)}")
    if facts.gpu_block_tokens:
        yield from _pair(
            "block on a GPU",
            f"{facts.gpu_block_tokens} tokens (planned: multiples of 16, states of the config's type)",
        )
    yield from _pair("block in the pool", f"{size(facts.block_bytes)} over {facts.group_layers} layers")
    first = 0
    for group, alike in groupby(facts.groups):
        many = len(list(alike))
        last = first + many - 1
        what = group.kind + (f" of {group.window}" if group.window else "")
        pad = report.pad_share(group)
        padded = f", {pad:.1%} padding" if pad > 0.0005 else ""
        each = f"{many} x {group.layers}" if many > 1 else f"{group.layers}"
        yield from _pair(
            f"groups {first} to {last}" if many > 1 else f"group {first}",
            f"{what}: {each} layers, {group.block_tokens} tokens per block{padded}",
        )
        first = last + 1
    if report.token_bytes:
        yield from _pair("one token", f"{size(report.token_bytes)} in all full-attention layers")
    if report.state_bytes:
        kept = f" in {facts.state_dtype}" if facts.state_dtype else ""
        yield from _pair("states of a sequence", f"{size(report.state_bytes)}{kept}")
    yield from _pair(
        "tail waste", f"{size(report.tail_bytes)} per sequence on average (half of its last blocks)"
    )
    if facts.pool_blocks:
        fit = (
            f", room for {count(facts.tokens_fit)} tokens in requests of {count(facts.max_model_len)}"
            if facts.tokens_fit
            else ""
        )
        yield from _pair("pool", f"{count(facts.pool_blocks)} blocks ({size(facts.pool_bytes)}){fit}")
    yield from _pair("kept in the cache", _retention(report))
    if facts.caching:
        yield from _pair(
            "hits end at", f"multiples of {facts.hit_tokens} tokens (hashed in units of {facts.hash_tokens})"
        )
    yield from _floor(report)
    if report.layouts is not None:
        yield from _layouts(report.layouts)


def _retention(report: ModelReport) -> str:
    facts = report.facts
    if not facts.caching:
        return "nothing: prefix caching is off"
    if not (facts.windowed or facts.hybrid):
        return "every block (full attention only)"
    kept = "windows" if facts.windowed else "states"
    if facts.retention is None:
        return f"{kept} at every block boundary (dense)"
    if facts.retention == 0:
        return (
            f"{kept} at the end of each prompt, and where two prompts were seen to diverge (0, the default)"
        )
    return f"{kept} every {count(facts.retention)} tokens, at the end of each prompt and where two were seen to diverge"


def _floor(report: ModelReport) -> Iterator[Line]:
    floor = report.floor
    if floor is None:
        yield from _pair("smallest hit", "none: with these settings no prompt can ever hit")
        return
    when = f", from visit {floor.first_visit} on" if floor.first_visit else ""
    if floor.last_first_visit > floor.first_visit:
        when += f" (from visit {floor.last_first_visit} on where the suffix is longer than a block)"
    gpu = report.facts.gpu_block_tokens
    other = f"; on a GPU {gpu} tokens" if gpu and gpu != floor.tokens else ""
    yield from _pair("smallest hit", f"a shared prefix of {floor.tokens} tokens{when}{other}")
    yield from _pair("", floor.why)
    for name, visits in (
        ("new suffix each visit", report.facts.shared_prefix),
        ("same prompt again", report.facts.resent),
    ):
        for line in visit_lines(visits):
            yield from _pair(name, line)
            name = ""


HEAD = (
    "layout",
    "block",
    "groups",
    "fit",
    "ratio",
    "shared",
    "resend",
    "hits",
    "pad",
    "slot",
    "fill",
    "tail",
)


def _layouts(layouts: Layouts) -> Iterator[Line]:
    """A table of stock's layout and the packed ones. `*`: on the Pareto front; `->`: recommended."""
    load = layouts.workload or "no workload given"
    yield None, ""
    what = f"requests of {count(layouts.request_tokens)} tokens ({load}) in {size(layouts.pool_bytes)}"
    yield None, f"Block layouts, for {what}"
    yield None, "     " + _columns(HEAD)
    for number, row in enumerate(layouts.rows):
        mark = ("->" if number == layouts.recommended else "  ") + ("*" if row.on_front else " ")
        waste = row.waste
        yield (
            None,
            f"  {mark}"
            + _columns(
                (
                    row.name,
                    count(row.plan.block_tokens),
                    str(row.plan.groups),
                    f"{row.fit:,.1f}",
                    f"{row.capacity:.3f}x",
                    count(row.plan.block_tokens),
                    count(row.resend_tokens),
                    "–" if row.hit_share is None else f"{row.hit_share:.1%}",
                    *(
                        size(waste_bytes)
                        for waste_bytes in (waste.page_pad, waste.state_slot, waste.padding, waste.tail)
                    ),
                )
            ),
        )
    yield from _pair("fit, ratio", "requests of these lengths that run at once; their number over stock's")
    yield from _pair(
        "shared, resend",
        "hits of a shared prefix end at multiples of the first; those of a prompt sent again, or of a chat's next "
        "turn, at multiples of the second (with --prefix-match-unit)",
    )
    if layouts.workload:
        yield from _pair(
            "hits", "upper bound for the workload: share of its prompt tokens that an infinite cache hits"
        )
    yield from _pair(
        "pad, slot, fill, tail",
        "wasted bytes of a running request: unused parts of state pages, the second slot of each state, padding "
        "layers and states, the last partly filled block",
    )
    row = layouts.rows[layouts.recommended]
    yield from _pair("recommended", f"{row.name} ({count(row.plan.block_tokens)} tokens): {layouts.why}")


def _columns(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f"{first:<9}" + "".join(f"{cell:>{8 if n < 7 else 10}}" for n, cell in enumerate(rest))


def visit_lines(visits: Iterable[Visits]) -> Iterator[str]:
    """Hits of replayed visits, one line per prefix."""
    for visit in visits:
        hits = "  ".join(f"{count(hit):>6}" for hit in visit.hit_tokens)
        tokens = f"{count(visit.prefix_tokens)}" + (
            f" + {visit.suffix_tokens}" if visit.suffix_tokens else ""
        )
        yield f"{tokens:>14} tokens: hit {hits}  (visits 1 to {len(visit.hit_tokens)})"
