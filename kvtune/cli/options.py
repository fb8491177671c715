"""Options that several commands share, each declared once, and the checks of their values."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtune.base.commands import command
from kvtune.base.errors import UsageError
from kvtune.cli.query import option_info
from kvtune.data.platforms import Platform, device
from kvtune.data.run.output import OUTPUT_VARIABLE
from kvtune.data.show.terminal import one_line
from kvtune.data.show.terminal import print_json as print_json

CoreName = Literal["kvtune", "stock"]


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
    if Path(text).suffix in (".html", ".json", ".jsonl", ".md", ".toml"):
        page = f", then {command('report', 'R.kvrun', '-o', text)}" if text.endswith(".html") else ""
        raise UsageError(f"-o {text}: what is written here is a run file", f"-o R.kvrun{page}")
    return Path(text)


Model = Annotated[
    str,
    typer.Argument(
        help="What `vllm serve` takes, or a built-in tiny model: "
        "tiny-opt, tiny-llama, tiny-gemma3, tiny-qwen3next, tiny-granite."
    ),
]
RunFile = Annotated[
    Path,
    typer.Argument(
        help="A run file (.kvrun), of the engine or of the simulator; `last`: the newest.", parser=run_path
    ),
]


RequestsLog = Annotated[
    Path | None,
    option_info(
        "--requests LOG",
        "A log of the requests that are sent meanwhile (docs/logs.md): then every prompt token has "
        "its cause. Read when the recording ends.",
    ),
]
Url = Annotated[
    str, typer.Argument(help="A running vLLM server: http://HOST:PORT.", metavar="URL", show_default=False)
]
Urls = Annotated[
    list[str] | None,
    typer.Argument(
        help="A running vLLM server: http://HOST:PORT. Several are judged as one fleet; a name with several addresses "
        "is several.",
        metavar="URL...",
        show_default=False,
    ),
]
UrlsFile = Annotated[
    Path | None,
    option_info(
        "--urls FILE",
        "More servers: a file with a URL a line, and after it the addresses of that server's KV events that may "
        "be opened. It is read again when it changes.",
    ),
]
Header = Annotated[
    list[str] | None,
    option_info(
        "--header HEADER",
        "A header of every request to the server, NAME: VALUE; may be repeated. A key: KVTUNE_API_KEY=KEY.",
    ),
]
EventsAt = Annotated[
    list[str] | None,
    option_info(
        "--events ADDRESS",
        "An address of KV events that kvtune opens if the server names it, too, besides those of the server's "
        "own host: ipc://FILE or tcp://HOST:PORT; may be repeated. Of several servers: URL=ADDRESS.",
    ),
]
Listen = Annotated[
    str,
    option_info(
        "--listen ADDRESS",
        "Listen here for the events of a server that connects to its watcher: tcp://ADDRESS:PORT. Whoever "
        "reaches that port can send events.",
    ),
]
Tokenizer = Annotated[
    str,
    option_info(
        "--tokenizer TOKENIZER",
        "What reads a log's text: a tokenizer's folder or cached name. Default: the model's own.",
    ),
]
WithText = Annotated[
    bool, option_info("--with-text", "JSON and run file hold the texts of a log's examples, too.")
]
Insecure = Annotated[bool, option_info("--insecure", "Do not check the server's certificate.")]
Workload = Annotated[
    str,
    option_info(
        "-w,--workload",
        "NAME or NAME:KEY=VALUE,..; names: decode, prefill, rounds, zipf, chat, mix, trace, requests, agents.",
    ),
]
Trace = Annotated[
    Path | None,
    option_info("--trace", "A trace file (Mooncake JSONL, BurstGPT or Azure CSV), instead of -w."),
]
RunTrace = Annotated[
    Path | None,
    option_info(
        "--trace",
        "The trace of a run whose workload was a trace: a file named in a run file is never opened.",
    ),
]
Seed = Annotated[int, option_info("--seed", "Seed of the workload, and of everything drawn at random.")]
Core = Annotated[CoreName, option_info("--core", "KV core: kvtune or stock.")]
RecipeCore = Annotated[
    CoreName | None, option_info("--core", "KV core: kvtune or stock. Default: the recipe's, else kvtune.")
]
CoreSetting = Annotated[
    list[str] | None,
    option_info("--set", "A core setting, core.NAME=VALUE; may be repeated. Overrides the recipe's."),
]
LikeDevice = Annotated[
    Platform | None,
    option_info(
        "--like-device DEVICE",
        "Chunk, max_num_seqs, blocks, scheduling and pool as vLLM takes them on h100, h200, b200, a100, l40s, "
        "l4 or cpu, or on a GPU with this memory: 80GiB.",
        parser=device,
    ),
]
Recipe = Annotated[str, option_info("--recipe", "A recipe file, or a name that `kvtune recipe list` shows.")]
Anyway = Annotated[
    bool, option_info("--anyway", "Go ahead although model, workload, versions or device differ.")
]
Trust = Annotated[
    bool,
    option_info(
        "--trust",
        "For a file of your own: use its model and all its flags of vLLM, even those that can load code.",
    ),
]
Dummy = Annotated[bool, option_info("--dummy", "Random weights on the model's real config.")]
Slo = Annotated[
    str, option_info("--slo", "Latency limits in ms that define goodput: ttft=500,tpot=50,e2e=8000.")
]
Objective = Annotated[
    str,
    option_info(
        "--objective",
        "hit-rate, ttft, throughput, goodput or ceiling (the host's, in tokens/s); several separated by commas, "
        "the first leads.",
    ),
]
Output = Annotated[
    Path,
    option_info(
        "-o,--output", "Folder for run files, journals and pages; made if missing.", envvar=OUTPUT_VARIABLE
    ),
]
Open = Annotated[bool, option_info("--open", "Open the page in a browser.")]
Tries = Annotated[
    int,
    option_info(
        "--tries",
        "Replay the run with the other core, and with at most this many settings that may win most of its "
        "misses; 0: replay nothing.",
        min=0,
    ),
]
Force = Annotated[bool, option_info("--force", "Overwrite what exists.")]
Json = Annotated[bool, option_info("--json", "Print one JSON object on stdout and nothing else.")]

NO_MD = "Markdown, and --json prints the answer as JSON"
Md = Annotated[bool, option_info("--md", "Print the answer as Markdown, for a pull request.")]
Page = Annotated[Path | None, option_info("--page FILE.html", "Write the answer as a page, too.")]


def trusting(file: Path | str, model: str, flags: Sequence[str]) -> None:
    """Print the model and the vLLM flags that --trust takes from a file."""
    import shlex

    asked = ascii(f"{model} {shlex.join(flags)}".strip())[1:-1]
    print(f"--trust: vLLM does what {file} asks for, code included: {asked}", file=sys.stderr)
