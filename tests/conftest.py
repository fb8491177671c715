"""What every test is held to: no hook of ours outlives the test that installed it, no example has a deadline.

Engines that tests start compute with one thread each: two tests run at once, and threads that wait for each other at
every operation of a tiny model while another process has their core make it several times slower.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.simulator import LENDER, Borrowed

# A busy machine is no defect: no test asserts a time.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")

# Started in the background of a script, SIGINT is ignored here and in every child, under nohup SIGHUP; tests send both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub


SHOWN_FILES = 25
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each test file, as measured by `make durations`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker ends long after the others."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -known.get(file_of(item.nodeid), 0.0))
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"engine", "vllm"} and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports made stays: collections during tests need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries report what is left at exit


def file_of(test: str) -> str:
    """The file of a test's id, as in durations.json."""
    return test.split("::")[0].removeprefix("tests/")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the files that took longest; KVTUNE_DURATIONS=1 keeps the times of all."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[file_of(report.nodeid)] += report.duration
    terminalreporter.section("slowest files")
    for name, seconds in took.most_common(SHOWN_FILES):
        terminalreporter.line(f"{seconds:7.1f} s  {name}")
    if os.environ.get("KVTUNE_DURATIONS") == "1":
        kept = {name: round(seconds, 1) for name, seconds in sorted(took.items()) if seconds >= 0.5}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.fixture(params=[False, True], ids=["no-avx512-bf16", "avx512-bf16"], scope="module")
def avx512_bf16(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A CPU without AVX-512 BF16, then one with it, whichever this is: in this process and in what it starts."""
    from kvtune.run.cpu import VARIABLE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(request.param)))
        if find_spec("vllm") is None:
            yield request.param
            return
        from kvtune.vllm import cpu_flags

        with answered_here(cpu_flags):
            yield request.param


@contextmanager
def answered_here(cpu_flags: Any) -> Iterator[None]:
    """vLLM's platform is told the answer in this process, and asks the CPU again afterwards."""
    if cpu_flags.installed():  # by the whole test run's variable
        yield
        return
    cpu_flags.install()
    try:
        yield
    finally:
        cpu_flags.uninstall()


@pytest.fixture(scope="session", autouse=True)
def shared_simulator() -> Iterator[None]:
    """Commands and tests share a simulator process (tests/simulator.py)."""
    yield
    LENDER.end()


@pytest.fixture(scope="session")
def simulators() -> Borrowed:
    pytest.importorskip("vllm", reason="needs vLLM")
    return Borrowed()


@pytest.fixture(autouse=True)
def log_is_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM, once imported, keeps its loggers' lines from the root logger, where tests look; simulators silence it."""
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm.kvtune")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        monkeypatch.setattr(logger, "propagate", True)
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_hook_leaks() -> Iterator[None]:
    yield
    left = [c for c in gc.callbacks if (getattr(c, "__module__", "") or "").startswith("kvtune")]
    assert not left, f"collector callbacks outlived their test: {left}"
