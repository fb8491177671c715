"""`kvtune explain-log LOG`: the text in prompts that breaks shared prefixes."""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.base.errors import EXIT_FAILED, EXIT_UNKNOWN, KvtuneError, UsageError
from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, argument, either, option

if TYPE_CHECKING:
    from kvtune.answers.explain.explanation import Explanation
    from kvtune.answers.explain.log import TextLog
    from kvtune.data.run.extras import TextAccount
    from kvtune.reading.analysis.comparison.fail_on import FailOn
    from kvtune.requests.loads.sources import Sources
    from kvtune.requests.log.rendering import Renderer
    from kvtune.requests.types import Workload

REPLAYED = "text_only bounds_only"
OF_MODEL = (
    When("the model whose cache is replayed, and its tokenizer", "text_only bounds_only"),
    When("the model whose tokenizer reads the text", "text_only tokenizer", reader="options"),
)
OF_TEXT = When("what reads the text", text_only=False, reader="options")
PASSED = either("for the texts that are passed on", "json md page output")
OF_TOKENS = When("for tokens, and bytes are not replayed at all", text_only=False)
OF_REPLAY = When("the run file of a replay", REPLAYED)


@dataclass(frozen=True, kw_only=True)
class ExplainLogQuery(Query):
    FACTS = {"reader": {"options": "a LOG that names no tokenizer"}}

    log: str = argument(MISSING, "LOG")("""A log of requests (docs/logs.md); FILE, or FILE,KEY=VALUE,.. with
        keys of the workload `requests`.""")
    model: str = option("", "MODEL", *OF_MODEL)("The model whose cache the log is replayed with.")
    tokenizer: Annotated[options.Tokenizer, OF_TEXT] = ""
    text_only: bool = option(False, When("for text that nothing reads as tokens", reader="options"))("""
        Compare UTF-8 bytes, without a tokenizer and a replay.""")
    bounds_only: bool = option(False, OF_TOKENS)("""No replay of vLLM's cache, but of one that keeps
        everything.""")
    with_text: Annotated[options.WithText, *PASSED] = False
    fail_on: str = option("", "CONDITION")("""Exit with 1 where this holds, e.g. 'diverged > 5 %' of all
        prompt tokens.""")
    mended: Path | None = option(None, "FILE", parser=options.new_log_path)(
        "Write the mended log, as token ids."
    )
    tries: Annotated[options.Tries, When("how many other settings are replayed", REPLAYED)] = 4
    core: Annotated[options.Core, When("the core that is replayed", REPLAYED)] = "kvtune"
    platform: Annotated[options.LikeDevice, When("the device that is replayed", REPLAYED)] = None
    output: Path | None = option(None, "-o,--output RUN", OF_REPLAY, parser=options.new_run_path)("""A run
        file of the replay, for report and compare.""")
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None
    flags: Annotated[Flags, When("for the engine that is replayed", REPLAYED)] = ()

    @property
    def bounded(self) -> bool:
        """Whether vLLM's cache is not replayed."""
        return self.bounds_only or self.text_only

    @property
    def spec(self) -> str:
        """The log as a workload."""
        return self.log if self.log.startswith("requests:") else f"requests:path={self.log}"

    def condition(self) -> FailOn | None:
        """Return --fail-on, read. KvtuneError for a cause that no call knows, or that a replay alone finds."""
        from kvtune.answers.explain.log import OF_BOUNDS
        from kvtune.reading.analysis.comparison.fail_on import parse_fail_on

        if not self.fail_on:
            return None
        condition = parse_fail_on(self.fail_on)
        condition.on_values(_nothing(), _nothing())
        hidden = [path for path in condition.paths if path not in OF_BOUNDS] if self.bounded else []
        if hidden:
            raise KvtuneError(
                f"--fail-on {hidden[0]!r}: without a replay kvtune cannot tell; it knows {', '.join(OF_BOUNDS)}",
                "leave --bounds-only and --text-only out, and add --model MODEL",
                EXIT_UNKNOWN,
            )
        return condition


def explain_log(query: ExplainLogQuery, lab: Lab) -> int:
    """Name the text that breaks the prefix in a log of requests, and replay what mending it brings.

    Exit codes: 1 if --fail-on holds, 3 if nothing can tell. vLLM's own flags go after `--`.
    """
    from kvtune.answers.explain.document import document
    from kvtune.answers.explain.log import TextAnswer, bounds_of, for_others, write_log
    from kvtune.cli.views.answer import print_answer

    query.refuse(reader="spec" if names_tokenizer(query.spec) else "options")
    fail_on = query.condition()
    if not query.bounded and not query.model:
        raise UsageError(
            "which model's cache is replayed is not known",
            "add --model MODEL, or --bounds-only for the text alone",
        )
    for file in (query.output, query.mended):
        if file is not None and os.path.lexists(file):
            raise UsageError(f"{file} exists", "name a new file")
    log = _read(query)
    if query.mended is not None:
        write_log(query.mended, log.mended(log.groups))
        print(f"wrote {query.mended}", file=sys.stderr)
    answer = TextAnswer(texts=bounds_of(log)) if query.bounded else _replayed(query, log, lab)
    shown = for_others(answer) if (query.json or query.md or query.page) and not query.with_text else answer
    print_answer(shown, document(shown, query.log), json=query.json, md=query.md, page=query.page)
    assert answer.texts is not None
    return _judged(fail_on, answer.texts) if fail_on is not None else 0


def names_tokenizer(spec: str) -> bool:
    """Whether a log's spec says what reads its text."""
    from kvtune.requests.loads.spec import parsed
    from kvtune.requests.types import AUTO

    return parsed(spec, 0)[1]["tokenizer"] != AUTO


def _nothing() -> dict[str, int]:
    from kvtune.data.causes import CAUSES

    return dict.fromkeys(("hit", *CAUSES), 0)


def _judged(condition: FailOn, account: TextAccount) -> int:
    """Return the exit code of --fail-on, and print why it holds."""
    values = {**_nothing(), "hit": account.hit_tokens, **account.misses}
    shares = {cause: 100 * tokens / max(1, account.query_tokens) for cause, tokens in values.items()}
    outcome = condition.on_values(values, shares)
    for reason in outcome.reasons:
        print(f"failed: {reason}", file=sys.stderr)
    return EXIT_FAILED if outcome.holds else 0


def _spec(query: ExplainLogQuery) -> str:
    """Return the log as a workload that names what reads its text."""
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.spec import with_tokenizer
    from kvtune.requests.types import BYTES

    named = BYTES if query.text_only else query.tokenizer or tokenizer_of(query.model)
    return with_tokenizer(query.spec, named)


def _read(query: ExplainLogQuery) -> TextLog:
    from kvtune.answers.explain.log import read
    from kvtune.requests.loads.requests_file import selected
    from kvtune.requests.loads.sources import Sources
    from kvtune.requests.loads.spec import parsed
    from kvtune.requests.types import AUTO, BYTES

    values = parsed(_spec(query), 0)[1]
    tokenizer = str(values["tokenizer"])
    sources = Sources()
    path = Path(str(values["path"])).expanduser()
    rows = selected(
        path,
        sources.render(tokenizer),
        limit=int(values["limit"]),
        since=float(values["since"]),
        until=float(values["until"]),
    )
    if tokenizer == BYTES and any(max(row.prompt) > 255 for row in rows):
        raise UsageError(
            f"{path} has token ids, and its text is not known", "leave --text-only out, and add --bounds-only"
        )
    # What shows text takes long to begin, and a log that cannot be read needs none.
    renderer = renderer_of("" if tokenizer == AUTO else tokenizer, sources)
    text = renderer.text if renderer is not None else None
    return read(rows, text, bytes_=tokenizer == BYTES)


def _workloads(query: ExplainLogQuery, log: TextLog) -> tuple[Workload, Workload]:
    """Return the log as a workload, and the same requests when they were sent."""
    from kvtune.requests.loads.requests_file import draft
    from kvtune.requests.loads.spec import as_sent, made, parsed

    spec = _spec(query)
    kind, values = parsed(spec, 0)
    plan = draft(log.rows, speed=float(values["speed"]), concurrency=int(values["concurrency"]))
    unchanged = as_sent(spec)
    sent = made(kind, unchanged, parsed(unchanged, 0)[1], draft(log.rows))
    return made(kind, spec, values, plan), sent


def renderer_of(tokenizer: str, sources: Sources) -> Renderer | None:
    """Return the tokenizer's renderer. If that fails, print why and return None: logs of token ids do not need it."""
    try:
        return sources.renderer(tokenizer) if tokenizer else None
    except KvtuneError as error:
        print(f"no text is shown: {error.message}", file=sys.stderr)
        return None


def _replayed(query: ExplainLogQuery, log: TextLog, lab: Lab) -> Explanation:
    from msgspec.structs import replace

    from kvtune.answers.explain.document import OTHER_CORE
    from kvtune.answers.explain.explanation import Bench
    from kvtune.answers.explain.log import as_logged, explained_log, for_others
    from kvtune.answers.explain.speed import Times
    from kvtune.base.units import count
    from kvtune.cli.views.progress import ProgressView, Replays
    from kvtune.data.run.file import write_run
    from kvtune.lab.setup.setup import Load, Setup, Simulated
    from kvtune.lab.sim.routing import routing

    workload, sent = _workloads(query, log)
    setup = Setup(
        model=query.model,
        load=Load.of(workload),
        core=query.core,
        engine_args=list(query.flags),
        device=Simulated(**routing(workload)._asdict()),
        platform=query.platform,
    ).sized()
    requests = len(workload.requests)
    with (
        ProgressView(requests, query.model) as progress,
        lab.simulators(setup.model, setup.platform) as simulators,
    ):
        view = Replays(progress)
        view.phase(f"replaying {count(requests)} requests without a model")
        run = simulators.replay(setup, view.progress)
        logged = as_logged(run, log, compared=setup.core == "stock")
        bench = Bench(simulators, logged, view, setup, query.model, log.edges, of="log")
        if log.timed:
            bench = bench.as_fast_as(Times.of(logged.table("requests")), sent)
            run = simulators.replay(bench.setup, view.progress)
        explanation = explained_log(bench, log, query.tries)
        if setup.core != "stock" and any(row.hit >= 0 for row in log.rows):
            explanation = replace(explanation, notes=(*explanation.notes, OTHER_CORE))
    if query.output is not None:
        kept = explanation if query.with_text else for_others(explanation)
        stored = run.with_extra(
            misses=dict(kept.prefix_cache.misses), replayed=kept.replayed, texts=kept.texts
        )
        write_run(stored, query.output, new=True)
        print(f"wrote {query.output}{' with texts of prompts' if query.with_text else ''}", file=sys.stderr)
    return explanation
