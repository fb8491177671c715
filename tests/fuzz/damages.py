"""The ONE table of damages: what a file may be instead of what its reader expects, and what may stand at its place.

A damage of CONTENTS makes other bytes of good ones, one of PLACES puts something at a path where a good file would be.
`swapped` makes one value after the other of a file's structure something else.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEERS = "\x1b]0;owned\x07\x1b[2J\x9b31m\x85\r\u202egnp\u2066\x7f"
DEEP = 100_000
LONG = 1 << 20


def _within(data: bytes, part: bytes) -> bytes:
    """The part in the middle of the bytes."""
    return data[: len(data) // 2] + part + data[len(data) // 2 :]


def _value(data: bytes, value: bytes) -> bytes:
    """The second value of a JSON object, a TOML table or a row of CSV replaced: the first may tell the kind of file."""
    places = list(re.finditer(rb'(?<=": )[^,}\n\[]+|(?<= = ).+|(?<=,)[^,\n]+', data)) or [
        re.compile(b"").match(data)
    ]
    place = places[min(1, len(places) - 1)]
    assert place is not None
    return data[: place.start()] + value + data[place.end() :]


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "without its last bytes": lambda data: data[:-5],
    "without its first bytes": lambda data: data[5:],
    "twice": lambda data: data + data,
    "bytes by chance": lambda data: random.Random(0).randbytes(3000),
    "zeros": lambda data: bytes(3000),
    "blanks": lambda data: b" \n\t" * 1000,
    "a zero inside": lambda data: _within(data, b"\0"),
    "no UTF-8": lambda data: _within(data, b"\xff\xfe\xc3("),
    "half a character": lambda data: _value(data, b'"\\ud800"'),
    "UTF-16": lambda data: data.decode(errors="replace").encode("utf-16"),
    "a mark of UTF-8": lambda data: b"\xef\xbb\xbf" + data,
    "lines of another system": lambda data: data.replace(b"\n", b"\r\n"),
    "compressed": lambda data: gzip.compress(data, mtime=0),
    "a page": lambda data: b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "null": lambda data: b"null\n",
    "a list": lambda data: b"[]\n",
    "an object": lambda data: b"{}\n",
    "lists in lists": lambda data: _value(data, b"[" * DEEP),
    "objects in objects": lambda data: _value(data, b'{"a":' * DEEP),
    "dots": lambda data: b"a." * 20_000 + b"a = 1\n" + data,
    "a line without end": lambda data: data + b"x" * LONG,
    "a long value": lambda data: _value(data, b'"' + b"x" * LONG + b'"'),
    "many digits": lambda data: _value(data, b"9" * 5000),
    "a number beyond floats": lambda data: _value(data, b"1e999"),
    "NaN": lambda data: _value(data, b"NaN"),
    "Infinity": lambda data: _value(data, b"-Infinity"),
    "control characters": lambda data: _within(data, STEERS.encode()),
    "a value that steers": lambda data: _value(data, json.dumps(STEERS).encode()),
    "a name that steers": lambda data: _within(data, f'\n"{STEERS}": 1,\n'.encode()),
}

SIZE = 1 << 19
VALUES = {
    "lists in lists": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "lists, as deep as Python goes": b"[" * 900 + b"]" * 900,
    "objects in objects": b'{"a":' * (SIZE // 6) + b"1" + b"}" * (SIZE // 6),
    "empty lists": b"[" + b"[]," * (SIZE // 3) + b"1]",
    "empty objects": b"[" + b"{}," * (SIZE // 3) + b"1]",
    "numbers": b"[" + b"1," * (SIZE // 2) + b"1]",
    "keys": b"{" + b",".join(b'"%x":1' % n for n in range(SIZE // 12)) + b"}",
    "texts": b"[" + b'"",' * (SIZE // 3) + b"1]",
    "a long key": b'{"' + b"k" * SIZE + b'":1}',
    "a text with a wide letter": b'"' + b"a" * SIZE + "\U0001f600".encode() + b'"',
    "a number of many digits": b"9" * SIZE,
}
TOML = {
    "one dotted key": b"x." * 50_000 + b"y = 1\n",
    "a dotted header": b"[" + b"x." * 50_000 + b"y]\n",
    "tables": b"a = " + b"{a = " * 20_000 + b"1" + b"}" * 20_000 + b"\n",
    "lists": b"a = " + b"[" * 50_000 + b"]" * 50_000 + b"\n",
    "keys": b"".join(b"k%d = 1\n" % n for n in range(20_000)),
    "a hexadecimal number": b"a = 0x" + b"f" * 100_000 + b"\n",
}
LINES = {
    "lines": b"a\n" * (SIZE // 2),
    "labels": b'vllm:x{a="' + b"b" * SIZE + b'"} 1\n',
    "series": b"".join(b'vllm:request_success_total{r="%d"} 1\n' % n for n in range(SIZE // 40)),
    "fields": b"," * SIZE,
}


def bombs(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Alone, before and after a good file, and in it as a value: small files that ask for much memory or time."""
    if data.startswith(b"PK"):
        for name, value in VALUES.items():
            yield name, _with_header(data, value)
        return
    for name, bomb in {**VALUES, **TOML, **LINES}.items():
        yield name, bomb
        yield f"{name}, before", bomb + data
        yield f"{name}, after", data + bomb
    for name, bomb in VALUES.items():
        yield f"{name}, as a value", _value(data, bomb)
        if data.startswith(b"{"):
            yield f"{name}, as a new one", b'{"bomb":' + bomb + b"," + data[1:]


def _with_header(run: bytes, bomb: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(run)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.namelist():
            content = old.read(part)
            new.writestr(part, b'{"bomb":' + bomb + b"," + content[1:] if part == "header.json" else content)
    return made.getvalue()


def _missing(path: Path, data: bytes) -> None:
    pass


def _link(path: Path, target: Path | str) -> None:
    path.symlink_to(target)


def _socket(path: Path, data: bytes) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has a limit of 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.truncate(path, 5 << 30)


PLACES: dict[str, Callable[[Path, bytes], object]] = {
    "nothing": _missing,
    "a folder": lambda path, data: path.mkdir(),
    "a pipe": lambda path, data: os.mkfifo(path),
    "a socket": _socket,
    "a device without end": lambda path, data: _link(path, "/dev/zero"),
    "a device without content": lambda path, data: _link(path, "/dev/null"),
    "a link to nothing": lambda path, data: _link(path, path.with_name("none")),
    "a link to itself": lambda path, data: _link(path, path),
    "a file of 5 GiB": _sparse,
    "a file of the kernel": lambda path, data: _link(path, "/proc/self/mem"),
}
"""Each must be refused, whatever is read."""

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 2**31, 2**63, -(2**63), 10**400, float("nan"), float("inf"), "", "x", STEERS, [], {},
    [[]], {"a": 1},
)  # fmt: skip


def swapped(data: bytes) -> Iterator[bytes]:
    """A JSON file, or the first and the second line of one, with one of its values odd, left out or doubled."""
    lines = data.split(b"\n")
    whole = data.startswith((b"{\n", b"[\n")) or len(lines) < 2
    for at in (None,) if whole else range(min(2, len(lines))):
        text = data if at is None else lines[at]
        for changed in _swapped(json.loads(text)):
            yield changed if at is None else b"\n".join((*lines[:at], changed, *lines[at + 1 :]))


def _swapped(value: Any) -> Iterator[bytes]:
    for container, key in _places(value):
        kept = container[key]
        for odd in ODD:
            container[key] = odd
            yield json.dumps(value).encode()
        container[key] = kept
        if isinstance(container, dict):
            del container[key]
            yield json.dumps(value).encode()
            container[key] = kept
            name = json.dumps(key)
            yield json.dumps(value).replace(f"{name}: ", f"{name}: null, {name}: ", 1).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The fields of a JSON value, those of its objects, and of each list the first one."""
    for key, inner in list(
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(inner)
