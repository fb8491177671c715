"""Stage one of tuning: Optuna asks for settings, the simulator answers. Seeded: the same seed gives the same trials.

Asked two at a time and told in order, whichever replay ends first. What the journal holds is told again instead of
simulated again, so a resumed study goes on as the whole one would have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvtune.errors import KvtuneError, UsageError
from kvtune.sim.cost import StepCost
from kvtune.tune.journal import Journal
from kvtune.tune.knobs import ModelFacts, candidates
from kvtune.tune.objective import Objective
from kvtune.tune.sim_pool import SimPool
from kvtune.tune.space import Space
from kvtune.tune.sweep import Wanted, sim_trial
from kvtune.tune.trial import Bench, Settings, Trial

AT_ONCE = 2
STARTUP = 12  # random trials before the sampler models anything


def tuned_space(facts: ModelFacts, engine_args_given: Mapping[str, str | None]) -> Space:
    """What `kvtune tune` searches for this model; flags that the person gave after `--` stay as given."""
    names = ["block_size"]
    if facts.window:
        names += [
            "slack",
            "windows",
            "policy",
            "min_drop",
            "protected_share",
            "prefix_cache_retention_interval",
        ]
    elif facts.state_layers:
        names += ["prefix_cache_retention_interval", "prefix_match_unit"]
    else:
        names += ["policy", "reuse_bonus_s", "ghost_factor"]
    space = {name: candidates(name, facts) for name in names if engine_args_given.get(name) is None}
    if not facts.window and not facts.state_layers:
        space["policy"] = ("tiered", "two_class")
    return {name: values for name, values in space.items() if len(values) > 1}


def search(
    bench: Bench,
    space: Space,
    by: Objective,
    journal: Journal,
    *,
    trials: int,
    seed: int,
    cost: StepCost,
    say: Callable[[Trial], None],
    storage: str = "",
    join: bool = False,
) -> list[Trial]:
    """The simulated trials of a study, different settings only, baseline included."""
    study = _study(bench, by, seed, storage, join)
    known = {t.key: t for t in journal.trials if t.on == "sim"}
    number = 1 + max((t.number for t in journal.trials), default=-1)
    found: dict[str, Trial] = {}
    with SimPool(bench, cost) as pool:

        def batch(asked: list[Wanted]) -> list[Trial]:
            nonlocal number
            running: dict[int, Wanted] = {}
            for w in asked:
                key = w.key("sim", bench)
                if key in known or any(r.key("sim", bench) == key for r in running.values()):
                    continue
                pool.submit(number, w.settings, stock=w.stock)
                running[number] = w
                number += 1
            for _ in range(len(running)):
                n, answer = pool.next_done()
                trial = sim_trial(bench, n, running[n], answer)
                journal.add(trial)
                say(trial)
                known[trial.key] = trial
            made = [known[w.key("sim", bench)] for w in asked]
            found.update({t.key: t for t in made})
            return made

        batch([Wanted({}, "baseline", stock=True), Wanted({})])
        while (done := _finished(study)) < trials:
            asked = [_ask(study, space) for _ in range(min(AT_ONCE, trials - done))]
            made = batch([Wanted(settings) for _, settings in asked])
            for (handle, _), trial in zip(asked, made, strict=True):
                score = by.score(trial.summary) if trial.state == "complete" else None
                _tell(study, handle, score)
    return list(found.values())


def _study(bench: Bench, by: Objective, seed: int, storage: str, join: bool) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name = f"kvtune-{bench.workload_hash[:16]}-{by.name}"
    identity = {
        "workload": bench.workload_hash,
        "model": bench.model,
        "vllm": bench.vllm,
        "flags": bench.engine_args,
    }
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    if not storage:
        return optuna.create_study(direction="maximize", sampler=sampler)
    try:
        if join:
            study = optuna.load_study(study_name=name, storage=storage, sampler=sampler)
        else:
            study = optuna.create_study(
                study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
            )
        told = study.user_attrs.get("bench")
        if told is None:
            study.set_user_attr("bench", json.dumps(identity, sort_keys=True))
        elif json.loads(told) != identity:
            raise UsageError(
                f"the study {name} at {_without_password(storage)} belongs to another bench: {told}",
                "give the same MODEL and flags, or another storage",
            )
        return study
    except KeyError as error:
        raise UsageError(
            f"no study {name} at {_without_password(storage)}",
            "start it without --join, with the same workload",
        ) from error
    except UsageError:
        raise
    except Exception as error:
        raise _storage_gone(error, storage) from error


def _finished(study: Any) -> int:
    from optuna.trial import TrialState

    return len(
        _stored(
            study, lambda: study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        )
    )


def _ask(study: Any, space: Space) -> tuple[Any, Settings]:
    def ask() -> tuple[Any, Settings]:
        handle = study.ask()
        # Positions, not values: a categorical of Optuna's must not mix None, booleans and numbers across storages.
        chosen = {name: handle.suggest_categorical(name, list(range(len(v)))) for name, v in space.items()}
        return handle, {name: values[chosen[name]] for name, values in space.items()}

    found: tuple[Any, Settings] = _stored(study, ask)
    return found


def _tell(study: Any, handle: Any, score: float | None) -> None:
    from optuna.trial import TrialState

    if score is None:
        _stored(study, lambda: study.tell(handle, state=TrialState.FAIL))
    else:
        _stored(study, lambda: study.tell(handle, score))


def _stored(study: Any, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:
        if "sqlalchemy" in type(error).__module__ or "storage" in type(error).__name__.lower():
            raise _storage_gone(error, "the study's storage") from error
        raise


def _storage_gone(error: Exception, storage: str) -> KvtuneError:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return KvtuneError(
        f"the storage {_without_password(storage)} does not answer: {first[:200]}",
        "what was simulated is in the journal: give the command again with --study when the storage is back",
    )


def _without_password(url: str) -> str:
    import re

    return re.sub(r"(//[^:/@]+):[^@/]*@", r"\1:***@", url)
