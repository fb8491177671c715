"""Names the kind of text in which two prompts differ, and how to mend it. Pure.

Each kind has one rule, and the first rule that fits wins. A rule with a pattern fits if both texts have a match that
touches the difference and is at least a quarter as long, and if the two matches differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """Two prompts around their first difference. `old`, `new`: the texts that differ; `before`, `after`: shared text.

    `all_old`, `all_new`: all text that differs, up to the last token that both prompts have. `reordered`: the shared
    pieces after the difference are in another order. `places`: by how many different distances these pieces moved.
    """

    before: str
    old: str
    new: str
    after: str
    all_old: str = ""
    all_new: str = ""
    reordered: bool = False
    places: int = 1


@dataclass(frozen=True, slots=True)
class Kind:
    key: str
    title: str
    mend: str
    fits: Callable[[Difference], bool]


def kind_of(difference: Difference) -> Kind:
    return next(kind for kind in KINDS if kind.fits(difference))


def place_of(difference: Difference) -> str:
    """Return the text before a differing value, which marks its place in other prompts; "" for kinds without one."""
    pattern = _PATTERNS.get(kind_of(difference).key)
    match = _touching(pattern, difference.before, difference.old, difference.after) if pattern else None
    return "" if match is None else difference.before[: match.start()].rstrip()[-PLACE:]


PLACE = 12
"""Most characters that `place_of` returns."""
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_PATTERNS = {
    "uuid": re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE),
    "time": re.compile(
        r"(?:\d{4}-\d\d-\d\d[T ])?\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?|\b1\d{9}(?:\d{3})?\b"
    ),
    "date": re.compile(
        rf"\d{{4}}[-/.]\d\d?[-/.]\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|(?:\d\d? )?{_MONTH}\.? \d{{1,2}}(?:,? \d{{4}})?|"
        rf"\d\d? {_MONTH}\.?(?: \d{{4}})?|(?:mon|tues|wednes|thurs|fri|satur|sun)day",
        re.IGNORECASE,
    ),
    "flag": re.compile(
        r"/(?:no_)?think\b|"
        r"(?:reasoning|thinking|effort|verbosity|detail)[ _-]*(?:effort|level|mode|budget)?[\"']?\s*[:=]\s*[\"']?\w+",
        re.IGNORECASE,
    ),
    "id": re.compile(
        r"\b(?:user|session|request|req|trace|conversation|customer|account|tenant|ticket|order|run)"
        r"(?:[ _-]*id)?[\"']?[ _:=#-]*[\"']?(?=[\w-]*\d)[\w-]+|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b",
        re.IGNORECASE,
    ),
    "counter": re.compile(r"\b\d+\b"),
    "user": re.compile(
        r"\b(?i:user|name|customer|hello|hi|dear|for|assisting|helping)\b[^\n\d]{0,24}?[:= ]\s*[\"']?"
        r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*)*"
    ),
}
_THOUGHT = re.compile(
    r"</?think|<\|?/?(?:channel|thought|reasoning)|\breasoning_content\b|analysis<\|", re.IGNORECASE
)
_TOOLS = re.compile(
    r"\"(?:function|parameters|input_schema)\"\s*:|<tools?>|<function|^# Tools\b|namespace functions",
    re.MULTILINE | re.IGNORECASE,
)
"""Marks of tools in a chat template. The word alone does not tell: documents are about tools, too."""
_EXAMPLES = re.compile(
    r"^\W*(?:few[- ]shot )?(?:examples?|shots?)\b[^\n]{0,16}:|^\W*examples? \d|<examples?>|^Q:|^Input:",
    re.MULTILINE | re.IGNORECASE,
)
"""Headings of examples. "For example" in a sentence is none."""
_ROLE = re.compile(
    r"<\|?(?:im_start|start_header_id|start_of_turn|user|assistant)|\[INST\]|\b(?:user|assistant):",
    re.IGNORECASE,
)


def _touching(pattern: re.Pattern[str], before: str, middle: str, after: str) -> re.Match[str] | None:
    start, end = len(before), len(before) + len(middle)
    for match in pattern.finditer(before + middle + after):
        if match.start() <= end and match.end() >= start and 4 * len(match[0]) >= len(middle):
            return match
    return None


def _matches(key: str) -> Callable[[Difference], bool]:
    def fits(of: Difference) -> bool:
        found = [_touching(_PATTERNS[key], of.before, text, of.after) for text in (of.old, of.new)]
        return all(found) and found[0] is not None and found[1] is not None and found[0][0] != found[1][0]

    return fits


def _whitespace(of: Difference) -> bool:
    return of.old != of.new and "".join(of.old.split()) == "".join(of.new.split())


def _same_words(of: Difference) -> bool:
    old, new = (sorted(re.findall(r"\w+", text)) for text in (of.all_old, of.all_new))
    return len(old) > 1 and old == new


def _moved(of: Difference) -> bool:
    return of.reordered or _same_words(of)


def _other_example(of: Difference) -> bool:
    return all(_EXAMPLES.search(of.before[-PLACE:] + text) for text in (of.old, of.new))


def _around(of: Difference) -> str:
    return of.before + of.old + of.new + of.after


def _stripped(of: Difference) -> bool:
    thoughts = [len(_THOUGHT.findall(text)) for text in (of.old, of.new)]
    if thoughts[0] == thoughts[1] == 0:
        return len(_THOUGHT.findall(of.before[-12:])) > 0 and bool(of.old) != bool(of.new)
    return thoughts[0] != thoughts[1]


def _turn(more: str, less: str) -> bool:
    return len(more) >= 4 * max(1, len(less)) and bool(_ROLE.search(more))


KINDS = (
    Kind(
        "reasoning",
        "reasoning stripped from an earlier turn",
        "Send each turn back as it was answered, or keep the template from dropping its reasoning.",
        _stripped,
    ),
    Kind(
        "uuid",
        "a UUID",
        "Put the id after the shared text, or leave it out of the prompt.",
        _matches("uuid"),
    ),
    Kind(
        "time",
        "a time of day or time stamp",
        "Move the time into the last message, or give the date alone.",
        _matches("time"),
    ),
    Kind(
        "date",
        "a date",
        "Move the date into the last message; it costs one miss of everything a day.",
        _matches("date"),
    ),
    Kind(
        "flag",
        "a flag of the chat template",
        "Send requests with different flags to different servers, or put the flag after the shared text.",
        _matches("flag"),
    ),
    Kind(
        "whitespace",
        "white space",
        "Build the prompt in one place, with the same line ends and blanks.",
        _whitespace,
    ),
    Kind(
        "tools",
        "tools in another order",
        "Sort the tools by name before each request.",
        lambda of: _moved(of) and bool(_TOOLS.search(_around(of))),
    ),
    Kind(
        "examples",
        "another choice or order of examples",
        "Choose the examples once, or put the chosen ones after the shared text.",
        lambda of: (
            bool(_EXAMPLES.search(_around(of))) and (_moved(of) or of.places > 1 or _other_example(of))
        ),
    ),
    Kind(
        "keys",
        "JSON keys in another order",
        "Write JSON with sorted keys: json.dumps(.., sort_keys=True).",
        lambda of: _moved(of) and bool(re.search(r"[\"']\s*:", _around(of))),
    ),
    Kind("order", "parts in another order", "Keep one order: what changes least comes first.", _moved),
    Kind(
        "id",
        "the id of a user, a session or a request",
        "Put the id after the shared text, or leave it out of the prompt.",
        _matches("id"),
    ),
    Kind("counter", "a number that changes", "Put the number after the shared text.", _matches("counter")),
    Kind(
        "user",
        "a user's name",
        "Put the name after the shared text, or into the user's message.",
        _matches("user"),
    ),
    Kind(
        "turn_removed",
        "a turn that was left out",
        "Drop old turns rarely and many at a time: each cut makes all that follows new.",
        lambda of: _turn(of.old, of.new),
    ),
    Kind(
        "turn_added",
        "a turn that was put in between",
        "Append to the end of the conversation, not into it.",
        lambda of: _turn(of.new, of.old),
    ),
    Kind("other", "other text", "Put the text that differs after the text that is shared.", lambda of: True),
)
