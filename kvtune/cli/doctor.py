"""`kvtune doctor`: checks this machine, and which of a model's settings do nothing or harm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvtune.cli import options
from kvtune.cli.query import Flags, Lab, Query, When, argument, option
from kvtune.data.run.output import OUTPUT_VARIABLE, REPORTS


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
    vllm: bool = option(False, When("for what vLLM says of a MODEL", model=True))("""Ask vLLM about MODEL,
        and replay when a shared prefix hits. Without it arithmetic answers where it can: for a family that it
        knows, without -w, flags and a GPU's --like-device.""")
    platform: Annotated[options.LikeDevice, When("for what a MODEL comes to there", model=True)] = None
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None
    flags: Annotated[Flags, When("for a MODEL", model=True)] = ()


def doctor(query: DoctorQuery, lab: Lab) -> int:
    """Check this machine and, if named, MODEL under vLLM's own flags (after `--`). Needs no weights."""
    from kvtune.answers.doctor.diagnosis import examine
    from kvtune.answers.doctor.document import document
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import begin
    from kvtune.lab.setup.resolve import tokenizer_of
    from kvtune.requests.loads.spec import build

    flags = query.flags
    begin(f"reading this machine{f' and what {query.model} comes to' if query.model else ''}")
    weighed = (
        build(query.workload, tokenizer=tokenizer_of(query.model, flags))
        if query.workload and query.model
        else None
    )
    diagnosis = examine(
        query.model,
        flags,
        query.output,
        weighed,
        like=query.platform,
        ask=query.vllm,
        lab=lab,
    )
    print_answer(diagnosis, document(diagnosis), json=query.json, md=query.md, page=query.page)
    return diagnosis.exit_code(query.fail_on)
