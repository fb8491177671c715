"""What `kvtune` alone prints: where to begin, and what is here."""

from __future__ import annotations

import pytest

from kvtune.cli import doors
from kvtune.lab.setup.platform import Gpu
from tests.servers.watch.played import Answers, http
from tests.simulator import run


def test_kvtune_alone_names_the_doors_and_what_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http(Answers("")) as base:
        monkeypatch.setattr(doors, "URL", base)
        monkeypatch.setattr(
            "kvtune.lab.setup.platform.gpus", lambda: [Gpu("NVIDIA H100"), Gpu("NVIDIA H100")]
        )
        assert run([]) == 0
    said = capsys.readouterr().out
    assert "2 x NVIDIA H100" in said and f"a server of vLLM 0.32.0 at {base}" in said
    assert all(f"kvtune {words[0]}" in said for _, words in doors.DOORS)


@pytest.mark.parametrize("answer", ["hello", "[1]", '{"version": {"a": 1}}'])
def test_what_is_no_vllm_server_is_not_called_one(
    answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers("")
    answers.paths["/version"] = (200, answer)
    with http(answers) as base:
        monkeypatch.setattr(doors, "URL", base)
        assert run([]) == 0
    assert f"no vLLM server at {base}" in capsys.readouterr().out
