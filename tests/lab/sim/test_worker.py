"""The simulator process prepares itself for forks: what it imports must not start the accelerator that forks use."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvtune.base import children
from kvtune.base.errors import EXIT_INTERRUPTED
from kvtune.lab.setup.setup import Load, Setup
from kvtune.lab.sim import worker
from kvtune.requests.loads.spec import build

# A kernel's module as FLA's is: importing it asks for the device's properties, which initialises the device.
KERNELS = "import fake_device\n\nfake_device.initialised = True\n"


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an accelerator, and models that import kernels or do not."""
    (tmp_path / "fake_device.py").write_text("initialised = False\n")
    (tmp_path / "fake_kernels.py").write_text(KERNELS)
    (tmp_path / "fake_gdn.py").write_text("import fake_kernels\n")
    (tmp_path / "fake_llama.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fake_device", "fake_kernels", "fake_gdn", "fake_llama"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(worker, "PRELOAD", ("fake_device",))
    monkeypatch.setattr(worker, "OF_A_CPU", ())
    monkeypatch.setattr(worker, "has_accelerator", lambda: True)
    monkeypatch.setattr(
        worker,
        "accelerator_started",
        lambda: bool(sys.modules["fake_device"].initialised),  # type: ignore[attr-defined]
    )
    monkeypatch.setattr(worker, "import_class", importlib.import_module)
    return tmp_path


def test_a_class_that_starts_the_accelerator_is_left_to_the_forks(device: Path) -> None:
    worker.prepare("fake_gdn")
    assert "fake_gdn" not in sys.modules and not worker.accelerator_started()
    assert imported_in_a_fork("fake_gdn") == 1, (
        "a fork imports it by itself, and starts the accelerator there"
    )


def test_other_classes_are_imported_once_before_the_first_fork(device: Path) -> None:
    worker.prepare("fake_llama")
    assert "fake_llama" in sys.modules and not worker.accelerator_started()


def test_a_class_that_cannot_be_imported_counts_as_one_that_does(
    device: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each job then reports the error."""
    assert worker.starts_accelerator(lambda: importlib.import_module("fake_missing") and None)
    capfd.readouterr()


def test_a_machine_without_an_accelerator_tries_nothing(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "has_accelerator", lambda: False)
    tried: list[str] = []
    assert not worker.starts_accelerator(lambda: tried.append("here"))
    worker.prepare("fake_gdn")
    assert "fake_gdn" in sys.modules and not tried


def imported_in_a_fork(name: str) -> int:
    """Exit code of a fork that imports a module: 1 if that started the accelerator in it."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            importlib.import_module(name)
            code = int(worker.accelerator_started())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_failed_import_names_a_vllm_that_the_simulator_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ImportError("cannot import name 'get_offloading_group_ids'")
    assert "vLLM cannot be imported: cannot import name" in worker.not_imported(missing).message
    monkeypatch.setattr("kvtune.lab.setup.resolve.differing", lambda parts: "a.B is gone")
    report = worker.not_imported(missing)
    assert "the simulator does not know vLLM" in report.message and "a.B is gone" in report.message
    assert "--on engine" in report.hint and report.number < 0


def test_jobs_of_one_load_share_its_workload_if_its_hash_says_that_it_is_the_same() -> None:
    server = worker.Server(-1)
    hashed = Load.of(build("decode:requests=2,prompt=8,output=4"))
    for load, shared in ((hashed, True), (Load(spec=hashed.spec), False)):
        of_jobs = [msgspec.json.decode(msgspec.json.encode(load), type=Load) for _ in range(2)]
        assert of_jobs[0] == of_jobs[1] and of_jobs[0] is not of_jobs[1]
        first, second = map(server._built, of_jobs)
        assert (first is second) == shared and first.hash == second.hash == hashed.hash


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_a_fork_imported_its_parent_imports_where_no_module_can_start_a_gpu(
    accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(job: worker.ReplayJob, *_: object) -> None:
        importlib.import_module("kvtune.servers.tap.limits")

    monkeypatch.delitem(sys.modules, "kvtune.servers.tap.limits", raising=False)
    monkeypatch.setattr(worker, "answer", answer)
    monkeypatch.setattr(worker, "has_accelerator", lambda: accelerator)
    server = worker.Server(-1)
    setup = Setup(model="tiny-opt", load=Load.of(build("decode:requests=2,prompt=8,output=4")))
    server._start(worker.ReplayJob(number=0, setup=setup, out=""))
    server._reap(block=True)
    assert ("kvtune.servers.tap.limits" in sys.modules) != accelerator


def test_a_worker_whose_parent_died_before_it_began_ends_at_once() -> None:
    reader, writer = os.pipe()
    words = children.python("kvtune.lab.sim.worker", str(writer))
    child = children.start(words, stdin=subprocess.PIPE, pass_fds=[writer])
    os.close(writer)
    assert child.stdin is not None
    child.stdin.close()
    with os.fdopen(reader, "rb") as reports:
        assert reports.read() == b""  # it would say that it is ready, once it has imported vLLM
    assert child.wait() == EXIT_INTERRUPTED
