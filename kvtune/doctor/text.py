"""A diagnosis as lines of text, each with the level that colours it. Formats, computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from kvtune.doctor.diagnosis import Diagnosis
from kvtune.doctor.facts import Facts, Visits
from kvtune.doctor.finding import Finding, Level
from kvtune.doctor.model import Floor, ModelReport, block_why, first_hits
from kvtune.layout.choice import Layouts
from kvtune.terminal import Column, FittedTable, folded
from kvtune.units import count, percent, size

Line = tuple[Level | None, str]

MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
WIDTH = 110
LEFT = 24


def lines(diagnosis: Diagnosis, width: int = WIDTH) -> Iterator[Line]:
    """Yield the diagnosis as lines of at most `width` columns."""
    for mark, line in _long_lines(diagnosis, width):
        for part in folded(line, width):
            yield mark, part


def _long_lines(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    yield None, "Environment"
    yield from _findings(diagnosis.environment)
    if diagnosis.model is not None:
        yield None, ""
        yield from _model(diagnosis.model, width)
        yield None, ""
        yield None, "Settings"
        if diagnosis.settings:
            yield from _findings(diagnosis.settings)
        else:
            yield "ok", "  ok    every given setting has an effect, and no known one hurts"
    yield None, ""
    yield None, f"{_counted(diagnosis, 'error')}, {_counted(diagnosis, 'warning')}"


def _counted(diagnosis: Diagnosis, level: Level) -> str:
    number = diagnosis.count(level)
    return f"{number} {level}" if number == 1 else f"{number} {level}s"


def _findings(findings: Iterable[Finding]) -> Iterator[Line]:
    for finding in findings:
        yield finding.level, f"  {MARKS[finding.level]:<5} {finding.topic:<14}  {finding.text}"
        if finding.hint:
            yield None, f"{' ' * LEFT}next: {finding.hint}"


def _pair(name: str, text: str) -> Iterator[Line]:
    yield None, f"  {name:<{LEFT - 4}}  {text}"


def _model(report: ModelReport, width: int) -> Iterator[Line]:
    facts = report.facts
    yield None, f"Model {facts.model}" + (f" ({facts.architecture})" if facts.architecture else "")
    if facts.source == "config":
        yield from _pair("source", "config.json only, without vLLM: block sizes are planned")
        yield from _pair("assumed", facts.assumed)
    elif facts.source == "arithmetic":
        yield from _pair(
            "source",
            "config.json, by arithmetic; --vllm asks vLLM, which also replays when a shared prefix hits",
        )
        yield from _pair("as on", facts.assumed)
    if facts.batched_tokens:
        chunk, running = (_origin(facts, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
        yield from _pair("chunk", f"{count(facts.batched_tokens)} tokens in a step: {chunk}")
        yield from _pair("max_num_seqs", f"{count(facts.max_requests)} requests in a step: {running}")
    yield from _pair("block", f"{facts.block_tokens} tokens: {block_why(facts)}")
    if facts.gpu_block_tokens:
        yield from _pair(
            "block on a GPU",
            f"{facts.gpu_block_tokens} tokens (planned: multiples of 16, states of the config's type)",
        )
    yield from _pair("block in the pool", f"{size(facts.block_bytes)} over {_layers(facts.group_layers)}")
    first = 0
    for group, alike in groupby(facts.groups):
        many = len(list(alike))
        last = first + many - 1
        what = group.kind + (f" of {group.window}" if group.window else "")
        if group.kind == "other":
            what = f"{what} ({', '.join(group.specs)})"
        if group.kind == "full attention" and any("MLA" in name for name in group.specs):
            what = f"{what} (latent)"
        pad = report.pad_share(group)
        padded = f", {pad:.1%} padding" if pad > 0.0005 else ""
        each = f"{many} x {_layers(group.layers)}" if many > 1 else _layers(group.layers)
        yield from _pair(
            f"groups {first} to {last}" if many > 1 else f"group {first}",
            f"{what}: {each}, {group.block_tokens} tokens per block{padded}{'' if group.cached else ', not cached'}",
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
        yield from _layouts(report.layouts, width)


def _origin(facts: Facts, name: str) -> str:
    why = facts.origins.get(name, "")
    return f"as given by --{name.replace('_', '-')}" if why == "flag" else why


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _retention(report: ModelReport) -> str:
    facts = report.facts
    if not facts.caching:
        return "nothing: prefix caching is off"
    if not (facts.windowed or facts.hybrid):
        whole = all(group.kind == "full attention" for group in facts.groups)
        return "every block" + (" (full attention only)" if whole else "")
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
    block = max((group.block_tokens for group in report.facts.groups if group.cached), default=floor.tokens)
    gpu = report.facts.gpu_block_tokens * floor.tokens // block
    other = f"; on a GPU {gpu} tokens" if gpu and gpu != floor.tokens else ""
    yield from _pair("smallest hit", f"a shared prefix of {floor.tokens} tokens{other}")
    yield from _pair("", floor.why)
    if floor.first_visit:
        yield from _pair("hits begin", hits_begin(floor, report.facts))
    most = max(
        (len(visit.hit_tokens) for visit in (*report.facts.shared_prefix, *report.facts.resent)), default=0
    )
    if most:
        yield from _pair("hit tokens at visit", f"{'':>17}" + "".join(f"{n:>8}" for n in range(1, most + 1)))
    for name, visits in (
        ("new suffix each time", report.facts.shared_prefix),
        ("same prompt again", report.facts.resent),
    ):
        for line in visit_lines(visits):
            yield from _pair(name, line)
            name = ""


def hits_begin(floor: Floor, facts: Facts) -> str:
    """Return at which visit of a shared prefix hits begin, with an example if some prefixes need more visits."""
    early, late = floor.first_visit, floor.last_first_visit
    if late == early:
        return f"at visit {early} of a shared prefix"
    example = next(v for v in reversed(facts.shared_prefix) if first_hits([v], floor.tokens) == [late])
    visits = ", ".join(count(tokens) for tokens in example.hit_tokens)
    return (
        f"at visit {early} of a shared prefix; at visit {late} where at least a block of the prompt follows the "
        f"last whole block that is shared. For example {count(example.prefix_tokens)} shared tokens, each time with "
        f"{example.suffix_tokens} new ones after them, hit {visits} tokens at visits 1 to {len(example.hit_tokens)}"
    )


COLUMNS = (
    Column("", right=False),
    Column("layout", right=False),
    Column("block"),
    Column("groups", rank=2),
    Column("fit"),
    Column("ratio"),
    Column("shared"),
    Column("resend"),
    Column("hits"),
    Column("pad", rank=4),
    Column("slot", rank=5),
    Column("fill", rank=6),
    Column("tail", rank=7),
)


def _layouts(layouts: Layouts, width: int) -> Iterator[Line]:
    """Yield a table of stock's layout and the packed ones. `*`: on the Pareto front; `->`: recommended."""
    load = layouts.workload or "no workload given"
    yield None, ""
    what = f"requests of {count(layouts.request_tokens)} tokens ({load}) in {size(layouts.pool_bytes)}"
    yield None, f"Block layouts, for {what}"
    rows = []
    for number, row in enumerate(layouts.rows):
        waste = row.waste
        rows.append(
            (
                ("->" if number == layouts.recommended else "  ") + ("*" if row.on_front else " "),
                row.name,
                count(row.plan.block_tokens),
                str(row.plan.groups),
                f"{row.fit:,.1f}",
                f"{row.capacity:.3f}x",
                count(row.plan.block_tokens),
                count(row.resend_tokens),
                "–" if row.hit_share is None else percent(row.hit_share),
                *(size(each) for each in (waste.page_pad, waste.state_slot, waste.padding, waste.tail)),
            )
        )
    for line in FittedTable(COLUMNS, rows, gap=2).lines(width - 2):
        yield None, f"  {line}"
    yield from _pair("fit, ratio", "requests of these lengths that run at once; their number over stock's")
    yield from _pair(
        "shared, resend",
        "hits of a shared prefix end at multiples of the first; those of a prompt sent again, or of a chat's next "
        "turn, at multiples of the second (with --prefix-match-unit)",
    )
    if layouts.workload:
        yield from _pair(
            "hits",
            "upper bound for the workload: share of its prompt tokens that an infinite cache hits if every block keeps "
            "a state. Packed blocks may keep fewer and hit less than stock's: a replay tells (--on sim)",
        )
    yield from _pair(
        "pad, slot, fill, tail",
        "wasted bytes of a running request: unused parts of state pages, the second slot of each state, padding "
        "layers and states, the last partly filled block",
    )
    row = layouts.rows[layouts.recommended]
    yield from _pair("recommended", f"{row.name} ({count(row.plan.block_tokens)} tokens): {layouts.why}")


def visit_lines(visits: Iterable[Visits]) -> Iterator[str]:
    """Yield the hits of replayed visits, one line per prefix."""
    for visit in visits:
        hits = "".join(f"{count(hit):>8}" for hit in visit.hit_tokens)
        tokens = f"{count(visit.prefix_tokens)}" + (
            f" + {visit.suffix_tokens}" if visit.suffix_tokens else ""
        )
        yield f"{tokens:>10} tokens{hits}"
