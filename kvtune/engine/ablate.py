"""The runs of `--ablate`: a baseline, and variants that each change one setting of the core.

In: a `Setup`. Out: the variants (sides of an experiment) and the journal of their runs. Runs in the CLI's process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from dataclasses import replace as changed
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvtune.engine.experiment import BASELINE, RunFiles, Side
from kvtune.engine.profile import EngineBench
from kvtune.engine.setup import Setup
from kvtune.errors import UsageError
from kvtune.fake_device.settings import Timed
from kvtune.knobs import CORE, CoreSettings

THRESHOLDS = (20_000, 50, 100)
"""GC thresholds of the variant `thresholds`: about 30 times fewer collections than with Python's 700, 10, 10."""
NAMED_ONLY = ("whole_states", "packed", "strict")
"""Switches flipped only if `--ablate-only` names them: for state-space layers, and for how the core loads."""
JOURNAL = "ablation.jsonl"


@dataclass(slots=True)
class Variant(Side[Path]):
    """The baseline with one setting `turned` "off" or "on" ("" for the baseline). `settings` override the set-up's."""

    turned: str = ""


def variants(setup: Setup, only: tuple[str, ...] = ()) -> tuple[Variant, ...]:
    """Return the baseline, a variant for each switch and one for the GC thresholds. UsageError for an unknown name.

    `only`: the names of the variants; without it, all but NAMED_ONLY.
    """
    if setup.core != "kvtune":
        raise UsageError(
            "--ablate flips the switches of kvtune's core, and --core stock has none", "leave out --core"
        )
    now = {**CoreSettings().to_dict(), **setup.core_settings}
    every = [
        Variant(name, {name: not now[name]}, turned="off" if now[name] else "on")
        for name, knob in CORE.items()
        if knob.kind == "switch"
    ]
    names = ("gc_threshold0", "gc_threshold1", "gc_threshold2")
    given = any(now[name] for name in names)
    values = (0, 0, 0) if given else THRESHOLDS
    every.append(
        Variant("thresholds", dict(zip(names, values, strict=True)), turned="off" if given else "on")
    )
    unknown = set(only) - {v.name for v in every}
    if unknown:
        raise UsageError(
            f"--ablate-only: unknown switch {', '.join(sorted(unknown))}",
            f"it takes {', '.join(v.name for v in every)}",
        )
    kept = only or tuple(v.name for v in every if v.name not in NAMED_ONLY)
    return (Variant(BASELINE, {}), *(v for v in every if v.name in kept))


def folder_of(setup: Setup, bench: EngineBench) -> Path:
    """Return the folder of this set-up's runs and journal: equal ones share a folder, others have another one."""
    load = setup.load.built()
    work = [
        setup.model,
        load.hash,
        setup.core_settings,
        setup.dummy,
        setup.engine_args,
        bench.environment,
    ]
    if isinstance(setup.device, Timed):
        work.append(msgspec.to_builtins(setup.device))
    what = json.dumps(work, sort_keys=True)
    name = f"ablation_{Path(setup.model).name or 'model'}_{load.name}"
    return bench.output / f"{name}_{sha256(what.encode()).hexdigest()[:8]}"


def run_files(setup: Setup, bench: EngineBench) -> RunFiles:
    """Return the journal, which makes a variant's runs and finds runs that an earlier call of the command made."""
    folder = folder_of(setup, bench)
    plain = changed(bench, probe="light", stacks=False, output=folder)

    def make(variant: Variant) -> Path:
        done = plain.run(replace(setup, core_settings={**setup.core_settings, **variant.settings}))
        if done.error is not None:
            raise done.error  # a partial run is not comparable
        return done.path

    return RunFiles(folder / JOURNAL, make)
