"""What comes from outside is decoded in kvtune/base/bounded.py alone, within a budget; exceptions have reasons."""

from __future__ import annotations

import ast
import contextlib
import gzip
import json
import random
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtune
from kvtune.base import bounded
from kvtune.base.bounded import (
    BeyondError,
    Budget,
    Scan,
    TooLongError,
    check_json,
    cpu_limit,
    decode_json,
    decode_json_as,
    decode_metrics,
    decode_toml,
    msgpack_decoder,
    unpack,
)

ROOT = Path(kvtune.__file__).parents[1]
OWN_CHILD, OWN_FOLDER, OWN_FILE, OWN_TEXT = (
    "kvtune's own child said it on a pipe, or kvtune to it",
    "kvtune's own process wrote it into the run's work folder",
    "it is a file of kvtune's package",
    "kvtune encoded it a moment before",
)
EXCEPTIONS = {
    "kvtune/base/bounded.py": "the one place",
    "kvtune/answers/doctor/child.py": OWN_CHILD,
    "kvtune/lab/engine/driver.py": OWN_FOLDER,
    "kvtune/lab/engine/config.py": OWN_TEXT,
    "kvtune/lab/engine/host.py": OWN_FOLDER,
    "kvtune/data/layout/hub.py": OWN_FILE,
    "kvtune/data/layout/models.py": OWN_FILE,
    "kvtune/lab/engine/vllm_counts.py": OWN_FOLDER,
    "kvtune/base/dialogue.py": OWN_CHILD,
    "kvtune/lab/device/settings.py": OWN_FOLDER,
    "kvtune/plugin/probe/objects/tally.py": OWN_FOLDER,
    "kvtune/plugin/probe/recorder.py": OWN_FOLDER,
    "kvtune/lab/engine/stacks.py": "py-spy, which kvtune started, wrote it into the run's work folder",
    "kvtune/plugin/probe/status.py": OWN_FOLDER,
    "kvtune/plugin/vllm/manifest.py": OWN_FILE,
    "kvtune/requests/log/render_loop.py": OWN_CHILD,
}
DECODERS = {
    "json.loads",
    "json.load",
    "json.JSONDecoder",
    "zlib.decompress",
    "zlib.decompressobj",
    "yaml.load",
    "prometheus_client.parser.text_string_to_metric_families",
}
DECODERS |= {
    f"msgspec.{kind}.{name}" for kind in ("json", "msgpack", "toml", "yaml") for name in ("decode", "Decoder")
}
MODULES = {"tomllib", "gzip", "bz2", "lzma", "pickle", "marshal"}
WORDS = ("json", "zlib", "yaml", "msgpack", "prometheus_client.parser", *MODULES)


def decoders(source: str) -> list[str]:
    """Every use of a decoder in the source, under whatever name it is imported."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in DECODERS:
            uses.append(name)
        elif isinstance(node, ast.Import):
            uses += [one.name for one in node.names if one.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{one.name}" for one in node.names}
            uses += [*(names & DECODERS), *([node.module] if node.module in MODULES else [])]
    return uses


@pytest.mark.lint
def test_nothing_else_decodes_what_comes_from_outside() -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvtune").rglob("*.py")
        if any(word in (source := path.read_text(encoding="utf-8")) for word in WORDS) and decoders(source)
    }
    assert using == EXCEPTIONS.keys()


OWN_METHOD, KERNEL, ENGINE, DESCRIPTOR = (
    "a method of kvtune's that opens no file",
    "the kernel's own file",
    "a file of the installed vLLM, whose code runs",
    "what `files` has opened, or a mark of kvtune's own that may not be a link",
)
OPENERS = {
    "kvtune/base/files.py": "the one place",
    "kvtune/base/children.py": OWN_METHOD,
    "kvtune/base/cpu.py": KERNEL,
    "kvtune/base/scratch.py": DESCRIPTOR,
    "kvtune/answers/doctor/environment.py": KERNEL,
    "kvtune/answers/doctor/line.py": OWN_FILE,
    "kvtune/cli/notices.py": "/dev/null",
    "kvtune/data/installed.py": ENGINE,
    "kvtune/data/layout/hub.py": OWN_FILE,
    "kvtune/data/layout/models.py": OWN_FILE,
    "kvtune/data/run/file.py": DESCRIPTOR,
    "kvtune/data/run/limits.py": KERNEL,
    "kvtune/data/run/machine.py": KERNEL,
    "kvtune/data/run/signature.py": DESCRIPTOR,
    "kvtune/data/show/page.py": OWN_FILE,
    "kvtune/lab/device/settings.py": OWN_FOLDER,
    "kvtune/lab/engine/driver.py": OWN_FOLDER,
    "kvtune/lab/engine/host.py": OWN_FOLDER,
    "kvtune/lab/engine/launch.py": OWN_FOLDER,
    "kvtune/lab/engine/process.py": KERNEL,
    "kvtune/lab/engine/profile.py": OWN_FOLDER,
    "kvtune/lab/engine/record.py": OWN_FOLDER,
    "kvtune/lab/engine/rings.py": OWN_FOLDER,
    "kvtune/lab/engine/stacks.py": OWN_FOLDER,
    "kvtune/lab/engine/vllm_counts.py": OWN_FOLDER,
    "kvtune/lab/sim/worker.py": OWN_CHILD,
    "kvtune/plugin/probe/objects/tally.py": OWN_FOLDER,
    "kvtune/plugin/probe/phase.py": OWN_FOLDER,
    "kvtune/plugin/probe/recorder.py": OWN_FOLDER,
    "kvtune/plugin/probe/ring.py": OWN_FOLDER,
    "kvtune/plugin/probe/status.py": OWN_FOLDER,
    "kvtune/plugin/vllm/manifest.py": ENGINE,
    "kvtune/plugin/vllm/names.py": ENGINE,
    "kvtune/requests/log/render_loop.py": KERNEL,
    "kvtune/servers/tap/analyst.py": OWN_METHOD,
    "kvtune/servers/tap/judging.py": OWN_METHOD,
    "kvtune/servers/tap/log.py": OWN_METHOD,
    "kvtune/servers/watch/export.py": OWN_FILE,
    "kvtune/servers/watch/requests.py": OWN_METHOD,
}
OPENS = {"open", "read_text", "read_bytes", "ZipFile", "memmap", "fromfile", "loadtxt", "genfromtxt"}
PARTS = ("open(", "read_", "ZipFile", "memmap", "fromfile", "txt(", "load(", "linecache", "fileinput")
LIBRARIES = {"np.load", "numpy.load", "linecache.getlines", "fileinput.input", "torch.load"}


def openings(source: str) -> list[str]:
    """Every call in the source that opens a file by its name."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [name for name in calls if name.rpartition(".")[2] in OPENS or name in LIBRARIES]


@pytest.mark.lint
def test_nothing_else_opens_a_file_that_others_name() -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvtune").rglob("*.py")
        if any(word in (source := path.read_text(encoding="utf-8")) for word in PARTS) and openings(source)
    }
    assert using == OPENERS.keys()


@pytest.mark.parametrize(
    "code", ["p.open('rb')", "open(p)", "os.open(p, 0)", "(a / b).read_text()", "np.load(p)"]
)
def test_an_opening_is_found(code: str) -> None:
    assert openings(code) and not openings("open_regular(p)\nread_regular(p, 9)\nhand.opened()")


DEEP = bounded.DEPTH
TIGHT = Budget(1 << 19, 2 << 20)
BOMBS: dict[str, bytes] = {
    "lists in lists": b"[" * 100_000 + b"]" * 100_000,
    "open lists": b"[" * 200_000,
    "objects in objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "one too deep": b"[" * (DEEP + 1) + b"]" * (DEEP + 1),
    "one too deep behind a text": b'["]]]]]]\\"",' + b"[" * DEEP + b"]" * (DEEP + 1),
    "empty lists": b"[" + b"[]," * 100_000 + b"1]",
    "empty objects": b"[" + b"{}," * 100_000 + b"1]",
    "numbers": b"[" + b"1," * 200_000 + b"1]",
    "keys": b"{" + b",".join(b'"%x":1' % n for n in range(40_000)) + b"}",
    "a number": b"1" * 400_000,
    "a text with one wide letter": b'"' + b"a" * 300_000 + "\U0001f600".encode() + b'"',
    "bytes": b'"' + b"a" * (1 << 19) + b'"',
}


@pytest.mark.parametrize("name", BOMBS)
def test_json_beyond_its_budget_is_refused_before_it_is_built(name: str) -> None:
    for decode in (
        lambda: decode_json(BOMBS[name], TIGHT),
        lambda: decode_json_as(BOMBS[name], object, TIGHT),
    ):
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"\w") as no:
            decode()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "\n" not in str(no.value) and peak < TIGHT.memory_bytes
    assert isinstance(no.value, BeyondError) or name in ("open lists", "a number")


def test_what_json_takes_is_at_most_what_is_estimated() -> None:
    values: list[Any] = [
        [[] for _ in range(5000)], [{} for _ in range(5000)], [{"a": 1}] * 5000, list(range(300, 5300)),
        [n / 7 for n in range(5000)], [f"{n:x}" for n in range(5000)], {f"{n:x}": n for n in range(500_000, 505_000)},
        {"text": "é" * 9999}, {"text": "a" * 9999 + "\U0001f600"}, [[1 << 62]] * 5000, "\0" * 5000,
    ]  # fmt: skip
    for value in values:
        text = json.dumps(value, ensure_ascii=False).encode()
        tracemalloc.start()
        decoded = json.loads(text)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert decoded == value and peak <= check_json(text) + 20_000, text[:40]


ODD = ("a[", "}]", '"', "\\", '\\"', '[\\\\"{', "", 'é"]', 1, None, '":{,')


def drawn(draw: random.Random, most: int) -> Any:
    """A value with brackets, quotes and backslashes in its texts, up to `most` deep."""
    if not most or draw.random() < 0.3:
        return draw.choice(ODD)
    inner = [drawn(draw, most - 1) for _ in range(draw.randrange(4))]
    return inner if draw.random() < 0.5 else {f"{draw.choice(ODD)}{n}": one for n, one in enumerate(inner)}


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def test_the_depth_is_exact_whatever_the_texts_hold() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        value = drawn(draw, draw.randrange(9))
        text, deep = json.dumps(value, ensure_ascii=draw.random() < 0.5), depth(value)
        assert decode_json(text, Budget(depth=deep)) == value
        if deep:
            with pytest.raises(BeyondError, match=f"more than {deep - 1} deep"):
                decode_json(text, Budget(depth=deep - 1))


def test_texts_do_not_count_as_brackets() -> None:
    code = json.dumps({"content": "x = [{'a': [1, 2, 3]}, " * 3000})
    assert check_json(code, Budget(1 << 20, 1 << 18)) < 1 << 18
    assert decode_json("[" * DEEP + "]" * DEEP) and decode_json('["' + "[" * 999 + '"]')


def steps(work: Callable[[], object]) -> int:
    """Lines of Python in the work: what tomllib's time grows with."""
    count = 0

    def count_line(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        with contextlib.suppress(ValueError):
            work()
    finally:
        sys.settrace(before)
    return count


def metrics(text: bytes) -> object:
    return list(decode_metrics(text.decode().split("\n")))


N = 1_000
DRAWN: dict[str, tuple[Callable[[bytes], object], Callable[[random.Random, int], bytes]]] = {
    "JSON": (decode_json, lambda draw, n: json.dumps([drawn(draw, 6) for _ in range(n)]).encode()),
    "JSON of a type": (
        lambda text: decode_json_as(text, list[dict[str, int]]),
        lambda draw, n: json.dumps([{f"{draw.random()}": n} for n in range(n)]).encode(),
    ),
    "JSON in a text": (
        lambda text: [Scan(text.decode()).value_at(0)],
        lambda draw, n: json.dumps([drawn(draw, 6) for _ in range(n)]).encode(),
    ),
    "TOML": (
        decode_toml,
        lambda draw, n: b"".join(b"k%d.x = %d\n" % (k, draw.randrange(9)) for k in range(n // 8)),
    ),
    "gzip": (
        lambda packed: unpack(packed, "gzip", 1 << 30),
        lambda draw, n: gzip.compress(draw.randbytes(99 * n)),
    ),
    "gzip of parts": (
        lambda packed: unpack(packed, "gzip", 1 << 30),
        lambda draw, n: b"".join(gzip.compress(draw.randbytes(9)) for _ in range(n)),
    ),
    "msgpack": (
        msgpack_decoder(object),
        lambda draw, n: msgspec.msgpack.encode([drawn(draw, 6) for _ in range(n)]),
    ),
    "Prometheus: labels": (
        metrics,
        lambda _, n: b"a{" + b",".join(b'l%d="b"' % k for k in range(n)) + b"} 1",
    ),
    "Prometheus: escapes": (metrics, lambda _, n: b'a{l="' + b'\\"' * 4 * n + b'"} 1'),
    "Prometheus: backslashes": (metrics, lambda _, n: b'a{l="' + b"\\" * 8 * n + b'"} 1'),
    "Prometheus: lines": (
        metrics,
        lambda draw, n: b"".join(b'a{l="%d"} 1\n' % draw.randrange(n) for _ in range(n)),
    ),
    "Prometheus: types": (metrics, lambda _, n: b"".join(b"# TYPE a%d counter\n" % k for k in range(n))),
}


def cost(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of CPU time of the work, the least of three, and its peak of memory."""
    times = []
    for _ in range(3):
        begun = time.thread_time()
        with contextlib.suppress(ValueError):
            work()
        times.append(time.thread_time() - begun)
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(times), peak


@pytest.mark.parametrize("name", DRAWN)
def test_an_input_of_eight_times_the_size_costs_eight_times_as_much_at_most(name: str) -> None:
    """Quadratic work would cost 64 times as much; a busy machine makes nothing three times as dear."""
    decode, make = DRAWN[name]
    small, large = (make(random.Random(7), n) for n in (N // 2, 4 * N))
    (small_s, small_bytes), (large_s, large_bytes) = cost(lambda: decode(small)), cost(lambda: decode(large))
    assert large_s < 24 * small_s + 0.02
    assert large_bytes < 12 * small_bytes + 100_000


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["a" * (bounded.LINE_CHARS + 1)], "a line has more than 8,192 characters"),
        (["a 1"] * (bounded.MOST_LINES + 1), "more than 20,000 lines"),
        (["a" * 999] * 5_000, "or 4,194,304 characters in them"),
    ],
)
def test_prometheus_text_is_refused_with_its_limit(lines: list[str], why: str) -> None:
    with pytest.raises(BeyondError, match=why):
        list(decode_metrics(lines))


def test_work_ends_at_its_limit_also_where_something_catches_the_first_signal() -> None:
    caught = 0
    with pytest.raises(TooLongError, match="more than 0"), cpu_limit(0.05):
        while True:
            with contextlib.suppress(TooLongError) if not caught else contextlib.nullcontext():
                while True:
                    sum(range(100))
            caught += 1
    assert caught == 1


ROOM = bounded.MOST_TOML // 8
DOTS = bounded.MOST_DOTS
TOML = {
    "one dotted key": b"x." * (ROOM // 2) + b"y = 1",
    "one key of quoted words": b'"x".' * (ROOM // 4) + b"y = 1",
    "one key with blanks": b"x . " * (ROOM // 4) + b"y = 1",
    "a dotted header": b"[" + b"x." * (ROOM // 2) + b"y]",
    "a dotted key in a table": b"a = {" + b"x." * (ROOM // 2) + b"y = 1}",
    "a dotted key behind five quotes": b'a = {b = """x""""", ' + b"x." * (ROOM // 2) + b"y = 1}",
    "lists": b"a = " + b"[" * (ROOM // 2) + b"]" * (ROOM // 2),
    "tables": b"a = " + b"{a = " * (ROOM // 8) + b"1" + b"}" * (ROOM // 8),
    "dotted keys": b"\n".join(b"k%d" % n + b".x" * DOTS + b" = 1" for n in range(ROOM // 28)),
    "dotted keys under a dotted header": b"[a" + b".x" * DOTS + b"]\n"
    + b"\n".join(b"k%d" % n + b".x" * DOTS + b" = 1" for n in range(ROOM // 28)),
    "dotted headers": b"\n".join(b"[k%d" % n + b".x" * DOTS + b"]" for n in range(ROOM // 28)),
    "a number": b"a = 0x" + b"f" * ROOM,
    "open text": b'"""' + b'\\"""' * (ROOM // 4),
    "a word": b"a" * ROOM,
}  # fmt: skip


LONG_KEYS = [name for name in TOML if name.startswith(("one ", "a dotted "))]


@pytest.mark.parametrize("name", TOML)
def test_toml_takes_steps_by_its_bytes_whatever_its_keys(name: str) -> None:
    assert steps(lambda: decode_toml(TOML[name])) < 60 * len(TOML[name])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((TOML[name], f"a key has more than {DOTS} dots") for name in LONG_KEYS),
        (TOML["lists"], "nested more than 16 deep"),
        (TOML["tables"], "nested more than 16 deep"),
        (TOML["a number"], "a number has more than 64 bits"),
        (b"#" * (bounded.MOST_TOML + 1), "more than 256 KiB"),
    ],
)
def test_toml_is_refused_with_its_limit(text: bytes, why: str) -> None:
    with pytest.raises(BeyondError, match=why):
        decode_toml(text)


def test_toml_as_people_write_it_is_read() -> None:
    text = b"""a.b.c = 1.5 # x.x.x.x.x.x.x.x.x.x.x.x.x.x
[tool."x.y".z]
url = "https://a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p"
both = '''
a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p'''
rows = [[1.0, 2.0], [3.0, 4.0], [-1.0, 2024-01-02T03:04:05.678]]
"""
    assert decode_toml(text) == tomllib.loads(text.decode())


def test_gzip_unpacks_to_a_part_of_its_size_and_to_the_whole_of_its_parts() -> None:
    usual = json.dumps(list(range(100_000))).encode()
    assert unpack(gzip.compress(usual), "gzip", 1 << 30) == usual
    assert unpack(gzip.compress(b"ab") + gzip.compress(b"c"), "x-gzip", 99) == b"abc"
    assert (
        unpack(gzip.compress(usual)[:-5000], "gzip", 1 << 30)
        == usual[: len(unpack(gzip.compress(usual)[:-5000], "gzip", 1 << 30))]
    )
    bomb = gzip.compress(b"[" * (32 << 20))
    tracemalloc.start()
    with pytest.raises(BeyondError, match="compressed"):
        unpack(bomb, "gzip", 1 << 30)
    assert tracemalloc.get_traced_memory()[1] < 3 * (bounded.FREE_BYTES + bounded.RATIO * len(bomb))
    tracemalloc.stop()
    with pytest.raises(BeyondError):
        unpack(gzip.compress(b"ab") * 3, "gzip", 5)
    for content, encoding in (
        (b"abc", "gzip"),
        (b"abc", "br"),
        (gzip.compress(b"")[:-1] + b"x", "deflate, gzip"),
    ):
        with pytest.raises(ValueError, match=r"damaged|compressed form"):
            unpack(content, encoding, 99)


def test_json_inside_of_a_text_is_looked_for_a_few_times_its_length() -> None:
    text = '{"name":\n' * 900 + "1" + "}" * 900
    scan, read = Scan(text), 0
    starts = list(range(0, len(text) - 901, 9))
    with pytest.raises(BeyondError, match="too often"):
        for start in starts:
            read += scan.value_at(start)[1] - start
    assert (
        read
        < (bounded.AGAIN + 1) * len(text)
        < sum(len(text) - 2 * start for start, _ in pairwise(starts)) / 2
    )
