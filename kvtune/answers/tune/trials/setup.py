"""Makes a study's set-up from model, workload and flags, and checks these before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from kvtune.answers.tune.result import Settings
from kvtune.answers.tune.space.model import model_facts
from kvtune.base.errors import UsageError
from kvtune.data.flags import flag_value, settings_given
from kvtune.data.knobs import CORE, ModelFacts
from kvtune.data.layout.models import engine_defaults
from kvtune.data.platforms import Platform
from kvtune.data.recipe import Scalar, check_engine_settings
from kvtune.data.run.folder import taken
from kvtune.lab.device.settings import Timed
from kvtune.lab.setup.platform import engines
from kvtune.lab.setup.resolve import (
    check_engine,
    refuse_api_servers,
    resolve,
    tokenizer_of,
)
from kvtune.lab.setup.setup import USUAL, Load, Pool, Real, Setup
from kvtune.requests.loads.spec import DEFAULT_SPEC, build
from kvtune.requests.types import Workload

REAL = Real()


def set_up(
    model: str,
    spec: str,
    *,
    seed: int,
    core: Literal["kvtune", "stock"],
    engine_args: list[str],
    dummy: bool = False,
    slo: dict[str, float] | None = None,
    device: Real | Timed = REAL,
    like: Platform | None = None,
) -> tuple[Setup, Workload, ModelFacts]:
    """Return the set-up, its workload, and the facts that decide which settings are legal for the model."""
    version = check_engine()
    platform = engines(like, timed=isinstance(device, Timed))
    resolve(model, dummy=True, engine_args=engine_args, platform=platform)
    refuse_api_servers(engine_args)
    workload = build(spec or DEFAULT_SPEC, seed=seed, tokenizer=tokenizer_of(model, engine_args))
    block_size = flag_value(engine_args, "block-size")
    if block_size is not None and not block_size.isdigit():
        raise UsageError(f"--block-size {block_size} is not a number of tokens", "give a whole number")
    facts = model_facts(
        model,
        int(block_size) if block_size else None,
        workload.longest,
        core=core,
        caching_off="no-enable-prefix-caching" in engine_defaults(model, platform.runs_on)
        and "enable-prefix-caching" not in settings_given(engine_args),
        platform=platform,
        engine_args=engine_args,
    )
    setup = Setup(
        model=model,
        load=Load.of(workload, slo),
        core=core,
        engine_args=engine_args,
        pool=Pool(block_tokens=facts.block_tokens),
        dummy=dummy,
        vllm=version,
        device=device,
        platform=like,
    )
    return setup, workload, facts


def workload_spec(workload: str, trace: Path | None) -> str:
    """Return the workload spec from -w or --trace. Raise UsageError if both are given."""
    if trace is None:
        return workload
    if workload:
        raise UsageError("-w and --trace exclude each other", "give only one of them")
    if not trace.is_file():
        raise UsageError(f"no trace file {trace}", "`kvtune serve --record FILE` records one")
    return f"trace:path={trace},sort=1"  # a recording is in the order in which requests finished


def study_path(study: str, output: Path, kind: str, setup: Setup) -> Path:
    """Return the path in --study FILE, or of a new file in the output folder."""
    if study:
        return Path(study)
    name = _name_of(setup)
    for n in range(1, 10_000):
        free = f"{name}_{kind}{'' if n == 1 else f'-{n}'}"
        if not output.is_dir() or not taken(output, free):
            return output / f"{free}.jsonl"
    raise UsageError(f"{output} has no free name for a study", "name one with --study FILE")


def stored_study_path(url: str, output: Path, setup: Setup) -> Path:
    """Return the path of this machine's journal for a study in a database.

    The same command gets the same path, so it continues after the engine runs that it has made.
    """
    usual = {**USUAL, "slo": None}  # of these, `slo` is always in the name
    names = [f"{name}={value!r}" for name, value in setup.filed().items() if usual.get(name) != value]
    digest = sha256("|".join([url, *names]).encode()).hexdigest()[:8]
    return output / f"{_name_of(setup)}_tune-{digest}.jsonl"


def _name_of(setup: Setup) -> str:
    model = re.sub(r"[^\w.-]+", "-", Path(setup.model).name or setup.model).strip("-")[:40]
    return f"{model}_{setup.load.spec.partition(':')[0]}"


def core_part(settings: Mapping[str, Scalar]) -> Settings:
    return {name: value for name, value in settings.items() if name in CORE}


def check_settings(settings: Mapping[str, Scalar], where: str) -> None:
    """Raise UsageError if a file's trial has a setting that is neither the core's nor one that a file may set."""
    from kvtune.plugin.core.settings import parse

    check_engine_settings(engine_part(settings), where, "a trial's settings")
    try:
        parse(core_part(settings))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error


def packing_failure(summary: Mapping[str, Any]) -> str:
    """Return why the engine did not pack blocks although the settings ask for it; "" if there is no such failure."""
    core = summary.get("core", {})
    if core.get("parts", {}).get("packed") is not False:
        return ""
    notes = [str(note) for note in summary.get("notes", [])]
    return next(
        (n for n in notes if n.startswith("packed: ")), "packed: the model has no states beside attention"
    )


def engine_part(settings: Mapping[str, Scalar]) -> Settings:
    """Return the settings that are vLLM's own flags, by their names with underscores."""
    return {name: value for name, value in settings.items() if name not in CORE}
