"""Options that several commands share, each declared once, and the checks of their values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from kvtune.base.commands import command
from kvtune.base.errors import UsageError
from kvtune.cli.query import When, fixed, shared
from kvtune.data.platforms import Platform, device
from kvtune.data.run.output import OUTPUT_VARIABLE
from kvtune.data.show.terminal import one_line
from kvtune.data.show.terminal import print_json as print_json

CoreName = Literal["kvtune", "stock"]
Router = Literal["round-robin", "session", "least-busy", "prefix"]


def completing() -> bool:
    """Whether a shell asks for completions: typer answers, and nothing else is printed."""
    return "_KVTUNE_COMPLETE" in os.environ


def run_path(text: str) -> Path:
    """Return a run file's path: `last` is the newest run of the output folder, `last~1` the one before it."""
    name, _, back = text.partition("~")
    if name != "last" or (back and not back.isdecimal()):
        return Path(text)
    from kvtune.data.run.folder import newest_first, run_files
    from kvtune.data.run.output import output_folder

    folder = output_folder()
    runs = newest_first(list(run_files(folder)))
    number = int(back or 0)
    if number >= len(runs):
        raise UsageError(
            f"{text}: there are {len(runs)} run files under {folder}",
            f"`kvtune profile` writes one; runs of another folder: {OUTPUT_VARIABLE}=FOLDER kvtune ..",
        )
    if not completing():
        print(one_line(f"{text} is {runs[number]}"), file=sys.stderr)
    return runs[number]


def new_run_path(text: str) -> Path:
    """Return where a run file is written. UsageError for a name that says that it is something else."""
    page = f", then {command('report', 'R.kvrun', '-o', text)}" if text.endswith(".html") else ""
    return _fitting(text, ".kvrun", "a run file", f"-o R.kvrun{page}")


def new_folder(text: str) -> Path:
    return Path(text) if Path(text).is_dir() else _fitting(text, "", "a folder", "-o FOLDER")


def _fitting(text: str, suffix: str, what: str, hint: str) -> Path:
    """Return the path of an output. UsageError for a name that says that it is another kind of file than `what`."""
    if Path(text).suffix in {".kvrun", ".html", ".json", ".jsonl", ".md", ".toml"} - {suffix}:
        raise UsageError(f"{text}: what is written here is {what}", hint)
    return Path(text)


def _new(suffix: str, what: str) -> Callable[[str], Path]:
    return lambda text: _fitting(text, suffix, what, f"give NAME{suffix}")


new_page_path, new_log_path = _new(".html", "a page"), _new(".jsonl", "a log")
new_export_path = _new(".json", "a trace, or a folder of CSV")

MODEL = fixed()("""What `vllm serve` takes, or a built-in tiny model: tiny-opt, tiny-llama, tiny-gemma3,
    tiny-qwen3next, tiny-granite.""")
Model = Annotated[str, MODEL]
RUN_FILE = fixed(parser=run_path)
RunFile = Annotated[
    Path, RUN_FILE("A run file (.kvrun), of the engine or of the simulator; `last`: the newest.")
]
REQUESTS_LOG = shared("LOG")("""A log of the requests that are sent meanwhile (docs/logs.md): then every
    prompt token has its cause. Read when the recording ends.""")
RequestsLog = Annotated[Path | None, REQUESTS_LOG]
URL = fixed("URL", show_default=False)
Url = Annotated[str, URL("A running vLLM server: http://HOST:PORT.")]
URLS = fixed("URL...", show_default=False)("""A running vLLM server: http://HOST:PORT. Several are judged as one
    fleet; a name with several addresses is several.""")
Urls = Annotated[list[str] | None, URLS]
URLS_FILE = shared("--urls FILE")("""More servers: a file with a URL a line, and after it the addresses of
    that server's KV events that may be opened. It is read again when it changes.""")
UrlsFile = Annotated[Path | None, URLS_FILE]
HEADER = shared("HEADER")("""A header of every request to the server, NAME: VALUE; may be repeated. A key:
    KVTUNE_API_KEY=KEY.""")
Header = Annotated[list[str] | None, HEADER]
EVENTS_AT = shared("ADDRESS")("""An address of KV events that kvtune opens if the server names it, too,
    besides those of the server's own host: ipc://FILE or tcp://HOST:PORT; may be repeated. Of several servers:
    URL=ADDRESS.""")
EventsAt = Annotated[list[str] | None, EVENTS_AT]
LISTEN = shared("ADDRESS")("""Listen here for the events of a server that connects to its watcher:
    tcp://ADDRESS:PORT. Whoever reaches that port can send events.""")
Listen = Annotated[str, LISTEN]
TOKENIZER = shared("TOKENIZER")("""What reads a log's text: a tokenizer's folder or cached name. Default: the
    model's own.""")
Tokenizer = Annotated[str, TOKENIZER]
WithText = Annotated[bool, shared()("JSON and run file hold the texts of a log's examples, too.")]
Insecure = Annotated[bool, shared()("Do not check the server's certificate.")]
WORKLOAD = shared("-w,--workload")("""NAME or NAME:KEY=VALUE,..; names: decode, prefill, rounds, zipf, chat,
    mix, trace, requests, agents.""")
Workload = Annotated[str, WORKLOAD]
TRACE = shared()("A trace file (Mooncake JSONL, BurstGPT or Azure CSV), instead of -w.")
Trace = Annotated[Path | None, TRACE, When("a workload, in place of -w", workload=False)]
RUN_TRACE = shared()("""The trace of a run whose workload was a trace: a file named in a run file is never
    opened.""")
RunTrace = Annotated[Path | None, RUN_TRACE]
Seed = Annotated[int, shared()("Seed of the workload, and of everything drawn at random.")]
Core = Annotated[CoreName, shared()("KV core: kvtune or stock.")]
RECIPE_CORE = shared()("KV core: kvtune or stock. Default: the recipe's, else kvtune.")
RecipeCore = Annotated[CoreName | None, RECIPE_CORE]
CORE_SETTING = shared()("A core setting, core.NAME=VALUE; may be repeated. Overrides the recipe's.")
CoreSetting = Annotated[list[str] | None, CORE_SETTING]
LIKE_DEVICE = shared("--like-device DEVICE", parser=device)("""Chunk, max_num_seqs, blocks, scheduling and pool
    as vLLM takes them on h100, h200, b200, a100, l40s, l4, 3090, 4090, 5090, rtx-pro-6000, gb10, mi300x or
    cpu, or on a GPU with this memory: 80GiB.""")
LikeDevice = Annotated[Platform | None, LIKE_DEVICE]
Recipe = Annotated[str, shared()("A recipe file, or a name that `kvtune recipe list` shows.")]
Anyway = Annotated[bool, shared()("Go ahead although model, workload, versions or device differ.")]
TRUST = shared()("""For a file of your own: use its model and all its flags of vLLM, even those that can load
    code.""")
Trust = Annotated[bool, TRUST]
Dummy = Annotated[bool, shared()("Random weights on the model's real config.")]
Slo = Annotated[str, shared()("Latency limits in ms that define goodput: ttft=500,tpot=50,e2e=8000.")]
OBJECTIVE = shared()("""hit-rate, ttft, throughput, goodput or ceiling (the host's, in tokens/s); several
    separated by commas, the first leads.""")
Objective = Annotated[str, OBJECTIVE]
OUTPUT = shared("-o,--output FOLDER", envvar=OUTPUT_VARIABLE, parser=new_folder)("""For run files, journals and
    pages; made if missing.""")
Output = Annotated[Path, OUTPUT]
Open = Annotated[bool, shared()("Open the page in a browser.")]
TRIES = shared(min=0)("""Replay the run with the other core, and with at most this many settings that may win
    most of its misses; 0: replay nothing.""")
Tries = Annotated[int, TRIES]
Force = Annotated[bool, shared()("Overwrite what exists.")]
Json = Annotated[bool, shared()("Print one JSON object on stdout and nothing else.")]
NO_MD = When("Markdown, and --json prints the answer as JSON", json=False)
MARKDOWN = shared()("Print the answer as Markdown, for a pull request.")
Md = Annotated[bool, MARKDOWN, NO_MD]
Page = Annotated[Path | None, shared("FILE.html", parser=new_page_path)("Write the answer as a page, too.")]


def trusting(file: Path | str, model: str, flags: Sequence[str]) -> None:
    """Print the model and the vLLM flags that --trust takes from a file."""
    import shlex

    asked = ascii(f"{model} {shlex.join(flags)}".strip())[1:-1]
    print(f"--trust: vLLM does what {file} asks for, code included: {asked}", file=sys.stderr)
