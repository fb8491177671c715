"""Optuna's study of one tuning: in memory, or in a database that several machines share.

Each trial is stored completely (attribute `TRIAL`), so that every worker has the others' results. Errors of the storage
become KvtuneErrors that do not show the URL's password.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.result import Settings, Trial
from kvtune.answers.tune.space.grid import Space, settings_of
from kvtune.answers.tune.trials.journal import Line, decoded
from kvtune.answers.tune.trials.setup import check_settings
from kvtune.base.bounded import decode_json
from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError, reason
from kvtune.base.masking import without_password, without_secrets
from kvtune.data.flags import flag_value
from kvtune.data.recipe import Scalar
from kvtune.lab.device.cost import NOMINAL, CopyTime, StepCost
from kvtune.lab.setup.setup import POOL_FLAG, Setup

if TYPE_CHECKING:
    import optuna

Result = TypeVar("Result")

STARTUP = 12  # random trials before the sampler models anything
TRIAL = "trial"


SHARED = ("cost", "specs", "async_scheduling", "copy")


class _Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What a shared study holds of the simulated engine: its pool in blocks, and the fields SHARED of `Simulated`."""

    cost: StepCost = NOMINAL
    blocks: int = 0
    block_tokens: int = 0
    specs: dict[str, Any] = {}
    async_scheduling: bool | None = None
    copy: CopyTime = CopyTime()


class OptunaStudy:
    """Proposes settings and learns from their scores. In memory, the same seed proposes the same settings."""

    def __init__(
        self, setup: Setup, objective: Objective, seed: int, *, storage: str = "", join: bool = False
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._url, self._shown = storage, without_password(storage) if storage else ""
        if not storage:
            self._study = optuna.create_study(directions=_directions(objective), sampler=_sampler(seed))
            return
        name = f"kvtune-{setup.load.hash[:16]}-{'+'.join(objective.names)}"
        self._study = self._kept(lambda: self._stored(name, storage, join, objective))
        self._check(name, setup)
        # A resumed study must not propose its first settings again, nor a joining worker another worker's.
        begun = len(self._kept(lambda: self._study.get_trials(deepcopy=False)))
        offset = os.getpid() * 7919 + time.time_ns() if join else 0
        self._study.sampler = _sampler((seed + begun + offset) % 2**32)

    def finished(self) -> int:
        """Return how many trials have ended, on all workers."""
        from optuna.trial import TrialState

        states = (TrialState.COMPLETE, TrialState.FAIL)
        return len(self._kept(lambda: self._study.get_trials(deepcopy=False, states=states)))

    def ask(self, space: Space) -> tuple[optuna.Trial, Settings]:
        def ask() -> tuple[optuna.Trial, Settings]:
            handle = self._study.ask()
            # Positions, not values: Optuna's categoricals must not mix strings, booleans and numbers.
            choice = {
                name: handle.suggest_categorical(name, list(range(len(v)))) for name, v in space.items()
            }
            return handle, settings_of({name: values[choice[name]] for name, values in space.items()})

        return self._kept(ask)

    def propose_first(self, space: Space, settings: Mapping[str, Scalar]) -> None:
        """Queue a trial of these settings, with every other knob at its first value."""
        choice = {
            name: values.index(settings[name]) if name in settings else 0 for name, values in space.items()
        }
        self._kept(lambda: self._study.enqueue_trial(choice, skip_if_exists=True))

    def tell(self, handle: optuna.Trial, scores: list[float] | None, trial: Trial) -> None:
        """Store a trial and its scores, one per objective (None: the trial failed)."""
        from optuna.trial import TrialState

        def tell() -> None:
            handle.set_user_attr(TRIAL, msgspec.json.encode(trial).decode())
            if scores is None:
                self._study.tell(handle, state=TrialState.FAIL)
            else:
                self._study.tell(handle, scores)

        self._kept(tell)

    def trials(self) -> list[Trial]:
        """Return the trials that all workers have simulated."""
        kept = self._kept(lambda: self._study.get_trials(deepcopy=False))
        trials = [self._read(t.user_attrs[TRIAL], Trial) for t in kept if TRIAL in t.user_attrs]
        for trial in trials:
            check_settings(trial.settings, f"the study at {self._shown}")
        return trials

    def share_engine(self, setup: Setup, *, mine: bool) -> Setup:
        """Return the set-up with the simulated engine that all workers share.

        With `mine`, or if no engine is stored, store the set-up's.
        """
        attributes = self._kept(lambda: self._study.user_attrs.get("engine"))
        if attributes is not None and not mine:
            shown = self._read(attributes, _Engine)
            setup = setup.with_pool(shown.blocks, shown.block_tokens)
            return setup.replayed(**{name: getattr(shown, name) for name in SHARED})
        sim, given = setup.simulated, flag_value(setup.engine_args, POOL_FLAG) or ""
        shown = _Engine(
            blocks=int(given) if given.isdecimal() else 0,
            block_tokens=setup.pool.block_tokens,
            **{name: getattr(sim, name) for name in SHARED},
        )
        self._kept(lambda: self._study.set_user_attr("engine", msgspec.json.encode(shown).decode()))
        return setup

    def _read(self, stored: object, kind: type[Line]) -> Line:
        try:
            return decoded(str(stored).encode(), kind)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"the study at {self._shown} holds what is no {kind.__name__}: {reason(error)}",
                "begin another study, with another name",
            ) from error

    def _stored(self, name: str, url: str, join: bool, objective: Objective) -> optuna.Study:
        import optuna

        kept = optuna.storages.RDBStorage(_with_driver(url), engine_kwargs=_options(url))
        if not join:
            return optuna.create_study(
                study_name=name, storage=kept, directions=_directions(objective), load_if_exists=True
            )
        try:
            return optuna.load_study(study_name=name, storage=kept)
        except KeyError as error:
            raise UsageError(
                f"no study {name} at {self._shown}", "begin it without --join, with the same workload"
            ) from error

    def _check(self, name: str, setup: Setup) -> None:
        identity = {
            "workload": setup.load.hash,
            "model": setup.model,
            "vllm": setup.vllm,
            "flags": without_secrets(setup.engine_args),
            **({"slo": setup.load.slo} if setup.load.slo else {}),
        }
        stored = self._kept(lambda: self._study.user_attrs.get("bench"))
        if stored is None:
            self._kept(lambda: self._study.set_user_attr("bench", json.dumps(identity, sort_keys=True)))
        elif decode_json(stored) != identity:
            raise UsageError(
                f"the study {name} at {self._shown} belongs to another bench: {stored}",
                "give the same MODEL and flags, or another --study URL",
            )

    def _kept(self, do: Callable[[], Result]) -> Result:
        try:
            return do()
        except ImportError as error:
            raise KvtuneError(
                f"the driver of {self._shown} is not installed: {error}",
                "`pip install 'kvtune[database]'` brings PostgreSQL's",
                EXIT_USAGE,
            ) from error
        except KvtuneError:
            raise
        except Exception as error:
            if "sqlalchemy" not in type(error).__module__ and "Storage" not in type(error).__name__:
                raise
            cause = error.__cause__ or error
            raise KvtuneError(
                f"the storage {self._shown} does not answer: {self._first_line(cause)}",
                "finished trials are kept there: run the same command when the storage is back",
            ) from error

    def _first_line(self, error: BaseException) -> str:
        """Return the first line of the driver's message without the URL; if it has the password, the error's type."""
        from sqlalchemy.engine import make_url

        line = (str(error).strip().splitlines() or ["no message"])[0]
        with contextlib.suppress(Exception):
            if (password := make_url(self._url).password) and str(password) in line:
                return type(error).__name__
        return line.replace(self._url, self._shown)[:200]


def _directions(objective: Objective) -> list[str]:
    return ["maximize"] * len(objective.all)


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)


def _with_driver(url: str) -> str:
    """Add the driver psycopg to a PostgreSQL URL; kvtune does not install SQLAlchemy's default driver."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def _options(url: str) -> dict[str, object]:
    """Return SQLAlchemy's options: a new connection for each use, so that connections do not go stale or stay open.

    Connecting takes milliseconds, a trial takes seconds. `client_encoding` makes any database's text decodable.
    """
    from sqlalchemy.pool import NullPool

    options: dict[str, object] = {"poolclass": NullPool}
    if _with_driver(url).startswith("postgresql+psycopg:"):
        options["connect_args"] = {"client_encoding": "utf8"}
    return options
