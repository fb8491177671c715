"""Decodes what comes from outside, within a budget: JSON, TOML, YAML, gzip, msgpack, Prometheus' text. Any process.

What would exceed the budget is refused before it is built: brackets, commas and colons tell what JSON will take.
Whatever is wrong with an input is a ValueError of one line; `BeyondError` is one that names the limit. What is done
with an input has a limit, too: `cpu_limit`.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from kvtune.base.units import size

DEPTH = 100
"""Objects and lists inside of each other. The deepest configuration of a model has 8, a tool's schema 20."""
OBJECT_BYTES, LIST_BYTES, KEY_BYTES, VALUE_BYTES = 240, 88, 100, 60
"""Memory of a JSON object, a list, a key and any other value, at most, apart from the text."""
RATIO, FREE_BYTES = 100, 1 << 20
"""The most that gzip may unpack to: a multiple of its size, and free bytes. Token ids in JSON reach 4, text 20."""
MEMBERS = 16
"""Parts of a gzip, one after the other."""
MOST_TEXTS = 8_000_000
MOST_TOML = MOST_YAML = 1 << 18
MOST_NODES = 100_000
MOST_DOTS, TOML_DEPTH = 8, 16
"""Dots in one key of TOML: tomllib takes a time that grows with their square. kvtune's own have 2."""
MOST_NUMBER = 1 << 63
AGAIN = 8
"""How often a text may be read in search of JSON inside of it."""
GZIP = ("gzip", "x-gzip", "deflate")
LINE_CHARS, LINES_CHARS, MOST_LINES = 8 << 10, 4 << 20, 20_000
"""Longest line of Prometheus' text, and all lines together: the parser's time grows with the square of a line."""

_TEXT = re.compile(rb'"[^"]*+"?')
_RUN = re.compile(rb'(?:[^"]*+"[^"]*+"?){1,4096}+|[^"]++')
"""A part that ends outside of its texts: taking all of them out at once would take more memory than what they hold."""
_OTHERS = bytes(set(range(256)) - set(b'[]{},:"'))
_TOML_TEXT = re.compile(
    rb'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5}+)?|\'\'\'(?:[^\']++|\'(?!\'\'))*+(?:\'{3,5}+)?'
    rb'|"(?:[^"\\\n]++|\\.)*+"?|\'[^\'\n]*+\'?|#[^\n]*+',
    re.DOTALL,
)
_LONG_KEY = re.compile(rb"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){%d}" % (MOST_DOTS + 1))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DECODER = json.JSONDecoder()
Kind = TypeVar("Kind")


class BeyondError(ValueError):
    """An input that would take more than its budget."""


class TooLongError(Exception):
    """What is done with an input takes more time than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the block after these seconds of CPU time. For work that changes nothing that stays.

    Only in a process's main thread, which alone gets signals; elsewhere there is no limit.
    """

    def stop(*_: object) -> None:
        raise TooLongError(f"it takes more than {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(
        signal.ITIMER_VIRTUAL, seconds, min(seconds, 1.0)
    )  # again: something may catch the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one input may take: bytes of text, bytes of memory once it is decoded, and depth."""

    text_bytes: int = 64 << 20
    memory_bytes: int = 400 << 20
    depth: int = DEPTH


USUAL = Budget()


def decode_json(text: bytes | str, budget: Budget = USUAL) -> Any:
    """Decode JSON as Python does: NaN and Infinity are numbers."""
    return decode_measured(text, budget)[0]


def decode_measured(text: bytes | str, budget: Budget = USUAL) -> tuple[Any, int]:
    """Do the same, and return how many bytes of memory the value takes, at most."""
    need = check_json(text, budget)
    try:
        return json.loads(text), need
    except RecursionError:
        raise _too_deep(budget.depth) from None


def decode_json_as(text: bytes | str, kind: type[Kind], budget: Budget = USUAL) -> Kind:
    """Decode JSON of this type. msgspec.ValidationError names the field that has another."""
    import msgspec

    check_json(text, budget)
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise _too_deep(budget.depth) from None


def check_json(text: bytes | str, budget: Budget = USUAL) -> int:
    """Return how many bytes of memory the values of JSON will take, at most. BeyondError if the budget has less."""
    if len(text) > budget.text_bytes:
        raise BeyondError(f"it has more than {size(budget.text_bytes)}")
    content = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    wide = 1
    if not content.isascii():
        wide = 4 if re.search(rb"[\xf0-\xff]", content) else 2
    if content.count(b'"') > 2 * MOST_TEXTS:
        raise BeyondError(f"it has more than {MOST_TEXTS:,} texts")
    need = 2 * wide * len(content)  # the text itself, and those in it
    brackets = content.count(b"{") + content.count(b"[")
    if (rough := need + _memory(content)) <= budget.memory_bytes and brackets <= budget.depth:
        return rough
    depth = 0
    marks = content.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).replace(b'""', b"")
    for run in _RUN.finditer(marks):
        bare = _TEXT.sub(b"", run[0])
        need += _memory(bare)
        depth = _check_depth(bare, budget.depth, depth)
    if need > budget.memory_bytes:
        raise BeyondError(
            f"it would take {size(need)} of memory, and {size(budget.memory_bytes)} are allowed"
        )
    return need


def _memory(text: bytes) -> int:
    brackets = OBJECT_BYTES * text.count(b"{") + LIST_BYTES * text.count(b"[")
    return brackets + KEY_BYTES * text.count(b":") + VALUE_BYTES * text.count(b",")


def _check_depth(bare: bytes, most: int, depth: int = 0) -> int:
    """Add up brackets. What closes more than is open ends at the parser, before anything that stands behind it."""
    steps = array("b", bare.translate(_STEPS, _NO_BRACKETS))
    if max(accumulate(steps, initial=depth)) > most:
        raise _too_deep(most)
    return depth + sum(steps)


def _too_deep(most: int) -> BeyondError:
    return BeyondError(f"it is nested more than {most} deep")


class Scan:
    """Finds JSON inside of a text, and reads the text a few times at most."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._left = AGAIN * len(text)

    def value_at(self, start: int) -> tuple[Any, int]:
        """Return the value that begins here, and where it ends. ValueError if none does."""
        if self._left <= 0:
            raise BeyondError("its JSON was read too often")
        end = len(self._text)
        try:
            value, end = _DECODER.raw_decode(self._text, start)
        except json.JSONDecodeError as error:
            end = error.pos
            raise
        except RecursionError:
            raise _too_deep(DEPTH) from None
        finally:
            self._left -= end - start
        return value, end


def decode_toml(content: bytes) -> dict[str, Any]:
    import tomllib

    if len(content) > MOST_TOML:
        raise BeyondError(f"it has more than {size(MOST_TOML)}")
    bare = _TOML_TEXT.sub(b"_", content)
    if _LONG_KEY.search(bare):
        raise BeyondError(f"a key has more than {MOST_DOTS} dots")
    _check_depth(bare, TOML_DEPTH)
    try:
        table = tomllib.loads(content.decode())
    except RecursionError:
        raise _too_deep(TOML_DEPTH) from None
    _check_numbers(table)
    return table


def _check_numbers(table: dict[str, Any]) -> None:
    """A number of thousands of digits cannot be printed, and one beyond 64 bits is none in TOML."""
    values: list[Any] = [table]
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -MOST_NUMBER <= value < MOST_NUMBER:
            raise BeyondError("a number has more than 64 bits")


def unpack(content: bytes, encoding: str, most: int) -> bytes:
    """Return the bytes as they were before someone compressed them; of a torn end, those before it."""
    if encoding.lower() in ("", "identity"):
        return content
    if encoding.lower() not in GZIP:
        raise ValueError("a compressed form that kvtune did not ask for")
    most = min(most, FREE_BYTES + RATIO * len(content))
    plain = b""
    for _ in range(MEMBERS):
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            plain += stream.decompress(content, most + 1 - len(plain))
        except zlib.error:
            raise ValueError("damaged gzip") from None
        content = stream.unused_data
        if len(plain) > most or not content.startswith(b"\x1f\x8b"):
            break
    if len(plain) > most:
        raise BeyondError(f"more than {size(most)}, compressed")
    return plain


def msgpack_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return what decodes msgpack of this type. What it takes, the type's lengths have to bound."""
    import msgspec

    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(content: bytes) -> Any:
        try:
            return decode(content)
        except RecursionError:
            raise BeyondError("nested too deep") from None

    return decoded


def decode_metrics(lines: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield name, labels and value of each series in lines of Prometheus' text."""
    from prometheus_client.parser import text_string_to_metric_families

    if max(map(len, lines), default=0) > LINE_CHARS:
        raise BeyondError(f"a line has more than {LINE_CHARS:,} characters")
    if len(lines) > MOST_LINES or sum(map(len, lines)) > LINES_CHARS:
        raise BeyondError(f"it has more than {MOST_LINES:,} lines, or {LINES_CHARS:,} characters in them")
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)


def decode_yaml(text: str) -> list[Any]:
    """Decode the documents of a YAML file: plain values, at most `MOST_NODES` of them with each alias written out."""
    import yaml

    if len(text) > MOST_YAML:
        raise BeyondError(f"it has more than {size(MOST_YAML)}")
    sizes: dict[str, int] = {}
    open_nodes = [("", 0)]  # the anchor and the nodes so far of each node that has begun
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            name, nodes = str(getattr(event, "anchor", None) or ""), 0
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((name, 1))
            elif isinstance(event, yaml.CollectionEndEvent):
                name, nodes = open_nodes.pop()
            elif isinstance(event, yaml.AliasEvent):
                if any(name == begun for begun, _ in open_nodes):
                    raise BeyondError(f"the node &{name} holds itself")
                name, nodes = "", sizes.get(name, 1)
            elif isinstance(event, yaml.ScalarEvent):
                nodes = 1
            sizes |= {name: nodes} if name and nodes else {}
            open_nodes[-1] = (open_nodes[-1][0], open_nodes[-1][1] + nodes)
            if len(open_nodes) > DEPTH or open_nodes[-1][1] > MOST_NODES:
                raise BeyondError(
                    f"it is nested more than {DEPTH} deep, or has more than {MOST_NODES:,} values"
                )
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise _too_deep(DEPTH) from None
