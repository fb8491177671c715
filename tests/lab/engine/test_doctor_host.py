"""`kvtune doctor` where there is a GPU, here one that only nvidia-smi knows of: it measures what the host can drive."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.lab.engine.real import kvtune

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]


def test_a_machine_with_a_gpu_learns_what_its_host_can_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = kvtune("doctor", "--json", "--fail-on", "error", output=tmp_path)
    findings = json.loads(done.stdout)["environment"]
    (host,) = (finding for finding in findings if finding["topic"] == "host")
    if host["level"] == "ok":
        assert "output tokens/s, which " in host["text"] and " us" in host["text"]
    else:  # a busy host cannot be measured, and says so
        assert host["level"] == "note" and "was not measured: too few samples" in host["text"], host
