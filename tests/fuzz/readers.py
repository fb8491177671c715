"""The ONE table of readers of what may come from anyone: files and servers. Each with real inputs, and its use.

The fuzzer (run.py) mutates a reader's inputs by chance; tests/fuzz/test_damages.py puts each reader to each
damage of damages.py. A new reader of kvtune gets an entry in READERS: it is fuzzed and damaged from then on.
"""

from __future__ import annotations

import gzip
import json
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtune.base.errors import KvtuneError, UsageError
from tests.fuzz.mutate import (
    Mutation,
    bytes_changed,
    csv_changed,
    json_changed,
    lines_changed,
    mutated,
    toml_changed,
    zip_changed,
)
from tests.fuzz.servers import SERVERS

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).parent / "seeds"
"""Inputs that once ended in something else than an answer or one line: a folder a reader."""

MOONCAKE = b"".join(
    b'{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [0, 1, %d]}\n'
    % (n * 100, 1100 + n, n)
    for n in range(2, 9)
)
BURSTGPT = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + b"".join(
    b"%d,ChatGPT,%d,18,%d,Conversation log\n" % (n, 400 + n, 418 + n) for n in range(8)
)
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(
    b"2023-11-16 18:01:%02d.978,%d,10\n" % (n, 100 + n) for n in range(8)
)
REQUESTS = b"".join(
    json.dumps(row).encode() + b"\n"
    for row in (
        {"prompt": [1, 2, 3], "answer": [4], "t0": 1764100000.25, "t1": 1764100001.5, "hit": 0},
        {"custom_id": "a", "body": {"prompt": "Hi", "max_tokens": 3}, "t0": "2026-11-25T19:26:40Z"},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "reasoning": "r",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "5"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
            "chat_template_kwargs": {"enable_thinking": False},
            "response": {"choices": [{"message": {"content": "Yo"}}], "usage": {"completion_tokens": 2}},
        },
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "5"},
            ],
            "tools": [{"type": "function", "name": "f"}],
            "reasoning": {"effort": "low"},
        },
    )
)
LOG = b"""INFO 11-26 10:00:00 [core.py:93] Initializing a V1 LLM engine
(EngineCore pid=12) \x1b[31mERROR 11-26 10:00:01 [core.py:700] EngineCore failed to start.\x1b[0m
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "x.py", line 1, in <module>
(EngineCore pid=12) ValueError: No available memory for the cache blocks
Exception ignored in: <function x>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}
Worker proc VllmWorker-1 died unexpectedly (exit code: -9)
"""


TAPPED = b"".join(
    json.dumps(
        {
            "by": "kvtune tap",
            "name": f"kvtune-{n}",
            "t0": 1764100000.5 + n,
            "t1": 1764100001.5 + n,
            "ttft": 0.2,
            "hit": 0,
            "usage": {"prompt_tokens": 3 + n},
            "prompt_token_ids": [1, 2, 3, *range(n)],
            "answer": [4, 5],
        }
    ).encode()
    + b"\n"
    for n in range(4)
)
SESSION = {
    "id": "a",
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "requests": [
        {"t": 5.0 * n, "type": "n", "in": 64 * (2 * n + 1), "out": 10, "hash_ids": [*range(2 * n + 1)]}
        | ({"think_time": 2.0} if n else {})
        for n in range(3)
    ],
}


@dataclass(frozen=True)
class Reader:
    """`seeds`: names and contents of real files. `read`: all that kvtune does with such a file first.

    `name`: what the reader wants the file to be called. `command`: the words of a command that reads it, if one does.
    """

    seeds: Callable[[], Sequence[tuple[str, bytes]]]
    structural: Mutation
    read: Callable[[Path], object]
    name: str = "a.trace"
    command: Callable[[Path], list[str]] | None = None


def _files(*patterns: str) -> Callable[[], list[tuple[str, bytes]]]:
    return lambda: [(p.name, p.read_bytes()) for pattern in patterns for p in sorted(ROOT.glob(pattern))]


def _studies() -> list[tuple[str, bytes]]:
    """The golden ones, and one whose trials had tiers of host memory."""
    golden = _files("tests/golden/study1-sweep.jsonl", "tests/golden/study1-tune.jsonl")()
    head, *trials = golden[0][1].rstrip().split(b"\n")
    tiers = [json.loads(line) for line in trials]
    for number, trial in enumerate(tiers):
        if trial["summary"] and trial["role"] == "trial":
            trial["settings"] = {"kv_offloading_size": number / 4}
            trial["summary"]["prefix_cache"] |= {"query_tokens": 900, "hit_tokens": 90 + number}
            trial["summary"]["offload"] = {"tier_bytes": number << 28, "tier_hit_rate": number / 100}
    return [*golden, ("tiers.jsonl", b"\n".join((head, *(json.dumps(t).encode() for t in tiers), b"")))]


def _run(path: Path) -> None:
    from kvtune.data.run.file import read_columns, read_label, read_run
    from kvtune.reading.report.runs import COLUMNS, listed

    failed: list[KvtuneError] = []
    for read in (
        lambda: listed(read_label(path), read_columns(path, "requests", COLUMNS), str(path), ""),
        lambda: read_run(path),
    ):
        try:
            read()
        except KvtuneError as error:
            failed.append(error)
    if failed:
        raise failed[-1]


def _used(path: Path) -> None:
    """All that `report`, `compare` and `export` do with a run."""
    from kvtune.data.run.file import read_run
    from kvtune.data.show.page import document_page
    from kvtune.reading.analysis.rebuild import workload_of
    from kvtune.reading.analysis.run import RunAnalysis
    from kvtune.reading.analysis.summary import summary
    from kvtune.reading.report.comparison import document
    from kvtune.reading.report.contrast import contrast
    from kvtune.reading.report.export.csv import write_csv
    from kvtune.reading.report.export.trace import chrome_trace
    from tests.reading.report.drawn import run_page, summary_text

    run = read_run(path)
    analysis = RunAnalysis(run, workload_of(run))
    summary(analysis)
    summary_text(analysis)
    run_page(analysis)
    json.dumps(chrome_trace(run), allow_nan=False)
    with tempfile.TemporaryDirectory() as folder:
        write_csv(run, Path(folder) / "csv")
    document_page(document(contrast([run, run], ["a", "b"])))


def _study(path: Path) -> None:
    from kvtune.answers.tune.objective import objective
    from kvtune.answers.tune.study import read_study, recipe_of, saved_result, view
    from tests.reading.report.drawn import study_page

    study = read_study(path)
    by = objective("hit-rate")
    saved = saved_result(path, study)
    study_page(view(study, by, recipe_of(path, saved), saved))


def _recipe(path: Path) -> None:
    from kvtune.answers.tune.recipes.shelf import load
    from kvtune.data.recipe import read_recipe
    from kvtune.data.show.markdown import markdown
    from kvtune.reading.report.recipe import document

    read_recipe(path)
    markdown(document(load(path), path.stem, ""))


def _trace(path: Path) -> None:
    from kvtune.requests.loads.spec import build

    for keys in ("", ",sort=1,limit=3"):
        build(f"trace:path={path}{keys}")


def _requests(path: Path) -> None:
    from kvtune.requests.loads.spec import build

    build(f"requests:path={path},tokenizer=bytes")


def _config(path: Path) -> None:
    """What `bounds --model`, `doctor` without vLLM, and searches make of a model's folder."""
    from kvtune.answers.doctor.planned import read_config
    from kvtune.data.layout.config import shape_of, state_dtype_of
    from kvtune.data.layout.model_config import model_config
    from kvtune.data.layout.plan import CPU, sweep_candidates

    config = model_config(str(path.parent))
    if not config.fields:
        raise UsageError(config.why)
    shape = shape_of(config.fields, path.parent.name)
    state_dtype_of(config.fields)
    sweep_candidates(shape, CPU, 4096, limit=4)
    read_config(str(path.parent), [])


def _tapped(path: Path) -> None:
    from kvtune.requests.loads.spec import build

    build(f"requests:path={path},limit=9")


def _sessions(path: Path) -> None:
    from kvtune.requests.loads.spec import build

    build(f"trace:format=weka,path={path.parent}")


def _own_study() -> Any:
    from kvtune.lab.setup.setup import Load, Setup

    return Setup(model="tiny-opt", load=Load(spec="rounds", seed=0, hash="h"), core="kvtune")


def _journals() -> list[tuple[str, bytes]]:
    """One that the command of `_own_study` goes on with."""
    from kvtune.answers.tune.trials.journal import StudyJournal

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        with StudyJournal(path, "sweep", _own_study()):
            pass
        return [(path.name, path.read_bytes() + b"\n".join(_studies()[0][1].split(b"\n")[1:]))]


def _journal(path: Path) -> None:
    from kvtune.answers.tune.trials.journal import StudyJournal

    with StudyJournal(path, "sweep", _own_study()):
        pass


def _core(path: Path) -> None:
    """What an engine's process reads of the recipe that it is started with."""
    from kvtune.plugin.core.settings import from_environment

    from_environment({"KVTUNE_RECIPE": str(path)})


def _nominal() -> list[tuple[str, bytes]]:
    import msgspec

    from kvtune.lab.device.cost import NOMINAL

    return [("a.json", msgspec.json.encode(NOMINAL))]


def _step_cost(path: Path) -> None:
    from kvtune.lab.device.cost import read_cost

    read_cost(path.read_bytes().decode(errors="replace"))


def _log(path: Path) -> None:
    from kvtune.lab.engine.faults import cause, clean, hub_fault

    log = path.read_bytes().decode(errors="replace")
    cause(log)
    hub_fault(log, "m")
    [clean(line) for line in log.splitlines()]


def _analyst(path: Path) -> None:
    """A body and an answer of a tap, plain and packed."""
    from kvtune.servers.tap.analyst import Analyst
    from kvtune.servers.tap.answers import read_answer
    from kvtune.servers.tap.messages import Sent, Settings

    content = path.read_bytes()
    analyst = Analyst(Settings("http://127.0.0.1:9", {}, False, "t-", "", False, True))
    try:
        for number, (body, encoding) in enumerate(((content, ""), (gzip.compress(content, 1), "gzip"))):
            analyst.take(Sent(number, "/v1/chat/completions", "", "c", 1.0, 1.0, body, encoding))
            for kind in ("application/json", "text/event-stream"):
                assert read_answer(body, kind, encoding).hit >= -1
    finally:
        analyst.close()


def _texts(path: Path) -> None:
    """What text of prompts and command lines goes through."""
    from kvtune.base.masking import without_secrets
    from kvtune.requests.text.kinds import sorted_json
    from kvtune.requests.text.parts import of_text

    text = path.read_bytes().decode(errors="replace")
    of_text(text)
    sorted_json(text)
    if len(text) < 1 << 16:  # a command line is no longer
        without_secrets(["--hf-overrides", text])


def _earlier(path: Path) -> None:
    """The prompts of somebody's `kvtune check --json`, and every way to them."""
    from kvtune.answers.check.course import earlier
    from kvtune.answers.check.paths import COLD, PATHS, Layout, way

    prompts = earlier(path).prompts
    for number in range(min(4, len(prompts))):
        for name in PATHS.keys() - COLD:
            way(name, Layout(blocks=[16, 384], window=64), prompts, number, 16)


EARLIER = json.dumps(
    {"prompts": [[*range(9, 200)], [7] * 180], "salts": ["a", ""], "url": "http://h"}
).encode()
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "usage": {"prompt_tokens": 3}}).encode()
LOAD = ("bounds", "-w")
READERS = {
    "run": Reader(
        _files("tests/golden/*.kvrun"),
        zip_changed,
        _run,
        "a.kvrun",
        lambda path: ["report", str(path), "--console"],
    ),
    "page": Reader(
        lambda: [f for f in _files("tests/golden/*.kvrun")() if len(f[1]) < 20_000],
        zip_changed,
        _used,
        "a.kvrun",
        lambda path: ["compare", str(path), str(path)],
    ),
    "study": Reader(
        _studies, lines_changed, _study, "a.jsonl", lambda path: ["report", str(path), "--console"]
    ),
    "journal": Reader(_journals, lines_changed, _journal, "a.jsonl"),
    "recipe": Reader(
        _files("recipes/*.toml"), toml_changed, _recipe, "a.toml", lambda path: ["recipe", "show", str(path)]
    ),
    "core": Reader(_files("recipes/*.toml"), toml_changed, _core, "a.toml"),
    **{
        name: Reader(
            partial(list, [("a", content)]),
            changed,
            _trace,
            command=lambda path: [*LOAD, f"trace:path={path}"],
        )
        for name, content, changed in (
            ("mooncake", MOONCAKE, lines_changed),
            ("served", MOONCAKE.replace(b"{", b'{"by": "kvtune", '), lines_changed),
            ("burstgpt", BURSTGPT, csv_changed),
            ("azure", AZURE, csv_changed),
        )
    },
    "weka": Reader(
        lambda: [("a.json", json.dumps(SESSION).encode())],
        json_changed,
        _sessions,
        "a.json",
        lambda path: [*LOAD, f"trace:format=weka,path={path.parent}"],
    ),
    "requests": Reader(
        lambda: [("a.jsonl", REQUESTS)],
        lines_changed,
        _requests,
        command=lambda path: [*LOAD, f"requests:path={path},tokenizer=bytes"],
    ),
    "tapped": Reader(
        lambda: [("a.jsonl", TAPPED)],
        lines_changed,
        _tapped,
        command=lambda path: [*LOAD, f"requests:path={path},limit=9"],
    ),
    "check": Reader(lambda: [("a.json", EARLIER)], json_changed, _earlier, "a.json"),
    "step cost": Reader(_nominal, json_changed, _step_cost),
    "config": Reader(
        _files("tests/data/layout/configs/*.json", "kvtune/data/layout/models/*/config.json"),
        json_changed,
        _config,
        "config.json",
        lambda path: ["bounds", "-w", "decode:requests=2", "--model", str(path.parent)],
    ),
    "log": Reader(lambda: [("engine.log", LOG)], bytes_changed, _log),
    "analyst": Reader(lambda: [("a.json", CHAT)], json_changed, _analyst),
    "texts": Reader(lambda: [("a", b'{"name":\n {"parameters": 1}}')], bytes_changed, _texts),
    **{name: Reader(*parts) for name, parts in SERVERS.items()},
}


def inputs(name: str, seed: int, start: int = 0) -> Iterator[bytes]:
    """Mutations of a reader's files without end; the nth is the same in every process."""
    reader = READERS[name]
    seeds = reader.seeds()
    number = start
    while True:
        draw = random.Random(f"{name} {seed} {number}")
        data = mutated(draw.choice(seeds)[1], reader.structural, draw)
        if name in ("recipe", "core") and draw.random() < 0.8:  # else every change ends at the checksum
            lines = data.split(b"\n")
            data = b"\n".join(line for line in lines if not line.startswith((b"checksum", b"status")))
        yield data
        number += 1


def verdict(name: str, data: bytes, folder: Path) -> tuple[str, bool]:
    """What is wrong with how the reader takes this input, "" for nothing; and whether it was read.

    Nothing is wrong where it is read, or refused in one line.
    """
    path = folder / READERS[name].name
    path.write_bytes(data)
    return judged(name, path)


def judged(name: str, path: Path) -> tuple[str, bool]:
    """The same of whatever stands at the path."""
    try:
        READERS[name].read(path)
    except KvtuneError as error:
        lines = error.message.splitlines()
        return (
            "" if len(lines) == 1 and len(lines[0]) < 20_000 else f"not one line: {error.message[:300]!r}"
        ), False
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/kvtune/")] or frames
        where = f"{ours[-1].filename.removeprefix(f'{ROOT}/')}:{ours[-1].lineno}"
        return f"{type(error).__name__} at {where}: {str(error)[:100]}", False
    return "", True
