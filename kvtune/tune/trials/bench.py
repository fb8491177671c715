"""From what a person names (model, workload, flags) to the bench of a study, checked before anything is started."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Literal

from kvtune.engine.flags import flag_value, settings_given
from kvtune.engine.models import engine_defaults
from kvtune.engine.resolve import check_engine, resolve
from kvtune.errors import UsageError
from kvtune.tune.space.model import ModelFacts, model_facts
from kvtune.tune.space.values import Settings
from kvtune.tune.trials.trial import Bench
from kvtune.workload.spec import DEFAULT_SPEC, build
from kvtune.workload.types import Workload


def set_up(
    model: str,
    spec: str,
    *,
    seed: int,
    core: Literal["kvtune", "stock"],
    engine_args: list[str],
    dummy: bool = False,
    core_settings: Settings | None = None,
    slo: dict[str, float] | None = None,
) -> tuple[Bench, Workload, ModelFacts]:
    """The bench, its workload, and what is legal for the model."""
    version = check_engine()
    resolve(model, dummy=True, engine_args=engine_args)
    workload = build(spec or DEFAULT_SPEC, seed=seed)
    asked = flag_value(engine_args, "block-size")
    if asked is not None and not asked.isdigit():
        raise UsageError(f"--block-size {asked} is not a number of tokens", "give a whole number")
    facts = model_facts(
        model,
        int(asked) if asked else None,
        workload.longest,
        core=core,
        caching_off="no-enable-prefix-caching" in engine_defaults(model)
        and "enable-prefix-caching" not in settings_given(engine_args),
        state_dtype=flag_value(engine_args, "mamba-ssm-cache-dtype") or "auto",
    )
    bench = Bench(
        model=model,
        spec=workload.spec,
        seed=workload.seed,
        workload_hash=workload.hash,
        core=core,
        core_settings=core_settings or {},
        engine_args=engine_args,
        block_tokens=facts.block_tokens,
        dummy=dummy,
        vllm=version,
        slo=slo or {},
    )
    return bench, workload, facts


def workload_spec(workload: str, trace: Path | None) -> str:
    """-w or --trace, not both."""
    if trace is None:
        return workload
    if workload:
        raise UsageError("-w and --trace exclude each other", "give one of them")
    if not trace.is_file():
        raise UsageError(f"no trace file {trace}", "`kvtune serve --record FILE` records one")
    return f"trace:path={trace},sort=1"  # a recording is in the order in which requests finished


def study_path(study: str, output: Path, kind: str, bench: Bench) -> Path:
    """--study FILE, or a new name under the output folder."""
    if study:
        return Path(study)
    model = re.sub(r"[^\w.-]+", "-", Path(bench.model).name or bench.model).strip("-")[:40]
    name = bench.spec.partition(":")[0]
    for n in range(1, 10_000):
        path = output / f"{model}_{name}_{kind}{'' if n == 1 else f'-{n}'}.jsonl"
        if not path.exists():
            return path
    raise UsageError(f"{output} is full of studies", "name one with --study FILE")


def stored_study_path(url: str, output: Path, bench: Bench) -> Path:
    """The journal that this machine keeps of a study in a database: the same for the same command, so that a second
    call goes on with the engine runs of the first.
    """
    names = [f"{name}={getattr(bench, name)!r}" for name in Bench.__struct_fields__]
    mark = sha256("|".join([url, *names]).encode()).hexdigest()[:8]
    model = re.sub(r"[^\w.-]+", "-", Path(bench.model).name or bench.model).strip("-")[:40]
    return output / f"{model}_{bench.spec.partition(':')[0]}_tune-{mark}.jsonl"
