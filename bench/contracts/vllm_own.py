"""vLLM's own tests of its KV cache, scheduler and front end, with stock and with the core: what passes must go on to.

    python bench/contracts/vllm_own.py [--sdist FILE] [--set JSON] [-k EXPR] [FILE ..]

Fetches the source distribution of the installed version (nothing of it is kept), runs both in fresh processes, prints
the difference. Exit code 0 when exactly the tests of DELIBERATE pass with stock and not with the core, and these do
with `pinning` off. Tests that fail with stock as well (they want a hub, or a GPU) say nothing. With --set every
difference counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.contracts.stand_ins import put_configs, put_tokenizer

CORE = (
    "test_prefix_caching.py",
    "test_kv_cache_utils.py",
    "test_single_type_kv_cache_manager.py",
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_swa_inflight_window_free.py",
    "test_prefix_replay.py",
    "test_priority_preemption_bug.py",
    "test_priority_scheduler_random.py",
    "test_kv_cache_metrics.py",
    "test_mamba_align_chunk_split.py",
)
FRONT_END = (
    "engine/test_output_processor.py",
    "engine/test_parallel_sampling.py",
    "engine/test_logprobs_processor.py",
    "engine/test_admission_control.py",
    "streaming_input/test_async_llm_streaming.py",
)
FILES = (*(f"v1/core/{name}" for name in CORE), *(f"v1/{name}" for name in FRONT_END))
"""Under vLLM's tests. With the core, the plain outputs of FRONT_END's tests are columns (by_column.py)."""

_SPARSE = "wants nothing kept between the ends of an interval; the slack is"
_LATEST = "wants only the replay boundary kept; the slack is, too"
DELIBERATE = {
    "test_hybrid_local_kv_retention_interval_aligns_in_manager": _SPARSE,
    "test_hybrid_local_kv_retention_latest_only_reuses_replay_boundary": _LATEST
    + ", and a shorter prompt hits",
    "test_hybrid_local_kv_retention_mtp_reuses_latest_boundary": _LATEST,
    "test_pure_swa_retention_interval_caches_sparse_tails": _SPARSE,
    "test_pure_swa_retention_latest_only": _LATEST,
    "test_swa_shared_prefix_reuse_under_zero_retention": "wants a new suffix to miss at its second visit; it hits",
}
"""What the core keeps on purpose and stock does not: the tests of vLLM that say so, and why."""

CONFTESTS = ("tests/v1/engine/conftest.py", "tests/distributed/conftest.py")
"""vLLM's other ones want what only its engine tests need."""

LOADER = """
import asyncio
import functools
import inspect
import random
import pytest
import kvtune.plugin.core.plugin
kvtune.plugin.core.plugin.register()

from transformers import PreTrainedTokenizerFast
# Asked for each token of a test, of a tokenizer with 128,256 of them.
PreTrainedTokenizerFast.vocab = property(functools.cache(PreTrainedTokenizerFast.vocab.fget))

def pytest_runtest_setup(item):  # some tests draw numbers: the same on both sides
    import numpy, torch
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):  # in the place of pytest-asyncio
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
"""


def fetch(version: str, into: Path) -> Path:
    """vLLM's source distribution, by pip; its metadata is built for no device."""
    env = os.environ | {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
    command = [
        "-m",
        "pip",
        "download",
        f"vllm=={version}",
        "--no-binary",
        "vllm",
        "--no-deps",
        "-d",
        str(into),
    ]
    subprocess.run([sys.executable, *command], env=env, check=True, stdout=subprocess.DEVNULL)
    return next(into.glob(f"vllm-{version}.tar.gz"))


def unpack_tests(sdist: Path, into: Path) -> Path:
    with tarfile.open(sdist) as archive:
        members = [
            m
            for m in archive
            if "/tests/" in m.name
            and m.name.endswith((".py", ".json"))
            and ("/conftest" not in m.name or m.name.endswith(CONFTESTS))
        ]
        archive.extractall(into, members=members, filter="data")
    (into / "kvtune_loader.py").write_text(LOADER)
    shutil.copy(Path(__file__).with_name("by_column.py"), into)
    return next(path for path in into.glob("vllm-*") if path.is_dir())  # the archive lies there too


def run(root: Path, files: list[str], core: str, extra: list[str], settings: str) -> dict[str, str]:
    """Outcome by test: passed, failed, error, skipped."""
    report = root.parent / f"{core}.xml"
    env = os.environ | {
        "KVTUNE_CORE": core,
        "KVTUNE_SET": settings,
        "KVTUNE_STRICT": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(root.parent / "hub-home"),
        "PYTHONPATH": os.pathsep.join([str(root.parent), str(root), str(Path(__file__).parents[2])]),
    }
    command = ["-m", "pytest", "-q", "-p", "kvtune_loader", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [f"--rootdir={root}", "-c", os.devnull, "--override-ini=addopts=", "-W", "ignore", *extra]
    if core == "kvtune" and json.loads(settings or "{}").get("front_end", True):
        command += ["-p", "by_column"]
    log = root.parent / f"{core}.log"
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, *command, *(f"tests/{name}" for name in files)],
            cwd=root,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    if not report.exists():
        sys.exit(f"the tests did not run with {core}:\n{log.read_text()[-3000:]}")
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return outcomes


def lost_tests(stock: dict[str, str], ours: dict[str, str]) -> list[str]:
    return [name for name, kind in stock.items() if kind == "passed" and ours.get(name) != "passed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", help="of these, by name; default: all")
    parser.add_argument("--sdist", type=Path, help="a source distribution that is here already")
    parser.add_argument("--set", default="", help='core settings, JSON: {"policy": "two_class"}')
    parser.add_argument("-k", default="", help="passed to pytest")
    options = parser.parse_args()

    from kvtune.data.installed import installed_version

    with tempfile.TemporaryDirectory(prefix="tests-of-vllm-") as folder:
        here = Path(folder)
        sdist = options.sdist or fetch(installed_version(), here)
        root = unpack_tests(sdist, here)
        put_configs(here / "hub-home")
        utils = (root / "tests/v1/engine/utils.py").read_text()
        wanted = re.search(r'^TOKENIZER_NAME = "(.+)"', utils, re.M)
        assert wanted, "tests/v1/engine/utils.py names no tokenizer"
        put_tokenizer(here / "hub-home", wanted[1], [utils])
        extra = ["-k", options.k] if options.k else []
        chosen = [name for name in FILES if not options.files or {name, Path(name).name} & {*options.files}]
        results = {core: run(root, chosen, core, extra, options.set) for core in ("stock", "kvtune")}
        lost = lost_tests(results["stock"], results["kvtune"])
        unpinned = {}
        if lost:
            again = ["-k", " or ".join(sorted({plain_name(name) for name in lost}))]
            files = sorted({file_of(name) for name in lost})
            settings = json.dumps({**json.loads(options.set or "{}"), "pinning": False})
            unpinned = run(root, files, "kvtune", again, settings)
    for core, result in results.items():
        counts = {kind: list(result.values()).count(kind) for kind in sorted(set(result.values()))}
        print(f"{core:7s} {len(result)} tests: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    stock, ours = results["stock"], results["kvtune"]
    deliberate = {} if options.set else DELIBERATE
    faults = 0
    for name in lost:
        why = deliberate.get(plain_name(name), "")
        if why and unpinned.get(name) == "passed":
            print(f"differs on purpose, passes with pinning off: {name}: {why}")
        else:
            faults += 1
            print(f"passes with stock, {ours.get(name, 'not run')} with the core: {name}")
    for name in stock:
        if plain_name(name) in deliberate and name not in lost:
            faults += 1
            print(f"named as a deliberate difference and is none: {name}")
    for name in (n for n, kind in ours.items() if kind == "passed" and stock.get(n) != "passed"):
        print(f"passes with the core only: {name}")
    if not faults:
        print("every other test that passes with stock passes with the core")
    return 1 if faults else 0


def file_of(name: str) -> str:
    """The file of a test; its class may be part of the name."""
    path = name.partition("::")[0].removeprefix("tests.").replace(".", "/")
    return next(file for file in FILES if f"{path}/".startswith(f"{file.removesuffix('.py')}/"))


def plain_name(name: str) -> str:
    """A test's function, without its module and its parameters."""
    return name.partition("::")[2].partition("[")[0]


if __name__ == "__main__":
    sys.exit(main())
