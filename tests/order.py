"""The order of tests: files, and the tests of a file, are drawn from a seed, so that no test can lean on another.

A test's place depends on the seed and on its name alone: some of the files, run with the same seed, keep their order.
The files that one worker ran, run again by one process, repeat what that worker did; a red run prints that command.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

SHOWN_FILES = 25
LONG_S = 8.0
"""Files that take longer are drawn in the first half of the order, so that no worker ends long after the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="draws the order of files and tests; default: any")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        drawn = random.SystemRandom().randrange(100_000)
        config.option.seed = getattr(config, "workerinput", {}).get("seed", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of xdist the seed of all."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"order: --seed {config.option.seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = in_order(items, config.option.seed)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Print the files that took longest, the seed, and how to repeat a red run. A green `make test` keeps its times."""
    took: Counter[str] = Counter()
    files: defaultdict[str, dict[str, None]] = defaultdict(dict)
    red: dict[str, None] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                worker = getattr(report, "worker_id", "")
                took[file_of(report.nodeid)] += report.duration
                files[worker][report.nodeid.split("::")[0]] = None
                if report.failed:
                    red[worker] = None
    terminalreporter.section("slowest files")
    for name, seconds in took.most_common(SHOWN_FILES):
        terminalreporter.line(f"{seconds:7.1f} s  {name}")
    terminalreporter.line(f"{sum(took.values()):7.1f} s  in all; order: --seed {config.option.seed}")
    for worker in filter(None, red):
        folder = config.cache.mkdir("kvtune") if config.cache else config.rootpath
        listed = folder / f"red-{worker}"
        listed.write_text("".join(f"{file}\n" for file in files[worker]))
        marks = f" -m '{config.option.markexpr}'" if config.option.markexpr else ""
        terminalreporter.line(
            f"{worker} failed; this repeats what it ran: "
            f".venv/bin/python -m pytest -q{marks} --seed {config.option.seed} @{listed.relative_to(config.rootpath)}"
        )
    if os.environ.get("KVTUNE_KEEP_DURATIONS") == "1" and exitstatus == 0:
        keep_durations(took)


def in_order(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests in the order of the seed, those of a file together."""
    durations = read_durations()
    engines = {file_of(item.nodeid) for item in items if item.get_closest_marker("engine")}

    def key(item: pytest.Item) -> tuple[float, str, float]:
        file = file_of(item.nodeid)
        is_long = durations[file] > LONG_S if file in durations else file in engines
        return place(seed, file) / (2 if is_long else 1), file, place(seed, item.nodeid)

    return sorted(items, key=key)


def place(seed: int, name: str) -> float:
    """Return a number from 0 to 1 that the seed draws for a name."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big") / 2**56


def file_of(test: str) -> str:
    """Return the file of a test's id, as in the durations."""
    return test.split("::")[0].removeprefix("tests/")


def durations_file() -> Path:
    """Return where the seconds of each test file in the last green `make test` of this user stand."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvtune-tests" / "durations.json"


def read_durations() -> dict[str, float]:
    try:
        return {
            str(name): float(seconds) for name, seconds in json.loads(durations_file().read_text()).items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def keep_durations(took: Counter[str]) -> None:
    durations = {name: round(seconds, 1) for name, seconds in sorted(took.items())}
    path = durations_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(durations, indent=1) + "\n")
    part.replace(path)
