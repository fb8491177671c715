"""What every test is held to: no hook of ours outlives the test that installed it, no example has a deadline.

Engines that tests start compute with one thread each: two tests run at once, and threads that wait for each other at
every operation of a tiny model while another process has their core make it several times slower.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests import order
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
os.environ["KVTUNE_REPLAYS"] = "off"  # each test makes its own
# Engines find the plugin with the tests' weights (--load-format kvtune-seeded) there.
WEIGHTS = str(Path(__file__).with_name("weights"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WEIGHTS, os.environ.get("PYTHONPATH"))))


MANY_MODULES = 50

pytest_addoption = order.pytest_addoption
pytest_configure = order.pytest_configure
pytest_configure_node = order.pytest_configure_node
pytest_report_header = order.pytest_report_header
pytest_terminal_summary = order.pytest_terminal_summary


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order.pytest_collection_modifyitems(config, items)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"engine", "vllm"} and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports made stays: collections during tests need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def heap_stays_frozen() -> Iterator[None]:
    """The same of what a file imports later, and of what its tests thaw."""
    modules, frozen = len(sys.modules), gc.get_freeze_count()
    yield
    if len(sys.modules) > modules + MANY_MODULES or gc.get_freeze_count() < frozen:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries report what is left at exit


@pytest.fixture(params=[False, True], ids=["no-avx512-bf16", "avx512-bf16"], scope="module")
def avx512_bf16(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A CPU without AVX-512 BF16, then one with it, whichever this is: in this process and in what it starts."""
    from kvtune.base.cpu import VARIABLE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(request.param)))
        if find_spec("vllm") is None:
            yield request.param
            return
        from kvtune.plugin.vllm import cpu_flags
        from kvtune.plugin.vllm.plugin_state import STATE

        cpu_flags.install()
        yield request.param
        STATE.reset()
    cpu_flags.install()  # by the whole test run's variable


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
