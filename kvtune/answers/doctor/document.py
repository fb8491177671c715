"""What `kvtune doctor` says of its diagnosis: what to do first, then the machine, the model and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

from kvtune.answers.doctor.diagnosis import Diagnosis
from kvtune.answers.doctor.facts import Group, Visits
from kvtune.answers.doctor.finding import Finding, Level
from kvtune.answers.doctor.model import Floor, ModelReport, block_why, first_hits
from kvtune.answers.doctor.packing import Layouts
from kvtune.answers.doctor.tier import Tier
from kvtune.answers.states.document import section as states_section
from kvtune.base.units import count, ms, percent, size
from kvtune.data.layout.forms import Form
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Banner, Document, Grid, Section, cell, grid
from kvtune.data.show.terminal import Column

Pairs = Iterator[tuple[str, str]]

MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
LAYOUTS = (
    Column("layout"),
    Column("", right=False),
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
LEGEND = {
    "fit, ratio": "requests of these lengths that run at once; their number over stock's",
    "shared, resend": "hits of a shared prefix end at multiples of the first; those of a prompt sent again, or of a "
    "chat's next turn, at multiples of the second (with --prefix-match-unit)",
    "hits": "upper bound for the workload: share of its prompt tokens that an infinite cache hits if every block keeps "
    "a state. Packed blocks may keep fewer and hit less than stock's: a replay tells (--on sim)",
    "pad, slot, fill, tail": "wasted bytes of a running request: unused parts of state pages, the second slot of each "
    "state, padding layers and states, the last partly filled block",
}


def document(diagnosis: Diagnosis) -> Document:
    report = diagnosis.model
    subject = report.model if report is not None else "this machine"
    findings = (*diagnosis.settings, *diagnosis.environment)
    errors, warnings = ([each for each in findings if each.level == level] for level in ("error", "warning"))
    return Document(
        name="kvtune doctor",
        subject=subject,
        headline=f"{subject}: {_hits(report) if report is not None else ''}"
        f"{len(errors)} error{'s' * (len(errors) != 1)}, {len(warnings)} warning{'s' * (len(warnings) != 1)}",
        sections=tuple(_sections(diagnosis)),
        identity=identity("doctor", subject, report.given if report is not None else {}),
        title=f"{subject} · doctor · kvtune",
        banners=(*(_banner(each, "bad") for each in errors), *(_banner(each, "warn") for each in warnings)),
    )


def _banner(finding: Finding, css: Literal["bad", "warn"]) -> Banner:
    return Banner(css, f"{MARKS[finding.level]} {finding.topic}", _text(finding))


def _hits(report: ModelReport) -> str:
    if report.floor is None:
        return "with these settings no prompt can ever hit; "
    return f"a shared prefix hits from {report.floor.tokens} tokens on; "


def _sections(diagnosis: Diagnosis) -> Iterator[Section]:
    report = diagnosis.model
    if report is not None:
        name = f"Model {report.model}" + (f" ({report.architecture})" if report.architecture else "")
        visits = _visits(report)
        yield Section("model", name, facts=tuple(_model(report)), tables=(visits,) if visits.rows else ())
        if any(group.request_blocks for group in report.groups):
            yield _bytes(report)
        if report.idle:
            yield _idle(report)
        if report.tier is not None:
            yield _tier(report.tier, report)
        if report.layouts is not None:
            yield _layouts(report.layouts)
        if diagnosis.states is not None:
            yield states_section(diagnosis.states)
        none = () if diagnosis.settings else ("Every given setting has an effect, and no known one hurts.",)
        yield Section("settings", "Settings", facts=tuple(_findings(diagnosis.settings)), notes=none)
    yield Section("environment", "Environment", facts=tuple(_findings(diagnosis.environment)))


def _findings(findings: Iterable[Finding]) -> Pairs:
    for finding in findings:
        if finding.level in ("ok", "note"):
            yield f"{MARKS[finding.level]:<4}  {finding.topic}", _text(finding)


def _text(finding: Finding) -> str:
    return f"{finding.text}; next: {finding.hint}" if finding.hint else finding.text


def _model(report: ModelReport) -> Pairs:
    if report.source == "config":
        yield "source", "config.json only, without vLLM: block sizes are planned"
        yield "assumed", report.assumed
    elif report.source == "arithmetic":
        yield (
            "source",
            "config.json, by arithmetic; --vllm asks vLLM, which also replays when a shared prefix hits",
        )
        yield "as on", report.assumed
    if report.batched_tokens:
        chunk, running = (_origin(report, name) for name in ("max_num_batched_tokens", "max_num_seqs"))
        yield "chunk", f"{count(report.batched_tokens)} tokens in a step: {chunk}"
        yield "max_num_seqs", f"{count(report.max_requests)} requests in a step: {running}"
    yield "block", f"{report.block_tokens} tokens: {block_why(report)}"
    if report.next_block:
        yield (
            "block in vLLM 0.33",
            f"{report.next_block} tokens: multiples of what its kernel keeps states at",
        )
    if report.gpu_block_tokens:
        planned = "planned: multiples of 16, states of the config's type"
        yield "block on a GPU", f"{report.gpu_block_tokens} tokens ({planned})"
    yield "block in the pool", f"{size(report.block_bytes)} over {_layers(report.group_layers)}"
    first = 0
    for group, alike in groupby(report.groups):
        many = len(list(alike))
        last = first + many - 1
        yield f"groups {first} to {last}" if many > 1 else f"group {first}", _group(group, many, report)
        first = last + 1
    if report.token_bytes:
        yield "one token", f"{size(report.token_bytes)} in all full-attention layers"
    if report.state_bytes:
        kept = f" in {report.state_dtype}" if report.state_dtype else ""
        yield "states of a sequence", f"{size(report.state_bytes)}{kept}"
    yield "tail waste", f"{size(report.tail_bytes)} per sequence on average (half of its last blocks)"
    if report.pool_blocks:
        why = f": {report.pool_why}" if report.pool_why else ""
        yield "pool", f"{count(report.pool_blocks)} blocks ({size(report.pool_bytes)}){why}"
    elif report.pool_why:
        yield "pool", report.pool_why
    if report.tokens_fit:
        yield "vLLM prints", _printed_size(report)
    yield "kept in the cache", _retention(report)
    if report.caching:
        unit = f"(hashed in units of {report.hash_tokens})"
        yield "hits end at", f"multiples of {report.hit_tokens} tokens {unit}"
    yield from _floor(report)
    if report.source == "vllm" and report.caching and report.hybrid:
        yield "sent again", _form(report.again, "a prompt of N tokens hits", "N", "prompts")
        yield "shared prefix", _form(report.shared, "P shared tokens hit, from visit 3 on", "P", "visits")


def _form(form: Form | None, what: str, name: str, kind: str) -> str:
    if form is None:
        return f"unknown: no closed form holds for the {kind} that were replayed"
    return f"{what} {form.text(name)} (held against {form.lengths} replayed {kind})"


def _printed_size(report: ModelReport) -> str:
    """Return what vLLM's line about the pool's size says, and what it is: a product, not what an idle cache keeps."""
    length, tokens = report.max_model_len, report.tokens_fit
    return (
        f'"KV cache size: {count(tokens)} tokens": max_model_len, {count(length)}, times the {tokens / length:.2f} '
        'requests of that length that run at once. What stays hittable: "Idle conversations"'
    )


def _origin(report: ModelReport, name: str) -> str:
    why = report.origins.get(name, "")
    return f"as given by --{name.replace('_', '-')}" if why == "flag" else why


def _group(group: Group, many: int, report: ModelReport) -> str:
    what = group.kind + (f" of {group.window}" if group.window else "")
    if group.kind == "other":
        what = f"{what} ({', '.join(group.specs)})"
    if group.kind == "full attention" and any("MLA" in name for name in group.specs):
        what = f"{what} (latent)"
    pad = report.pad_share(group)
    padded = f", {pad:.1%} padding" if pad > 0.0005 else ""
    each = f"{many} x {_layers(group.layers)}" if many > 1 else _layers(group.layers)
    cached = "" if group.cached else ", not cached"
    drafts = f" ({group.draft_layers} of the drafter)" if group.draft_layers else ""
    return f"{what}: {each}{drafts}, {group.block_tokens} tokens per block{padded}{cached}"


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _retention(report: ModelReport) -> str:
    if not report.caching:
        return "nothing: prefix caching is off"
    if not (report.windowed or report.hybrid):
        whole = all(group.kind == "full attention" for group in report.groups)
        return "every block" + (" (full attention only)" if whole else "")
    kept = "windows" if report.windowed else "states"
    if report.retention is None:
        return f"{kept} at every block boundary (dense)"
    if report.retention == 0:
        return (
            f"{kept} at the end of each prompt, and where two prompts were seen to diverge (0, the default)"
        )
    every = f"every {count(report.retention)} tokens"
    return f"{kept} {every}, at the end of each prompt and where two were seen to diverge"


def _floor(report: ModelReport) -> Pairs:
    floor = report.floor
    if floor is None:
        yield "smallest hit", "none: with these settings no prompt can ever hit"
        return
    block = max((group.block_tokens for group in report.groups if group.cached), default=floor.tokens)
    gpu = report.gpu_block_tokens * floor.tokens // block
    other = f"; on a GPU {gpu} tokens" if gpu and gpu != floor.tokens else ""
    yield "smallest hit", f"a shared prefix of {floor.tokens} tokens{other}: {floor.why}"
    if floor.first_visit:
        yield "hits begin", hits_begin(floor, report.shared_prefix)


def hits_begin(floor: Floor, shared_prefix: list[Visits]) -> str:
    """Return at which visit of a shared prefix hits begin, with an example if some prefixes need more visits."""
    early, late = floor.first_visit, floor.last_first_visit
    if late == early:
        return f"at visit {early} of a shared prefix"
    example = next(v for v in reversed(shared_prefix) if first_hits([v], floor.tokens) == [late])
    visits = ", ".join(count(tokens) for tokens in example.hit_tokens)
    return (
        f"at visit {early} of a shared prefix; at visit {late} where at least a block of the prompt follows the "
        f"last whole block that is shared. For example {count(example.prefix_tokens)} shared tokens, each time with "
        f"{example.suffix_tokens} new ones after them, hit {visits} tokens at visits 1 to {len(example.hit_tokens)}"
    )


def _visits(report: ModelReport) -> Grid:
    """Return the hits of replayed visits, a row for each prefix."""
    visits = [
        *(("new suffix each time", visit) for visit in report.shared_prefix),
        *(("same prompt again", visit) for visit in report.resent),
    ]
    most = max((len(visit.hit_tokens) for _, visit in visits), default=0)
    rows = []
    for name, visit in visits:
        suffix = f" + {visit.suffix_tokens}" if visit.suffix_tokens else ""
        tokens = [count(hits) for hits in visit.hit_tokens]
        prompt = f"{count(visit.prefix_tokens)}{suffix} tokens"
        rows.append([name, prompt, *tokens, *[""] * (most - len(tokens))])
    numbers = (Column(f"visit {number}") for number in range(1, most + 1))
    return grid((Column("hit tokens"), Column("prompt"), *numbers), rows)


def _bytes(report: ModelReport) -> Section:
    """Return what vLLM reserves for one request of max_model_len, and what flags would free of it."""
    page = report.block_bytes
    rows: list[tuple[str, ...]] = []
    for group, alike in groupby(report.groups):
        many = len(list(alike))
        blocks = many * group.request_blocks
        flying = many * min(group.request_blocks, report.in_flight_tokens // group.block_tokens)
        parts = (blocks * page, flying * page * bool(group.window), blocks * page * report.pad_share(group))
        sizes = (size(round(part)) if part else "–" for part in parts)
        rows.append(((f"{many} x " if many > 1 else "") + group.kind, count(blocks), *sizes))
    total = sum(group.request_blocks for group in report.groups) + 1
    rows += [("null block", "1", size(page), "–", "–"), ("all", count(total), size(total * page), "", "")]
    weights = [("weights of a rank", size(report.weight_bytes))] if report.weight_bytes else []
    flags = (
        (each.change, f"{size(abs(each.bytes))} {'less' if each.bytes >= 0 else 'more'}; {each.cost}")
        for each in report.freed
    )
    return Section(
        "bytes",
        "Where the bytes go",
        lead=f"What vLLM reserves for one request of {count(report.max_model_len)} tokens. In flight: up to "
        f"{count(report.in_flight_tokens)} tokens are scheduled and not done; windows keep their blocks until then.",
        tables=(grid(tuple(map(Column, ("part", "blocks", "bytes", "in flight", "padding"))), rows),),
        facts=(*weights, *flags),
    )


def _idle(report: ModelReport) -> Section:
    """Return what conversations keep in the pool that nobody runs, and how many of them stay."""
    kinds = {
        name: [n for n, group in enumerate(report.groups) if _kept_as(group) == name] for name in KEPT_AS
    }
    rows = []
    for idle in report.idle:
        kept = sum(idle.blocks)
        parts = {name: sum(idle.blocks[number] for number in numbers) for name, numbers in kinds.items()}
        most = max(parts, key=lambda name: parts[name])
        rows.append(
            (
                f"{count(idle.prompt_tokens)} tokens",
                count(idle.hit_tokens),
                f"{count(kept)} blocks, {size(kept * report.block_bytes)}",
                *(count(parts[name]) if numbers else "–" for name, numbers in kinds.items()),
                count(idle.running_blocks),
                cell(idle.conversations, count),
                cell(idle.tokens, count),
                f"{most}: {percent(parts[most], kept)}" if kept else "–",
            )
        )
    heads = (
        *map(Column, ("a prompt of", "hits", "keeps", *kinds)),
        Column("running", rank=2),
        *map(Column, ("conversations", "idle tokens")),
        Column("most of it", rank=1),
    )
    table = grid(heads, rows)
    unknown = (
        ""
        if report.pool_blocks
        else " How many a pool keeps is known with its size: --like-device, or a flag."
    )
    return Section(
        "idle",
        "Idle conversations",
        lead="Each is sent once, with an answer of 2 tokens, one after another; when nothing runs, each is sent again "
        f"and hits whole. By vLLM's own scheduler.{unknown}",
        tables=(table.filled(),),
        notes=(
            "running: the most blocks that one takes while it is computed. Running requests take theirs from the idle "
            "conversations, the one that was used longest ago first.",
        ),
    )


STORED = {
    "full attention": "every block of a prompt, none of its answer",
    "sliding window": "the window where a prompt ends",
    "state": "one state where a prompt ends",
}
"""What the native connector stores of a prompt in a group of this kind."""


def _tier(tier: Tier, report: ModelReport) -> Section:
    """Return what a tier holds, what of it loads, and whether that is quicker than computing."""
    rows = []
    for each in tier.prompts:
        loads = (cell(tokens, count) for tokens in (each.again, each.turn, each.shared))
        times = (ms(1e3 * seconds) for seconds in (each.load_s, each.compute_s))
        holds = (count(sum(each.blocks)), count(each.fit))
        rows.append((f"{count(each.tokens)} tokens", *holds, *loads, *times))
    heads = ("a prompt of", "blocks", "fit", "sent again", "next turn", "shared", "to load", "to compute")
    quicker = f"from {count(tier.break_even)} tokens on" if tier.break_even else "at no length"
    held, cost = f"{count(tier.blocks)} blocks, each of any group", tier.cost
    token = f"{ms(cost.prefill_token_us / 1e3)} to compute a token{' (--like)' * cost.fitted}"
    every = f", and every {count(report.retention)} tokens" if report.retention else ""
    kinds = dict.fromkeys(group.kind for group in report.groups if group.cached)
    fits = "" if len(kinds) == 1 and 256 % report.block_tokens == 0 else ": unknown for such blocks or groups"
    return Section(
        "tier",
        "A tier of host memory",
        lead=f"{size(tier.size_bytes)} for each engine, by the rules of vLLM 0.32's native connector. Tokens that load "
        "when the pool has evicted them; shared: another prompt begins with them, and so did the first.",
        tables=(grid(heads, rows),),
        facts=(
            ("mapped", f"{size(tier.mapped_bytes)} by all ranks: {held}"),
            ("on ROCm, or vLLM 0.26", f"{size(tier.rounded_bytes)}: each tensor is pinned as a power of two"),
            ("with SimpleCPU", f"{size(tier.simple_bytes)}; loads what the pool would hit, answers too"),
            ("with LMCache", f"chunks of 256 tokens{fits}"),
            ("with Mooncake", "what retention keeps, and no state of an answer (vllm#56972)"),
            *((f"stored of {kind}", STORED[kind] + every * (kind != "full attention")) for kind in kinds),
            ("quicker", f"{quicker}; assumed: 25 GiB/s for a rank; {token}"),
        ),
    )


KEPT_AS = ("full", "windows", "states", "drafts", "others")


def _kept_as(group: Group) -> str:
    if group.draft_layers == group.layers:
        return "drafts"
    if group.kind in ("sliding window", "chunked attention"):
        return "windows"
    return {"full attention": "full", "state": "states"}.get(group.kind, "others")


def _layouts(layouts: Layouts) -> Section:
    """Return stock's layout and the packed ones. `*`: on the Pareto front; `->`: recommended, or worth a replay."""
    load = layouts.workload or "no workload given"
    rows = []
    for number, row in enumerate(layouts.rows):
        waste = row.waste_bytes
        sign = ("->" if number == layouts.recommended else "") + ("*" if row.pareto else "")
        rows.append(
            (
                row.name,
                sign,
                count(row.block_tokens),
                str(row.groups),
                f"{row.requests_fit:,.1f}",
                f"{row.capacity:.3f}x",
                count(row.shared_prefix_tokens),
                count(row.resend_tokens),
                "–" if row.hit_share is None else percent(row.hit_share),
                *(size(each) for each in (waste.page_pad, waste.state_slot, waste.padding, waste.tail)),
            )
        )
    best = layouts.rows[layouts.recommended]
    return Section(
        "layouts",
        "Block layouts",
        lead=f"For requests of {count(layouts.request_tokens)} tokens ({load}) in {size(layouts.pool_bytes)}.",
        tables=(grid(LAYOUTS, rows),),
        facts=(
            # What packed blocks hit is a bound here: only a replay recommends them.
            (
                "worth a replay" if layouts.recommended else "recommended",
                f"{best.name} ({count(best.block_tokens)} tokens): {layouts.why}",
            ),
            *((name, text) for name, text in LEGEND.items() if layouts.workload or name != "hits"),
        ),
    )
