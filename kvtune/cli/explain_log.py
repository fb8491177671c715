"""`kvtune explain -w requests:path=LOG`: the text in prompts that breaks shared prefixes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune.cli import options
from kvtune.errors import EXIT_FAILED, EXIT_UNKNOWN, KvtuneError, UsageError

if TYPE_CHECKING:
    from kvtune.engine.setup import Setup
    from kvtune.explain.explanation import Explanation
    from kvtune.explain.log import TextLog
    from kvtune.explain.replays import View
    from kvtune.run.extras import TextAccount
    from kvtune.run.types import Run
    from kvtune.sim.simulators import Simulators
    from kvtune.workload.rendering import Renderer
    from kvtune.workload.types import Workload

WIDTH = 110
OTHER_CORE = (
    "not compared with the hits that the log's server reported: this is a replay of kvtune's core; add --core stock, "
    "and the server's flags after `--`"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options. `bounds_only`: do not replay vLLM's cache."""

    spec: str
    model: str
    tokenizer: str
    text_only: bool
    bounds_only: bool
    with_text: bool
    fail_on: str
    core: str
    like_device: str
    flags: Sequence[str]
    output: Path | None
    mended: Path | None
    tries: int
    json: bool


def explain_log(asked: Asked) -> int:
    """Run the command and return its exit code: 1 if --fail-on holds, 3 if nothing can tell, else 0."""
    from kvtune.analysis.comparison.fail_on import parse_fail_on
    from kvtune.causes import CAUSES
    from kvtune.explain.log import OF_BOUNDS, bounds_of, without_text, write_log
    from kvtune.report.console.summary import print_section
    from kvtune.report.sections.text import drawn

    fail_on = parse_fail_on(asked.fail_on) if asked.fail_on else None
    nothing = dict.fromkeys(("hit", *CAUSES), 0)
    if fail_on is not None:
        fail_on.on_values(nothing, nothing)  # a wrong name is refused before the replays
    if asked.spec.partition(":")[0].strip() != "requests":
        raise UsageError(
            f"the workload {asked.spec.partition(':')[0]} has no text",
            "explain a log of requests: -w requests:path=LOG",
        )
    if not asked.model and not asked.bounds_only and not asked.text_only:
        raise UsageError(
            "which model's cache is replayed is not known",
            "add --model MODEL, or --bounds-only for the text alone",
        )
    if asked.output is not None and (asked.bounds_only or asked.text_only):
        raise UsageError("-o writes the run file of a replay", "leave --bounds-only and --text-only out")
    bounded = asked.bounds_only or asked.text_only
    hidden = [path for path in fail_on.paths if path not in OF_BOUNDS] if fail_on and bounded else []
    if hidden:
        raise KvtuneError(
            f"--fail-on {hidden[0]!r}: without a replay kvtune cannot tell; it knows {', '.join(OF_BOUNDS)}",
            "leave --bounds-only and --text-only out, and add --model MODEL",
            EXIT_UNKNOWN,
        )
    for file in (asked.output, asked.mended):
        if file is not None and os.path.lexists(file):
            raise UsageError(f"{file} exists", "name a new file")
    workload, sent, log = _read(asked)
    if asked.mended is not None:
        write_log(asked.mended, log.mended(log.groups))
        print(f"wrote {asked.mended}", file=sys.stderr)
    explanation: Explanation | None = None
    if asked.bounds_only or asked.text_only:
        account = bounds_of(log)
    else:
        account, explanation = _replayed(asked, workload, sent, log)
    if asked.json:
        from msgspec import to_builtins

        from kvtune.explain.text import to_json

        shown = account if asked.with_text else without_text(account)
        options.print_json(
            {**(to_json(explanation) if explanation else {"schema": 1}), "texts": to_builtins(shown)}
        )
    else:
        from kvtune.explain.text import lines
        from kvtune.terminal import width

        if explanation is not None:
            for line in lines(explanation, min(WIDTH, width(WIDTH))):
                print(line)
            print()
        print_section(drawn(account), width=WIDTH)
    if fail_on is None:
        return 0
    values = {**nothing, "hit": account.hit_tokens, **account.misses}
    shares = {cause: 100 * tokens / max(1, account.query_tokens) for cause, tokens in values.items()}
    outcome = fail_on.on_values(values, shares)
    for reason in outcome.reasons:
        print(f"failed: {reason}", file=sys.stderr)
    return EXIT_FAILED if outcome.holds else 0


def _read(asked: Asked) -> tuple[Workload, Workload, TextLog]:
    """Return the log as a workload, the same requests when they were sent, and its text."""
    from kvtune.engine.resolve import tokenizer_of
    from kvtune.explain.log import read
    from kvtune.workload.rendering import AUTO, BYTES, rendered_by
    from kvtune.workload.requests_file import draft, selected
    from kvtune.workload.spec import as_sent, made, parsed, with_tokenizer

    named = "bytes" if asked.text_only else asked.tokenizer or tokenizer_of(asked.model)
    spec = with_tokenizer(asked.spec, named)
    kind, values = parsed(spec, 0)
    tokenizer = str(values["tokenizer"])
    known = renderer_of("" if tokenizer == AUTO else tokenizer)
    path = Path(str(values["path"])).expanduser()
    rows = selected(
        path,
        rendered_by(tokenizer),
        limit=int(values["limit"]),
        since=float(values["since"]),
        until=float(values["until"]),
    )
    if tokenizer == BYTES and any(max(row.prompt) > 255 for row in rows):
        raise UsageError(
            f"{path} has token ids, and its text is not known", "leave --text-only out, and add --bounds-only"
        )
    plan = draft(path, rows, speed=float(values["speed"]), concurrency=int(values["concurrency"]))
    text = known.text if known is not None else None
    workload = made(kind, spec, values, plan)
    unchanged = as_sent(spec)
    sent = made(kind, unchanged, parsed(unchanged, 0)[1], draft(path, rows))
    return workload, sent, read(path, rows, text, bytes_=tokenizer == BYTES)


def renderer_of(tokenizer: str) -> Renderer | None:
    """Return the tokenizer's renderer. If that fails, print why and return None: logs of token ids do not need it."""
    from kvtune.errors import KvtuneError
    from kvtune.workload.rendering import renderer

    try:
        return renderer(tokenizer) if tokenizer else None
    except KvtuneError as error:
        print(f"no text is shown: {error.message}", file=sys.stderr)
        return None


def _run(simulators: Simulators, workload: Workload, setup: Setup, view: View) -> Run:
    from kvtune.errors import KvtuneError

    ((_, run),) = simulators.map(workload, [setup], view.progress)
    if isinstance(run, KvtuneError):
        raise run
    return run


def _replayed(
    asked: Asked, workload: Workload, sent: Workload, log: TextLog
) -> tuple[TextAccount, Explanation]:
    from kvtune.cli.settings import core_choice
    from kvtune.engine.setup import Load, Setup, Simulated
    from kvtune.explain.explanation import Bench, explained
    from kvtune.explain.log import account_of, as_logged, with_gains, without_text
    from kvtune.explain.speed import Times
    from kvtune.explain.text import ConsoleView
    from kvtune.run.file import write_run
    from kvtune.sim.simulators import Simulators
    from kvtune.units import count

    setup = Setup(
        model=asked.model,
        load=Load.of(workload),
        core=core_choice(asked.core),
        engine_args=list(asked.flags),
        device=Simulated(),
        platform=options.like_device(asked.like_device, on="sim"),
    ).sized()
    view = ConsoleView()
    with Simulators(model=setup.model, platform=setup.platform) as simulators:
        view.phase(f"replaying {count(len(workload.requests))} requests without a model")
        run = _run(simulators, workload, setup, view)
        logged = as_logged(run, log, compared=setup.core == "stock")
        bench = Bench(simulators, logged, workload, view, setup, asked.model, log.after, of="log")
        if log.timed:
            bench = bench.as_fast_as(Times.of(logged.table("requests")), sent)
            run = _run(simulators, workload, bench.setup, view)
        explanation = explained(bench, asked.tries)
        if setup.core != "stock" and any(row.hit >= 0 for row in log.rows):
            explanation = replace(explanation, notes=(*explanation.notes, OTHER_CORE))
        account = with_gains(account_of(log, explanation), log, bench, asked.tries)
        explanation = replace(explanation, texts=account)
    if asked.output is not None:
        kept = account if asked.with_text else without_text(account)
        stored = run.with_extra(misses=dict(explanation.misses), replayed=explanation.replayed, texts=kept)
        write_run(stored, asked.output, new=True)
        print(f"wrote {asked.output}{' with texts of prompts' if asked.with_text else ''}", file=sys.stderr)
    return account, explanation
