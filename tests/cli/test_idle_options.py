"""No option is ignored: what a user gives is read on the way that the command takes, or refused before any work.

Every pair of options of every command is given in every situation (an engine's run or a server's recording, one run
file or several, ..). The work itself is replaced; what is recorded is which of the query's fields the command reads.
A field may be read and then not be used by the work, so IDLE names the calls that no reading shows.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvtune import analysis, bounds, cli, doctor, explain, report, text, watch, workload
from kvtune import run as run_files
from kvtune import tune as tuning
from kvtune.cli.profile import ProfileQuery
from kvtune.cli.query import VLLM, Query, declared
from kvtune.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.run.extras import ServerAccount
from kvtune.run.file import read_run, write_run
from tests.golden import studies
from tests.simulator import run as kvtune
from tests.tools.doc_tables import commands

for _room in (analysis, bounds, cli, doctor, explain, report, run_files, text, tuning, watch, workload):
    for _module in pkgutil.walk_packages(_room.__path__, f"{_room.__name__}."):
        importlib.import_module(_module.name)  # now, so that no module keeps what replaces its imports below

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = GOLDEN / "schema1-real.kvrun"

VALUES: dict[str, list[str]] = {
    "ablate_only": ["freeze"],
    "events": ["ipc:///tmp/x"],
    "fail_on": ["hit > 1"],
    "header": ["A: b"],
    "knobs": ["stream_interval"],
    "like": ["run.kvrun"],
    "like_device": ["h100"],
    "listen": ["tcp://127.0.0.1:9"],
    "metrics": ["9000"],
    "objective": ["hit-rate", "ceiling"],
    "pools": ["100"],
    "set_": ["core.slack=64"],
    "slo": ["ttft=500"],
    "study": ["s.jsonl", "sqlite:///s.db"],
    "tier": ["1x"],
    "trace": ["log.jsonl"],
    "workload": ["rounds:prefixes=1,prefix=64,output=2,rounds=2"],
}
"""What is given to an option that takes text; the others get a file or a small number."""


@dataclass(frozen=True)
class At:
    """A situation: the words that stand before the options, and what is replaced beside WORK."""

    words: tuple[str, ...] = ()
    work: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)


def mock(**attributes: Any) -> MagicMock:
    return MagicMock(**attributes)


def entered(value: Any) -> Callable[..., Any]:
    """What takes the place of a context manager."""
    return lambda *args, **named: nullcontext(value)


def recipe_of(recipe: str, set_: list[str], flags: list[str], **named: Any) -> Any:
    return mock(core="kvtune", core_settings={}, flags=flags, alone=frozenset())


def ablated(sides: Any, *args: Any, **named: Any) -> Any:
    sides[0].runs.append(Path("run.kvrun"))
    return mock(why="", error=None)


def exporter(new: Callable[[], object], say: object) -> Any:
    new()
    return mock()


def objective_named(name: str, **named: Any) -> Any:
    simulated = name != "ceiling"
    return mock(replayed=simulated, all=(mock(simulated=simulated, timed=False),))


PROFILE = {
    "kvtune.cli.settings.with_recipe": recipe_of,
    "kvtune.cli.settings.say_other_pool": mock(),
    "kvtune.cli.profile.warn_of_packing": mock(),
    "kvtune.workload.spec.build": mock(return_value=mock(requests=[])),
    "kvtune.engine.resolve.resolve": mock(),
    "kvtune.engine.profile.EngineBench": mock(return_value=mock(run=mock(return_value=mock(error=None)))),
    "kvtune.engine.setup.Load": mock(),
    "kvtune.engine.setup.Setup": mock(),
    "msgspec.structs.replace": lambda made, **changes: made,
    "kvtune.sim.profile.SimulatorBench": mock(return_value=mock(run=mock(return_value=mock(error=None)))),
    "kvtune.cli.ablate.check_output": mock(),
    "kvtune.cli.ablate.variants": lambda setup, only: [mock(runs=[], failed="")],
    "kvtune.cli.views.plan.engine_plan": mock(),
    "kvtune.cli.views.plan.say_device": mock(),
    "kvtune.cli.views.plan.say_loss": mock(),
    "kvtune.cli.views.results.show": mock(),
    "kvtune.cli.ablate.experiment": ablated,
    "kvtune.cli.ablate._store": mock(),
    "kvtune.cli.ablate._tell_plan": mock(),
    "kvtune.cli.ablate.print_json": mock(),
    "kvtune.cli.ablate.open_page": mock(),
    "kvtune.cli.ablate.run_files": mock(),
    "kvtune.cli.ablate.folder_of": mock(),
    "kvtune.analysis.comparison.ablation.stored": mock(),
    "kvtune.report.pages.run.run_page": mock(return_value=""),
    "kvtune.report.sections.ablation.section": mock(),
    "kvtune.show.charts.warm_up": mock(),
    "kvtune.run.signature.run_identity": mock(),
    "kvtune.run.signature.write_own": mock(),
}
EXPLAIN = {
    "kvtune.explain.explanation.bench_of": entered(mock()),
    "kvtune.explain.explanation.explained": mock(),
    "kvtune.explain.explanation.with_misses": mock(),
    "kvtune.explain.log.of_run": mock(),
    "kvtune.explain.log.account_of": mock(),
    "kvtune.explain.log.with_gains": mock(),
    "kvtune.explain.log.without_text": mock(),
    "kvtune.explain.text.lines": mock(return_value=[]),
    "kvtune.explain.text.to_json": mock(return_value={}),
    "kvtune.cli.explain._store": mock(),
    "kvtune.cli.explain.replace": lambda made, **changes: made,
    "kvtune.cli.explain_log.renderer_of": mock(),
    "kvtune.report.sections.text.drawn": mock(),
    "msgspec.to_builtins": lambda value: {},
}
LOGGED = {
    **EXPLAIN,
    "kvtune.cli.explain_log.replace": lambda made, **changes: made,
    "kvtune.cli.explain_log._run": mock(),
    "kvtune.cli.explain_log._judged": mock(return_value=0),
    "kvtune.engine.setup.Load": mock(),
    "kvtune.engine.setup.Setup": mock(return_value=mock(sized=mock(return_value=mock(core="stock")))),
    "kvtune.explain.explanation.Bench": mock(),
    "kvtune.explain.log.as_logged": mock(),
    "kvtune.explain.log.bounds_of": mock(),
    "kvtune.explain.log.read": mock(),
    "kvtune.explain.log.write_log": mock(),
    "kvtune.explain.speed.Times": mock(),
    "kvtune.run.file.write_run": mock(),
    "kvtune.workload.requests_file.draft": mock(),
    "kvtune.workload.requests_file.selected": mock(return_value=[]),
    "kvtune.workload.spec.made": mock(return_value=mock(requests=[])),
}
STUDY = {
    "kvtune.tune.trials.setup.set_up": mock(return_value=(mock(engine_args=[]), mock(), mock())),
    "kvtune.tune.trials.setup.behind_server": lambda setup: setup,
    "kvtune.tune.trials.setup.study_path": mock(return_value=Path("s.jsonl")),
    "kvtune.tune.trials.setup.stored_study_path": mock(return_value=Path("s.jsonl")),
    "kvtune.tune.trials.setup.workload_spec": mock(),
    "kvtune.tune.trials.journal.StudyJournal": entered(mock(trials=[])),
    "kvtune.tune.objective.objective": objective_named,
    "kvtune.tune.sweep.refuse_foreign_outputs": mock(),
    "kvtune.analysis.study.study_identity": mock(),
    "kvtune.cli.views.plan.announce_study": mock(),
    "kvtune.cli.views.plan.say_unknown": mock(),
    "kvtune.cli.views.trials.TrialsView": entered(mock()),
    "kvtune.cli.views.trials.finish": mock(),
    "kvtune.knobs.that_serves": mock(return_value=False),
    "kvtune.workload.spec.build": mock(),
}
SWEEP = {
    **STUDY,
    "kvtune.tune.space.grid.build_space": mock(),
    "kvtune.tune.space.grid.choose": mock(),
    "kvtune.tune.space.grid.engine_only": mock(),
    "kvtune.tune.space.grid.needs_tier": mock(),
    **{
        f"kvtune.tune.sweep.{name}": mock()
        for name in ("planned_trials", "run_sim", "run_engine", "result", "fail_if_none")
    },
    "kvtune.tune.sweep.pool_that_hits": mock(return_value=""),
}
TUNE = {
    **STUDY,
    "kvtune.tune.tune.TuneSettings": mock(),
    "kvtune.tune.tune.tried_without_replays": mock(return_value=[]),
    "kvtune.tune.tune.tune": mock(),
}
SERVER = {
    "kvtune.watch.server.Server": mock(),
    "kvtune.watch.watching.Watching": mock(),
    "kvtune.watch.screen.View": mock(),
    "kvtune.watch.screen.page": mock(return_value=[]),
    "kvtune.watch.export.Exporter": exporter,
    "kvtune.cli.record.recorded_server": mock(return_value=(mock(header=mock(notes=[])), None)),
    "kvtune.cli.record._written": mock(),
    "kvtune.cli.explain._print_server": mock(),
    "kvtune.cli.watch.time": mock(monotonic=iter(range(10**9)).__next__),
    "msgspec.to_builtins": lambda value: {},
}
REPORT = {
    "kvtune.analysis.rebuild.with_workload": lambda run, trace: (run, None),
    "kvtune.report.pages.run.run_page": mock(return_value=""),
    "kvtune.report.pages.run.compare_page": mock(return_value=""),
    "kvtune.report.pages.study.study_page": mock(return_value=""),
    "kvtune.report.contrast.contrast": mock(),
    "kvtune.report.console.summary.print_summary": mock(),
    "kvtune.report.console.comparison.print_comparison": mock(),
    "kvtune.cli.views.trials.print_results": mock(),
    "kvtune.cli.views.browser.open_page": mock(),
    "kvtune.report.files.write_new": mock(),
}
COMPARE = {
    "kvtune.analysis.rebuild.workload_of": mock(),
    "kvtune.analysis.comparison.average.average": mock(),
    "kvtune.analysis.comparison.fail_on.parse_fail_on": mock(return_value=mock(timed=[])),
    "kvtune.report.contrast.contrast": mock(return_value=mock(sides=[mock()])),
    "kvtune.report.console.comparison.plain": mock(return_value={}),
    "kvtune.report.console.comparison.markdown": mock(return_value=""),
    "kvtune.report.console.comparison.print_comparison": mock(),
    "kvtune.report.servers.servers": mock(),
}
VERIFY = {
    "kvtune.cli.views.plan.announce_study": mock(),
    "kvtune.cli.views.trials.TrialsView": entered(mock()),
    "kvtune.engine.setup.Setup.of_recipe": mock(return_value=mock(engine_args=[])),
    "kvtune.recipe.sessions_of": mock(return_value=None),
    "kvtune.tune.recipes.shelf.find": mock(),
    "kvtune.tune.recipes.verify.refuse_foreign": mock(),
    "kvtune.tune.recipes.verify.verify": mock(return_value={"holds": True, "text": ""}),
    "kvtune.workload.spec.build": mock(),
}


def of_status(status: str) -> dict[str, Any]:
    return {
        **VERIFY,
        "kvtune.tune.recipes.shelf.load": lambda path: mock(recipe=mock(status=status)),
    }


SITUATIONS: dict[str, list[At]] = {
    "profile": [At(("tiny-opt",), PROFILE)],
    "explain": [At(("run.kvrun",), EXPLAIN), At(("log.kvrun",), EXPLAIN), At(("server.kvrun",), EXPLAIN)],
    "explain-log": [
        At(("log.jsonl", "--model", "tiny-opt"), LOGGED),
        At(("log.jsonl", "--bounds-only"), LOGGED),
        At(("log.jsonl", "--text-only"), LOGGED),
        At(("log.jsonl,tokenizer=bytes", "--bounds-only"), LOGGED),
    ],
    "sweep": [At(("tiny-opt",), SWEEP)],
    "tune": [At(("tiny-opt",), TUNE)],
    "bounds": [
        At(
            ("-w", VALUES["workload"][0]),
            {
                "kvtune.workload.spec.build": mock(),
                "kvtune.bounds.ladder.bounds": mock(),
                "kvtune.bounds.document.bounds_document": mock(),
                "kvtune.cli.views.answer.print_answer": lambda answer, document, json, md: None,
                "kvtune.bounds.given.shape_named": mock(),
                "kvtune.cli.views.plan.say_loss": mock(),
            },
        )
    ],
    "doctor": [
        At(
            words,
            {
                "kvtune.doctor.diagnosis.examine": mock(return_value=mock(exit_code=lambda level: 0)),
                "kvtune.doctor.text.lines": mock(return_value=[]),
                "kvtune.cli.options.print_json": mock(),
            },
            {"fail_on": ["note"]},
        )
        for words in ((), ("tiny-opt",))
    ],
    "compare": [At(("run.kvrun", "sim.kvrun"), COMPARE)],
    "report": [At(words, REPORT) for words in (("run.kvrun",), ("run.kvrun", "sim.kvrun"), ("study.jsonl",))],
    "runs": [
        At(
            ("run.kvrun",),
            {"kvtune.run.folder.belongings": mock(return_value=[])},
            {"state": ["complete"]},
        )
    ],
    "export": [
        At(
            ("run.kvrun", *words),
            {
                "kvtune.report.export.csv.write_csv": mock(return_value=[]),
                "kvtune.report.files.write_new": mock(),
            },
        )
        for words in ((), ("--csv",), ("--perfetto",))
    ],
    "recipe list": [At()],
    "recipe show": [At(("tiny-gemma3-cpu",))],
    "recipe verify": [At(("x",), of_status("confirmed")), At(("x",), of_status("simulated"))],
    "recipe export": [At(("tiny-gemma3-cpu",), {"kvtune.tune.recipes.shelf.export": mock(return_value=[])})],
    "serve": [
        At(
            ("tiny-opt",),
            {
                "kvtune.children.become": mock(),
                "kvtune.engine.resolve.check_engine": mock(),
                "kvtune.tune.recipes.serving.serving": mock(return_value=mock(notes=[])),
                "kvtune.tune.recipes.shelf.find": mock(),
            },
        )
    ],
    "prepare": [At(("gemma3-270m",), {"kvtune.engine.gemma": mock(NAME="gemma3-270m")})],
    "watch": [At((), SERVER), At(("http://127.0.0.1:9",), SERVER)],
    "record": [At(("http://127.0.0.1:9", "-o", "new.kvrun"), SERVER)],
    "schema": [At(("profile",))],
    "tap": [
        At(("http://127.0.0.1:9",), {"kvtune.tap.command.run": mock(), "kvtune.tap.command.address": mock()})
    ],
    "capacity": [
        At(
            ("tiny-opt", "-w", VALUES["workload"][0]),
            {
                "kvtune.workload.spec.session_load": mock(),
                "kvtune.engine.setup.Setup": mock(),
                "kvtune.lab.LAB": mock(simulators=entered(mock())),
                "kvtune.cli.settings.with_recipe": recipe_of,
                "kvtune.tune.recipes.sessions.Saving": mock(),
                "kvtune.capacity.question.answer": mock(),
                "kvtune.capacity.question.Question": mock(),
                "kvtune.capacity.document.document": mock(),
                "kvtune.cli.views.answer.print_answer": lambda answer, document, json, md: None,
                "kvtune.cli.views.answer.write_page": lambda document, path: None,
                "kvtune.run.signature.write_own": mock(),
                "kvtune.cli.views.plan.say_device": mock(),
                "kvtune.cli.options.print_json": mock(),
                "msgspec.structs.replace": lambda made, **changes: made,
                "msgspec.to_builtins": lambda value: {},
            },
            {"cost": ["token=0.1,step=9"], "keep": ["80%"]},
        )
    ],
    "trace": [
        At(
            ("-w", VALUES["workload"][0]),
            {
                "kvtune.bounds.loads.of_workload": mock(),
                "kvtune.bounds.document.load_document": mock(),
                "kvtune.cli.views.answer.print_answer": lambda answer, document, json, md: None,
                "kvtune.cli.options.print_json": mock(),
                "msgspec.to_builtins": lambda value: {},
            },
        )
    ],
}
ALWAYS = {
    "kvtune.explain.text.ConsoleView": mock(),
    "kvtune.sim.simulators.Simulators": entered(mock()),
    "kvtune.cli.views.progress.ProgressView": entered(mock()),
    "kvtune.report.console.summary.print_section": mock(),
    "kvtune.extras.require": mock(),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idle")
    shutil.copy(RUN, folder / "run.kvrun")
    shutil.copy(GOLDEN / "schema1-sim.kvrun", folder / "sim.kvrun")
    run = read_run(RUN)
    write_run(run.with_extra(server=ServerAccount()), folder / "server.kvrun")
    workload = SimpleNamespace(**{name: getattr(run.header.workload, name) for name in ("spec", "hash")})
    assert workload.spec
    (folder / "log.jsonl").write_text('{"prompt": [1, 2, 3, 4], "answer": [5], "t0": 1.0, "t1": 2.0}\n')
    (folder / "study.jsonl").write_bytes(studies.journal(studies.grid_study()))
    import msgspec

    of_log = msgspec.structs.replace(run.header.workload, name="requests")
    header = msgspec.structs.replace(run.header, workload=of_log)
    write_run(type(run)(header, run.tables), folder / "log.kvrun")
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, files: Path) -> Iterator[set[str]]:
    """The fields of the query that a command has read since it was made."""
    seen: set[str] = set()
    plain, made = Query.__getattribute__, Query.from_cli.__func__  # type: ignore[attr-defined]

    def noted(self: Query, name: str) -> Any:
        seen.add(name)
        return plain(self, name)

    monkeypatch.setattr(Query, "__getattribute__", noted)

    def from_cli(cls: type[Query], *args: Any) -> Query:
        query: Query = made(cls, *args)
        seen.clear()
        return query

    monkeypatch.setattr(Query, "from_cli", classmethod(from_cli))
    monkeypatch.chdir(files)
    for name, work in ALWAYS.items():
        monkeypatch.setattr(name, work)
    yield seen


Given = tuple[str, list[str]]
"""A field, and the words that give it."""


def given(command: Any, at: At) -> list[Given]:
    """Every option of a command that the situation does not give, with each of its values."""
    found: list[Given] = []
    for name, declared_field in declared(command.callback.query).items():
        if declared_field.spelled == VLLM:
            found.append((name, ["--", "--block-size", "16"]))
            continue
        parameter = next(p for p in command.params if p.name == name)
        if parameter.param_type_name != "option" or set(parameter.opts) & set(at.words):
            continue
        option = max(parameter.opts, key=len)
        values = at.values.get(name) or declared_field.words or VALUES.get(name)
        if parameter.is_flag:
            found += [(name, [word]) for word in (option, *parameter.secondary_opts)]
        elif values:
            found += [(name, [option, value]) for value in values]
        else:
            takes_text = declared_field.type is str or "Path" in str(declared_field.type)
            found.append((name, [option, "made.x" if takes_text else "5"]))
    return found


def tried(command: Any, name: str, at: At, options: tuple[Given, ...]) -> UsageError | None:
    """Run a command with these options. Return its refusal; None if it went on."""
    before = [word for _, words in options if words[0] != "--" for word in words]
    after = [word for _, words in options if words[0] == "--" for word in words[1:]]
    try:
        with command.make_context(name, [*at.words, *before], obj=after) as context:
            command.invoke(context)
    except KvtuneError as error:
        if error.exit_code == EXIT_USAGE:
            return error  # type: ignore[return-value]
    return None


COMMANDS = dict(commands())


def test_every_command_has_a_query_and_a_situation() -> None:
    assert set(SITUATIONS) == set(COMMANDS)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, id=" ".join((name, *at.words)))
        for name, all_ in SITUATIONS.items()
        for at in all_
    ],
)
def test_no_option_is_ignored_alone_or_beside_another(
    name: str, at: At, read: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, work in at.work.items():
        monkeypatch.setattr(path, work)
    command = COMMANDS[name]
    options = given(command, at)
    ignored, refused = [], {}
    for pair in [*((one,) for one in options), *combinations(options, 2)]:
        if len(pair) == 2 and pair[0][0] == pair[1][0]:
            continue
        why = tried(command, name, at, pair)
        if why is None:
            ignored += [(field, pair) for field, _ in pair if field not in read]
        else:
            refused[" ".join(word for _, words in pair for word in words)] = why
    assert not ignored, ignored[:5]
    for line, why in refused.items():
        assert why.message and why.hint, line


IDLE = {
    "watch http://127.0.0.1:9 --board": "URL",
    "profile m --anyway": "--anyway",
    "serve m --anyway": "--anyway",
    "sweep m -w rounds --trace x": "--trace",
    "sweep m --gc": "--gc",
    "sweep m --on both --like-device h100": "--like-device",
    "tune m -w rounds --trace x": "--trace",
    "tune m --trials 3 --objective ceiling": "--trials",
    "tune m --finalists 3 --objective ceiling": "--finalists",
    "tune m --finalists 3 --on sim": "--finalists",
    "tune m --rounds 3 --on sim": "--rounds",
    "tune m --rounds 3 --study sqlite:///x.db --join": "--rounds",
    "tune m --budget 3 --on sim": "--budget",
    "tune m --join": "--join",
    "tune m --join --study x.jsonl": "--join",
    "tune m --guard rounds --objective ceiling": "--guard",
    "tune m --guard rounds --study sqlite:///x.db --join": "--guard",
    "tune m --gc --on sim": "--gc",
    "tune m --gc --core stock": "--gc",
    "tune m --knobs stream_interval": "--knobs",
    "tune m --recipe r.toml --study sqlite:///x.db --join": "--recipe",
    "tune m --like-device h100": "--like-device",
    "bounds -w rounds --trace x": "--trace",
    "explain-log x,tokenizer=bytes --text-only": "--text-only",
    "explain-log x --text-only --bounds-only": "--bounds-only",
    "doctor -w rounds": "--workload",
    "doctor --vllm": "--vllm",
    "doctor --like-device h100": "--like-device",
    "doctor -- --block-size 16": VLLM,
    "compare a b -- --block-size 16": "compare takes nothing after --",
}


@pytest.mark.parametrize("line", IDLE)
def test_an_idle_option_is_named_with_the_reason_and_what_to_do(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(line.split()) == EXIT_USAGE
    what, what_to_do = capsys.readouterr().err.splitlines()
    assert what.startswith(f"kvtune: {IDLE[line]}") or f"kvtune {IDLE[line]}" in what
    assert " only with " in what or " not read with " in what or " is for " in what or "takes nothing" in what
    assert what_to_do.startswith("  next: ")


def test_rounds_of_a_recipe_that_no_engine_confirmed_are_refused(
    read: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = SITUATIONS["recipe verify"][1]
    for path, work in simulated.work.items():
        monkeypatch.setattr(path, work)
    why = tried(COMMANDS["recipe verify"], "verify", simulated, (("rounds", ["--rounds", "4"]),))
    assert why is not None and "a recipe that an engine confirmed" in why.message


def test_a_query_made_by_hand_refuses_the_fields_that_differ_from_their_defaults() -> None:
    ProfileQuery(model="m").refuse()
    ProfileQuery(model="m", on="host", step_us=0.0).refuse()
    with pytest.raises(UsageError, match="--step-us is read only with --on host"):
        ProfileQuery(model="m", step_us=5.0).refuse()


def test_a_default_from_the_configuration_file_is_no_idle_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`open = true` there holds for the commands that draw a page, and does not end the others."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(RUN, "run.kvrun")
    Path("kvtune.toml").write_text("open = true\n")
    assert kvtune(["report", "run.kvrun", "--console"]) == 0
    assert kvtune(["report", "run.kvrun", "--console", "--open"]) == EXIT_USAGE
