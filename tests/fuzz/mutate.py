"""Mutations of real files: bytes, structure of JSON and TOML, parts of zips, columns of numpy. Seeded."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from tokenize import TokenError
from typing import Any

import numpy as np

Mutation = Callable[[bytes, random.Random], bytes]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e-320, 1e308, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, "", "x",
    "\x1b[2J", "\u202e", "\x00", "a\nb", "<script>", "auto", "99999999999", "nan", "../../etc/passwd", [], {}, [None],
    [[]], ["x"], [0, -1], {"": 0}, {"a": {"a": {}}}, [1] * 50, "y" * 5000, -1e308, -(2**31), 10**4000, {"x": 1},
)  # fmt: skip
TEXTS = (
    b"NaN", b"Infinity", b"1e999", b"-1", b"9" * 400, b"[" * 3000, b'{"a":' * 2000, b'"', b"\\ud800", b"\xff\xfe",
    b"\x00", b"\r", b"\x85", b"\xe2\x80\xae", b"\n", b",", b"'''", b'"""', b"#", b"=", b"[[a]]", b"1979-05-27", b"inf",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    127,
    32767,
    2**31 - 1,
    2**62,
    1e-300,
    1e9,
    1e17,
    1e300,
    float("nan"),
    float("inf"),
    -1e17,
)


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    """A few bytes flipped, cut, doubled, moved, or replaced by what parsers dislike."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                del out[at : at + draw.choice((1, 2, 8, 100, len(out)))]
            case 2:
                out[at:at] = out[at : at + draw.choice((1, 8, 200))]
            case 3:
                out[at : at + draw.choice((0, 1, 4))] = draw.choice(TEXTS)
            case 4:
                out[at : at + 4] = draw.choice((0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
            case _:
                out[at : at + 1] = bytes((draw.randrange(256),))
    return bytes(out)


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: a container and a key or index."""
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in places:
        yield value, key
        yield from _nodes(inner)


def structure_changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with some of its places replaced, left out, added, or swapped."""
    if draw.random() < 0.02:
        return draw.choice(VALUES)
    for _ in range(draw.choice((1, 1, 2, 4))):
        places = list(_nodes(value))
        if not places:
            return draw.choice(VALUES)
        container, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[draw.choice(("", "later", "schema", "\x1b", str(key) * 2))] = draw.choice(VALUES)
            case 2:
                other, at = draw.choice(places)
                container[key] = json.loads(json.dumps(other[at]))
            case 3 if isinstance(container, list):
                container[key:key] = container * draw.choice((1, 3)) if len(container) < 1000 else []
            case _:
                container[key] = draw.choice(VALUES)
    return value


EXTREMES = (None, -1, -(2**31), 2**53, -(2**63), 10**4000, -1e308, 1e308, {"x": 1})


def number_changed(data: bytes, draw: random.Random) -> bytes:
    """JSON with one number, or one object of numbers, made extreme, and all the rest as it was."""
    value = json.loads(data)
    places = [
        (container, key)
        for container, key in _nodes(value)
        if type(container[key]) in (int, float)
        or (isinstance(container[key], dict) and len(container[key]) < 4)
    ]
    if places:
        container, key = draw.choice(places)
        container[key] = draw.choice(EXTREMES)
    return json.dumps(value).encode()


def json_changed(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(structure_changed(json.loads(data), draw)).encode()


def lines_changed(data: bytes, draw: random.Random) -> bytes:
    """JSON lines: one line's structure, or lines swapped, doubled, left out."""
    lines = data.split(b"\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            lines[at], lines[other] = lines[other], lines[at]
        case 1:
            del lines[at]
        case 2:
            lines[at:at] = [lines[other]] * draw.choice((1, 20))
        case _:
            try:
                lines[at] = draw.choice((json_changed, number_changed))(lines[at], draw)
            except (ValueError, RecursionError):
                lines[at] = bytes_changed(lines[at], draw)
    return b"\n".join(lines)


def toml_changed(data: bytes, draw: random.Random) -> bytes:
    """TOML: a value replaced by one of another type, a line doubled, swapped or left out."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    name, equals, _ = lines[at].partition(b" = ")
    if equals and draw.random() < 0.7:
        value = draw.choice(
            (*map(json.dumps, VALUES), "inf", "nan", "1979-05-27", "'\t'", "0x7f", "[1, [2]]", "1_0")
        )
        lines[at] = name + equals + value.replace("null", "''").encode()
    else:
        lines[at : at + draw.choice((0, 1))] = draw.choices(lines, k=draw.choice((0, 1, 2)))
    return b"\n".join(lines)


def csv_changed(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    cells = lines[at].split(b",")
    odd = (*TEXTS, *(str(value).encode() for value in VALUES), b"2023-11-16", b"x" * 140_000)
    cells[draw.randrange(len(cells))] = draw.choice(odd)
    lines[at] = b",".join(cells)
    return b"\n".join(lines)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def column_changed(data: bytes, draw: random.Random) -> bytes:
    """A .npy with values, length, type or shape that its writer would not give it."""
    array = np.load(io.BytesIO(data), allow_pickle=False).copy()
    kept = array.dtype
    match draw.randrange(6):
        case 0 if len(array) and array.dtype.kind in "if":
            array = array.astype("f8" if array.dtype.kind == "f" else "i8")
            for _ in range(draw.choice((1, 3))):
                value = draw.choice(NUMBERS)
                array[draw.randrange(len(array))] = (
                    value if array.dtype.kind == "f" else int(max(-1e17, min(1e17, np.nan_to_num(value))))
                )
            limits = np.iinfo(kept) if kept.kind == "i" else None
            array = (array if limits is None else array.clip(limits.min, limits.max)).astype(kept)
        case 1:
            array = array[: draw.randrange(len(array) + 1)]
        case 2:
            array = np.concatenate((array, array))
        case 3:
            array = (
                array.astype(draw.choice(("U3", "f8", "c16", "?", "S2", ">f8")))
                if array.dtype.kind != "U"
                else array
            )
        case 4:
            array = array.reshape((1, -1)) if draw.random() < 0.5 else array.reshape((-1, 1))
        case _ if len(array):
            draw.shuffle(order := list(range(len(array))))
            array = array[order]
    return npy(array)


def column_extreme(data: bytes, draw: random.Random) -> bytes:
    """A .npy of the same type and length: all its values equal, or some at the ends of its type or below 0."""
    array = np.load(io.BytesIO(data), allow_pickle=False).copy()
    if len(array) and array.dtype.kind in "if" and draw.random() < 0.5:
        array[:] = draw.choice(array)
    elif len(array) and array.dtype.kind == "i":
        limits = np.iinfo(array.dtype)
        array[draw.choice((slice(None), 0, -1))] = draw.choice((limits.min, limits.max, -1))
    return npy(array)


def zip_changed(data: bytes, draw: random.Random) -> bytes:
    """A run file with parts changed by what they are, left out, swapped, renamed, or packed otherwise."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    if draw.random() < 0.4:  # one number, or one column, of a file that is sound elsewhere
        name = "header.json" if draw.random() < 0.5 else draw.choice(list(parts))
        change = number_changed if name == "header.json" else column_extreme
        parts[name] = change(parts[name], draw)
        return zipped(parts, draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = "header.json" if draw.random() < 0.4 else draw.choice([*parts, "header.json"])
        if name not in parts:
            break
        kind = draw.randrange(10)
        if kind < 6:
            change = json_changed if name == "header.json" else column_changed
            try:
                parts[name] = change(parts[name], draw)
            except (
                ValueError,
                RecursionError,
                SyntaxError,
                EOFError,
                TokenError,
            ):  # changed before into what is none
                parts[name] = bytes_changed(parts[name], draw)
        elif kind == 6:
            parts[name] = bytes_changed(parts[name], draw)
        elif kind == 7:
            other = draw.choice(list(parts))
            parts[name], parts[other] = parts[other], parts[name]
        elif kind == 8:
            del parts[name]
        else:
            parts[draw.choice(("x", "tables/steps/", "tables/a/b.npy", "../x", name + "x"))] = parts.pop(name)
    return zipped(parts, draw)


def zipped(parts: dict[str, bytes], draw: random.Random) -> bytes:
    out, packed = io.BytesIO(), draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(out, "w") as made:
        for name, content in parts.items():
            # A ZipInfo has one fixed date: the same bytes at any time.
            made.writestr(zipfile.ZipInfo(name), content, packed, compresslevel=1)
    return out.getvalue()


def mutated(data: bytes, structural: Mutation, draw: random.Random) -> bytes:
    """One changed file: mostly in its structure, else in its bytes, now and then both."""
    if draw.random() < 0.7:
        try:
            data = structural(data, draw)
        except (ValueError, RecursionError):
            data = bytes_changed(data, draw)
        if draw.random() < 0.9:
            return data
    return bytes_changed(data, draw)
