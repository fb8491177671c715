"""`kvtune doctor`: checks this machine, and which of a model's settings do nothing or harm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, argument, either, option
from kvtune.data.run.output import OUTPUT_VARIABLE, REPORTS

TIMED = either("for the times of a tier", "tier flags log")


@dataclass(frozen=True, kw_only=True)
class DoctorQuery(Query):
    model: str | None = argument(None)("""A built-in model, a folder with config.json, or a name on the hub.
        Needs no weights.""")
    workload: str = option("", "-w,--workload", When("for the layouts of a MODEL", model=True))("""Weigh the
        block layouts of a model with recurrent states for this workload.""")
    fail_on: Literal["note", "warning", "error"] = option("error")("""Exit 1 from this level on: note,
        warning or error.""")
    output: Path = option(REPORTS, "-o,--output", envvar=OUTPUT_VARIABLE)("""Folder whose free space and
        permissions are checked.""")
    log: Path | None = option(
        None, "FILE", When("a log, which has its flags", "flags")
    )("""A server's log: its
        flags are read from it, and its block, pool and refusal are held against the prediction.""")
    tier: str = option("", "SIZE", *either("for a MODEL's cache", "model flags log"))("""What a tier of host memory of
        this size for each engine would hold and load: 500GiB.""")
    like: Path | None = option(None, "RUN", *TIMED, parser=options.run_path)("""A run of MODEL:
        how long a token takes to compute.""")
    vllm: bool = option(False, *either("for what vLLM says of a MODEL", "model flags log"))("""Ask vLLM about MODEL,
        and replay when a shared prefix hits. Without it arithmetic answers where it can: for a family that it
        knows, without -w, flags and a GPU's --like-device.""")
    platform: Annotated[options.LikeDevice, *either("for what a MODEL comes to there", "model flags log")] = (
        None
    )
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None
    flags: Flags = ()


def doctor(query: DoctorQuery, lab: Lab) -> int:
    """Check this machine and, if named, MODEL under vLLM's own flags (after `--`), or a launch line. Needs no weights.

    A launch line follows `--` as it is: vllm serve .., docker run .., or a file with one.
    """
    from kvtune.answers.doctor.asked import asked_of, with_tier
    from kvtune.answers.doctor.diagnosis import examine
    from kvtune.answers.doctor.document import document
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.spec import build

    about = with_tier(asked_of(query.model, query.flags, query.log, query.platform), query.tier, query.like)
    begin(f"reading this machine{f' and what {about.model} comes to' if about.model else ''}")
    weighed = (
        build(query.workload, tokenizer=tokenizer_of(about.model, about.flags))
        if query.workload and about.model
        else None
    )
    diagnosis = examine(about, query.output, weighed, ask=query.vllm, lab=lab)
    print_answer(diagnosis, document(diagnosis), json=query.json, md=query.md, page=query.page)
    return diagnosis.exit_code(query.fail_on)
