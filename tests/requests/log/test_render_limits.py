"""A tokenizer is a program of a stranger: a child of limited time and memory renders, or one line says why not."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.requests.log.bodies import Body, Rendered
from kvtune.requests.log.render_loop import LOAD, RENDER_BYTES
from kvtune.requests.log.rendering import Rendering, renderer
from kvtune.requests.log.requests_log import read_log
from tests.tokenizers import OneChild, make_tokenizer

pytest.importorskip("transformers")

ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test ends its child process."""
    before = children()
    yield
    gc.collect()
    assert len(children() - before) <= 1  # the one of all tests


def children() -> set[int]:
    return {c.pid for c in psutil.Process().children() if "render_child" in " ".join(c.cmdline())}


def folder(tmp_path: Path, template: str) -> Path:
    return make_tokenizer(tmp_path / "tokenizer", text=template)


def log(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_loops_is_ended_and_named_with_the_line_after_those_before_it(tmp_path: Path) -> None:
    made = folder(tmp_path, "{% if messages[0]['content'] == 'loop' %}" + LOOP + "{% endif %}x")
    loops = {"messages": [{"role": "user", "content": "loop"}]}
    path = log(tmp_path, *[ASKED] * 5, loops, *[ASKED] * 100)
    rows = read_log(path, Rendering(str(made), render_s=0.2).render)
    assert [next(rows).line for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(KvtuneError) as no:
        next(rows)
    assert no.value.message == f"{path}, line 6 takes more than 0.2 s to render with {made}"


def test_a_template_that_makes_too_much_text_is_refused_and_the_child_lives_on(tmp_path: Path) -> None:
    by = Rendering(str(folder(tmp_path, "x")))
    before = psutil.Process(by._child.child.pid).memory_info().rss
    for template in (
        "{{ '%3000000000s' % 'a' }}",
        "{{ [[1]] | tojson(indent=2000000000) }}",
        "{{ 'a' * 3000000000 }}",
    ):
        by._asked(LOAD, str(folder(tmp_path, template)).encode())
        with pytest.raises(UsageError, match=r"is refused by the chat template of .*: MemoryError") as no:
            list(read_log(log(tmp_path, ASKED), by.render))
        assert "log.jsonl, line 1" in no.value.message and len(no.value.message.splitlines()) == 1
    assert _peak(by._child.child.pid) < before + RENDER_BYTES + (256 << 20)
    assert by.text(by.ids({"prompt": "Hi"})) == "Hi"


def _peak(pid: int) -> int:
    said = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in said.splitlines() if line.startswith("VmHWM")))


def test_a_panic_of_the_tokenizer_is_one_line(tmp_path: Path, child: OneChild) -> None:
    made = folder(tmp_path, "{{ messages[0]['content'] }}")
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    slow = {"messages": [{"role": "user", "content": "a" * 5000 + "b"}]}
    with pytest.raises(KvtuneError, match=r"log\.jsonl, line 2 ") as no:
        list(read_log(log(tmp_path, ASKED, slow), child.load(made).render))
    assert len(no.value.message.splitlines()) == 1 and "\x1b" not in no.value.message


FILES = ["tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("what", ["pipe", "zero", pytest.param("deep", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_could_be_read_for_ever_is_refused(tmp_path: Path, name: str, what: str) -> None:
    made = folder(tmp_path, "x")
    (made / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(made / name)
    elif what == "zero":
        (made / name).symlink_to("/dev/zero")
    else:
        (made / name).write_text("[" * 200_000)
    try:
        renderer(str(made)).ids(ASKED)
    except KvtuneError as error:
        assert len(error.message.splitlines()) == 1 and len(error.message) < 600
    else:
        assert what == "deep", "a pipe or a device was read"


def test_a_child_that_is_killed_is_named_with_the_signal_and_not_asked_again(tmp_path: Path) -> None:
    made = folder(tmp_path, "x")
    by = Rendering(str(made))
    os.kill(by._child.child.pid, signal.SIGKILL)
    with pytest.raises(KvtuneError, match=r"line 1 ends the process that renders with .* \(SIGKILL\)"):
        list(read_log(log(tmp_path, ASKED), by.render))
    with pytest.raises(KvtuneError, match="ended its process before"):
        by.ids(ASKED)


def test_lines_are_rendered_together_and_errors_come_in_the_order_of_the_lines(
    tmp_path: Path, child: OneChild
) -> None:
    made = folder(tmp_path, "x")
    refused = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    by = child.load(made)
    asked: list[int] = []

    def counted(bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        asked.append(len(bodies))
        return by.render(bodies)

    assert len(list(read_log(log(tmp_path, *[ASKED] * 150), counted))) == 150
    assert asked == [64, 64, 22]
    path = log(tmp_path, *[ASKED] * 70, refused, *[ASKED] * 9)
    path.write_text(path.read_text() + "torn")
    rows = read_log(path, by.render)
    assert [next(rows).line for _ in range(70)] == [*range(1, 71)]
    with pytest.raises(UsageError, match=r"log\.jsonl, line 71 has image"):
        next(rows)
    assert by.text(by.ids(ASKED)).startswith(
        "x"
    )  # what was rendered for later lines is not taken for its answer


def test_a_child_that_does_not_start_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with pytest.raises(KvtuneError, match=r"ends the process that renders with .* \(exit code 1: "):
        Rendering(str(folder(tmp_path, "x")))


def test_ctrl_c_in_between_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by = Rendering(str(folder(tmp_path, "x")))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(by._child, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by.ids(ASKED)
    assert by._child.child.returncode == -signal.SIGKILL


def test_a_fork_leaves_the_child_alone(tmp_path: Path, child: OneChild) -> None:
    by = child.load(folder(tmp_path, "x"))
    if (pid := os.fork()) == 0:
        by._close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert by.text(by.ids({"prompt": "Hi"})) == "Hi"


def test_a_lower_limit_of_the_user_stays(tmp_path: Path) -> None:
    from kvtune.requests.log.render_loop import _limit

    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        _limit(0.0, 16 << 30)
        os._exit(0 if resource.getrlimit(resource.RLIMIT_AS) == (8 << 30, 8 << 30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
