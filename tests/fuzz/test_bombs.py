"""Every reader takes the same bombs: it reads each or says in one line why not, in little memory, and it ends."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.fuzz.readers import READERS, ROOT, Reader, verdict

MEMORY = 192 << 20
"""What one input may take, beyond what the process has."""
GUARD_S = 600
"""No reader is near it: that it ends is counted in tests/test_bounded.py; here a hang only must not stop the tests."""
SIZE = 1 << 19
VALUES = {
    "lists in lists": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "objects in objects": b'{"a":' * (SIZE // 6) + b"1" + b"}" * (SIZE // 6),
    "lists, as deep as Python goes": b"[" * 900 + b"]" * 900,
    "empty lists": b"[" + b"[]," * (SIZE // 3) + b"1]",
    "empty objects": b"[" + b"{}," * (SIZE // 3) + b"1]",
    "numbers": b"[" + b"1," * (SIZE // 2) + b"1]",
    "keys": b"{" + b",".join(b'"%x":1' % n for n in range(SIZE // 12)) + b"}",
    "texts": b"[" + b'"",' * (SIZE // 3) + b"1]",
    "a long key": b'{"' + b"k" * SIZE + b'":1}',
    "a text with a wide letter": b'"' + b"a" * SIZE + "\U0001f600".encode() + b'"',
    "a number of many digits": b"9" * SIZE,
    "a large number": b"%d" % 10**18,
    "a number beyond floats": b"1e999",
}
TOML = {
    "one dotted key": b"x." * 50_000 + b"y = 1\n",
    "a dotted header": b"[" + b"x." * 50_000 + b"y]\n",
    "tables": b"a = " + b"{a = " * 20_000 + b"1" + b"}" * 20_000 + b"\n",
    "lists": b"a = " + b"[" * 50_000 + b"]" * 50_000 + b"\n",
    "keys": b"".join(b"k%d = 1\n" % n for n in range(20_000)),
    "a hexadecimal number": b"a = 0x" + b"f" * 100_000 + b"\n",
    "bytes": b"#" * SIZE,
}
LINES = {
    "a long line": b"a" * SIZE,
    "lines": b"a\n" * (SIZE // 2),
    "labels": b'vllm:x{a="' + b"b" * SIZE + b'"} 1\n',
    "series": b"".join(b'vllm:request_success_total{r="%d"} 1\n' % n for n in range(SIZE // 40)),
    "fields": b"," * SIZE,
}
ONE_OF_A_KIND = ("analyst", "recipe")
"""Of the readers of JSON and of TOML; the others are in `make full`."""
FIRST_VALUE = re.compile(rb'(?<=:)\s*(?:-?\d[\d.]*|"[^"]*"|\[[^\[\]]*\])')


def _analyst(path: Path) -> None:
    """A body and an answer of a tap, plain and packed."""
    from kvtune.tap.analyst import Analyst
    from kvtune.tap.answers import read_answer
    from kvtune.tap.messages import Sent, Settings

    content = path.read_bytes()
    analyst = Analyst(Settings("http://127.0.0.1:9", {}, False, "t-", "", False, True))
    try:
        for number, (body, encoding) in enumerate(((content, ""), (gzip.compress(content, 1), "gzip"))):
            analyst.take(Sent(number, "/v1/chat/completions", "", True, "c", 1.0, 1.0, body, encoding))
            for kind in ("application/json", "text/event-stream"):
                read_answer(body, kind, encoding)
        assert analyst.remembered.held_bytes < MEMORY
    finally:
        analyst.close()


def _weka(path: Path) -> None:
    from kvtune.workload.weka import session

    session(path)


def _cost(path: Path) -> None:
    from kvtune.fake_device.cost import read_cost

    read_cost(path.read_text(errors="replace"))


def _forward(path: Path) -> None:
    from kvtune.fake_device.forward import forward_cost

    forward_cost(path)


def _settings(path: Path) -> None:
    from kvtune.core.settings import from_environment
    from kvtune.run.config import read_config

    path.rename(own := path.with_name("kvtune.toml"))
    read_config(path.parent)
    from_environment({"KVTUNE_CORE": "kvtune", "KVTUNE_RECIPE": str(own)})


def _texts(path: Path) -> None:
    """What text of prompts and command lines goes through."""
    from kvtune.masking import without_secrets
    from kvtune.text.kinds import sorted_json
    from kvtune.text.parts import of_text

    text = path.read_bytes().decode(errors="replace")
    of_text(text)
    sorted_json(text)
    if len(text) < 1 << 16:  # a command line is no longer
        without_secrets(["--hf-overrides", text])


CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "usage": {"prompt_tokens": 3}}).encode()
MORE = {
    "analyst": (CHAT, _analyst),
    "weka": (b'{"id": "a", "block_size": 64, "requests": []}', _weka),
    "cost": (b'{"step_us": 1.0}', _cost),
    "forward": (b"[]", _forward),
    "settings": (b"[core]\n", _settings),
    "texts": (b'{"name":\n {"parameters": 1}}', _texts),
}


def bombs(name: str) -> Iterator[tuple[str, bytes]]:
    """What each reader gets: a bomb alone, before a real input, and in place of one of its values."""
    seeds = MORE[name][:1] if name in MORE else [content for _, content in READERS[name].seeds()[:1]]
    seed = seeds[0]
    if name in ("run", "page"):
        for kind, bomb in VALUES.items():
            yield kind, _with_header(seed, bomb)
    elif name in ("recipe", "settings"):
        for kind, bomb in TOML.items():
            yield kind, bomb
            yield f"{kind}, before a real one", bomb + seed
    elif name in ("metrics", "burstgpt", "azure", "log"):
        for kind, bomb in LINES.items():
            yield kind, bomb
            yield f"{kind}, after real ones", seed + bomb
    else:
        for kind, bomb in VALUES.items():
            yield kind, bomb
            if seed.startswith(b"{"):
                yield f"{kind}, in a new field", b'{"bomb":' + bomb + b"," + seed[1:]
                yield f"{kind}, in a known field", FIRST_VALUE.sub(lambda _, bomb=bomb: bomb, seed, count=1)  # type: ignore[misc]


def _with_header(run: bytes, bomb: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(run)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.namelist():
            content = old.read(part)
            new.writestr(part, b'{"bomb":' + bomb + b"," + content[1:] if part == "header.json" else content)
    return made.getvalue()


def judged(name: str) -> dict[str, str]:
    """What is wrong with how a reader takes each bomb. In a child: its memory is limited from now on."""
    for more, (seed, read) in MORE.items():
        READERS[more] = Reader(lambda seed=seed: [("a", seed)], lambda data, _: data, read)  # type: ignore[misc]
    wrong = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        first = Path(folder) / "first"
        first.mkdir()
        verdict(name, READERS[name].seeds()[0][1], first)  # imports what it needs
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        for number, (kind, data) in enumerate(bombs(name)):
            (place := Path(folder) / str(number)).mkdir()
            if what := verdict(name, data, place)[0]:
                wrong[kind] = what
            for path in place.iterdir():
                path.unlink()
    return wrong


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_A_KIND else pytest.mark.full)
        for name in sorted({*READERS, *MORE} - {"page"})
    ],
)
def test_a_reader_takes_bombs_within_its_memory_and_in_one_line(name: str) -> None:
    code = f"import json; from tests.fuzz.test_bombs import judged; print(json.dumps(judged({name!r})))"
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=ROOT, timeout=GUARD_S
    )
    assert child.returncode == 0
    assert json.loads(child.stdout.decode().splitlines()[-1]) == {}
