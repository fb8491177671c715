"""Cuts text into atoms: a time stamp, a UUID, an address, a word .., each one value. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_CLEAR = r"(?:Jan(?:uary)?|Feb(?:ruary)?|April|June|July|Sept(?:ember)?|Sep|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
_MONTH = rf"(?:{_CLEAR}|Mar(?:ch)?|Apr|May|Jun|Jul|Aug(?:ust)?)\b\.?"
"""Names of months. Those that are also words or first names are dates only beside a day or a year."""
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_NTH = r"\d\d?(?:st|nd|rd|th)?\b(?!:)"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_ZONE = r"(?: ?(?:Z|[+-]\d\d:?\d\d|(?:UTC|GMT|[A-Z]{2,4}T)\b))?"
_NAMES = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_OF = {
    "space": r"\s+",
    "plain": rf"(?!{_NAMES})[^\W\d_]+(?![\w@+'’-]|\.\w|:[/\\])",  # most of a text: tried first
    "uuid": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "time": (
        rf"\b\d{{4}}-\d\d-\d\d[T ]{_CLOCK}{_ZONE}|\b{_CLOCK}(?: ?[AaPp](?:\.[Mm]\.|[Mm]\b))?{_ZONE}|"
        r"\b1[4-9]\d{8}(?:\d{3}){0,2}(?:\.\d+)?\b"
    ),
    "date": (
        r"\b\d{4}[-/.]\d\d?[-/.]\d\d?\b|\b\d\d?/\d\d?/\d{2,4}\b|\b\d\d?\.\d\d?\.\d{4}\b|"
        rf"\b(?:{_DAY},? )?(?:{_NTH} (?:of )?{_MONTH}(?:,? \d{{4}}\b)?|{_MONTH} {_NTH}(?:,? \d{{4}}\b)?|"
        rf"{_MONTH},? \d{{4}}\b)|"
        rf"\b{_CLEAR}\b|\b{_DAY}(?<!\bSat)(?<!\bSun)(?<!\bWed)"
    ),
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "phone": r"\+\d{1,3}(?:[ -]?\(?\d{2,}\)?){2,}|\b\(?\d{3}\)?[ -]\d{3}[ -]\d{4}\b",
    "path": r"(?:~|\b[A-Za-z]:|\.)?(?:[/\\][\w.@+-]+){2,}[/\\]?",
    "hex": r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{5,}\b",
    "id": r"\b(?=\w*\d)(?=\w*[A-Za-z])\w+(?:[-_]\w+)*|\b[A-Za-z]+(?:[-_][A-Za-z]+)*[-_](?=\w*\d)\w+(?:[-_]\w+)*",
    "locale": r"\b[a-z]{2}[-_][A-Z]{2}\b",
    "number": r"\d+(?:[.,]\d+)*",
    "word": r"[^\W\d_]+(?:['’](?!s\b)[^\W\d_]+)*",
    "mark": r"(?s:.)",
}
_ATOM = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _OF.items()))
VALUES = frozenset(_OF) - {"plain", "word", "space", "mark"}
"""Atoms that are values. Lines that differ in values alone are the same line."""
_KIND = {name: "word" if name == "plain" else name for name in _OF}
MASK = "\N{REPLACEMENT CHARACTER}"


KEPT = 1024
"""Lines whose atoms are kept: a line is compared with the one of the prompt before, and of the one after."""


class Atom(NamedTuple):
    what: str
    text: str


@lru_cache(maxsize=KEPT)
def atoms(text: str) -> tuple[Atom, ...]:
    return tuple([Atom(_KIND[found.lastgroup or "mark"], found[0]) for found in _ATOM.finditer(text)])


@lru_cache(maxsize=KEPT)
def masked(text: str) -> str:
    """Return the text with one mark for each value, so that texts which differ in values alone are equal."""
    return "".join([MASK if what in VALUES else said for what, said in atoms(text)]).rstrip()
