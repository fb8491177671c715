"""The kinds of edits between two prompts, and how to mend each. Pure.

`kind_of` names an edit inside a line by what the two texts are, or else by the label before them. Edits of whole lines,
parts and turns are named in `edits.py`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvtune.base.bounded import decode_json
from kvtune.requests.text.parts import Part

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
    return tuple([Atom(_KIND[match.lastgroup or "mark"], match[0]) for match in _ATOM.finditer(text)])


@lru_cache(maxsize=KEPT)
def masked(text: str) -> str:
    """Return the text with one mark for each value, so that texts which differ in values alone are equal."""
    return "".join([MASK if what in VALUES else atom for what, atom in atoms(text)]).rstrip()


NEAR = 40
"""Characters of text before an edit in which a label is looked for."""
_AFTER = "after the shared text"


@dataclass(frozen=True, slots=True)
class Kind:
    key: str
    title: str
    mend: str


_ALL = (
    Kind(
        "reasoning",
        "reasoning stripped from an earlier turn",
        "Send each turn back as it was answered, or keep the template from dropping its reasoning.",
    ),
    Kind("uuid", "a UUID", f"Put the id {_AFTER}, or leave it out of the prompt."),
    Kind(
        "time", "a time of day or time stamp", "Move the time into the last message, or give the date alone."
    ),
    Kind("date", "a date", "Move the date into the last message; it costs one miss of everything a day."),
    Kind(
        "server_date",
        "the date that vLLM writes into a gpt-oss prompt",
        "Set VLLM_SYSTEM_START_DATE=YYYY-MM-DD for the server; else everything misses once a day.",
    ),
    Kind(
        "header",
        "a billing or attribution line",
        "Turn the line off in the client, or update it: newer clients keep the line the same in one conversation.",
    ),
    Kind(
        "reminder",
        "a reminder of the client between the turns",
        "Append reminders to the last message and keep them there, or serve a chat template that leaves a system "
        "message in its place.",
    ),
    Kind(
        "flag",
        "a flag of the chat template",
        f"Send requests with different flags to different servers, or put the flag {_AFTER}.",
    ),
    Kind("whitespace", "white space", "Build the prompt in one place, with the same line ends and blanks."),
    Kind(
        "unicode", "another Unicode form of the same text", "Normalize texts to one form before sending: NFC."
    ),
    Kind("tools", "tools in another order", "Sort the tools by name before each request."),
    Kind(
        "tool_changed",
        "a tool that changed",
        "Keep each tool's definition the same for a whole conversation.",
    ),
    Kind(
        "tool_added",
        "a tool that was added",
        "Offer all tools from the first request on, or put new tools last.",
    ),
    Kind(
        "tool_removed", "a tool that was left out", "Offer the same tools in each request of a conversation."
    ),
    Kind(
        "examples",
        "another choice or order of examples",
        f"Choose the examples once, or put the chosen ones {_AFTER}.",
    ),
    Kind(
        "documents",
        "another choice or order of documents",
        f"Sort the documents, for instance by id, or put them {_AFTER}.",
    ),
    Kind(
        "keys", "JSON keys in another order", "Write JSON with sorted keys: json.dumps(.., sort_keys=True)."
    ),
    Kind("order", "parts in another order", "Keep one order: what changes least comes first."),
    Kind(
        "compaction",
        "a conversation that was summed up",
        "Each summary makes all that follows new: sum up rarely and much at a time.",
    ),
    Kind(
        "cleared",
        "an old tool result that was cleared",
        "Clear old results rarely and many at a time: each cut makes all that follows new.",
    ),
    Kind(
        "tool_call_rewritten",
        "a tool call that was written anew",
        "Send each call back as the model wrote it: the same arguments, the same JSON, the same id.",
    ),
    Kind(
        "id",
        "the id of a user, a session or a request",
        f"Put the id {_AFTER}, or leave it out of the prompt.",
    ),
    Kind("counter", "a number that changes", f"Put the number {_AFTER}."),
    Kind("user", "a user's name or data", f"Put it {_AFTER}, or into the user's message."),
    Kind(
        "workspace",
        "a folder, a branch or the state of a repository",
        "Tell it in the last message, not in the system prompt.",
    ),
    Kind(
        "turn_removed",
        "a turn that was left out",
        "Drop old turns rarely and many at a time: each cut makes all that follows new.",
    ),
    Kind(
        "turn_added",
        "a turn that was put in between",
        "Append to the end of the conversation, not into it.",
    ),
    Kind("line_added", "a line that was put in", f"Put the text {_AFTER}."),
    Kind("line_removed", "a line that was left out", f"Send the line always, or put it {_AFTER}."),
    Kind("other", "other text", "Put the text that differs after the text that is shared."),
)
KINDS = {kind.key: kind for kind in _ALL}

_LABELS = (
    (
        "header",
        re.compile(r"^\s*x-[\w-]+:|\bcch=|\bcc_version=|billing[-_ ]header|attribution", re.IGNORECASE),
    ),
    ("reminder", re.compile(r"<system-reminder|<total_tokens>|tokens? (?:left|remaining)", re.IGNORECASE)),
    (
        "id",
        re.compile(
            r"\b(?:request|req|trace|session|conversation|correlation|run|ticket|thread|span|message|call|"
            r"user|customer|account|tenant|order)"
            r"[ _-]*id\b|\bx-[\w-]*id\b|nonce|checksum|\bhash\b|\bid\b",
            re.IGNORECASE,
        ),
    ),
    (
        "user",
        re.compile(
            r"\b(?:(?:user|first|last|full|customer)[ _-]?names?|user|customer|name|e-?mail|locale|"
            r"lang(?:uage)?|time ?zone|tz|phone|city|country|"
            r"address|company|tenant|org(?:anization)?|account|"
            r"talk(?:ing)? (?:to|with)|assisting|helping|hello|hi|dear)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "flag",
        re.compile(r"reasoning|thinking|effort|verbosity|/(?:no_?)?think", re.IGNORECASE),
    ),
    ("date", re.compile(r"\b(?:today|date|day|month)\b", re.IGNORECASE)),
    ("time", re.compile(r"\b(?:time|now|clock|timestamp|ts)\b", re.IGNORECASE)),
    (
        "workspace",
        re.compile(r"\b(?:git status|branch|commits?|cwd|working director(?:y|ies))\b", re.IGNORECASE),
    ),
)
_LABEL = dict(_LABELS)
_EXAMPLE = re.compile(
    r"^[^\w\n]{0,9}(?:few[- ]shot )?(?:examples?|shots?)\b(?:[^\n@.\w][^\n]{0,16})?(?::|\n|$)|"
    r"^[^\w\n]{0,9}examples? \d|<examples?>|^(?:Q|A|Input|Output)\d*:",
    re.MULTILINE | re.IGNORECASE,
)
"""Headings of examples. "For example" in a sentence is none, nor is an address at example.com."""
_DOCUMENT = re.compile(
    r"<(?:document|doc|source|passage|context|search_result|result|chunk)\b|"
    r"^[^\w\n]{0,9}(?:documents?|docs?|sources?|passages?|contexts?|chunks?|"
    r"search results?|snippets?|articles?|retrieved)\b[^\n]{0,40}(?::|\n|$)|^\[\d+\]",
    re.MULTILINE | re.IGNORECASE,
)
SUMMARY = re.compile(
    r"\bsummar(?:y|i[sz]ed?)\b|\bcompact(?:ed|ion)\b|\bcondensed\b|continued from a previous conversation|"
    r"conversation so far|earlier (?:messages|turns|conversation)",
    re.IGNORECASE,
)
REMINDER = re.compile(r"<system-reminder|<total_tokens>", re.IGNORECASE)


def are_examples(*texts: str) -> bool:
    return all(_EXAMPLE.search(text) for text in texts)


def are_documents(*texts: str) -> bool:
    return any(_DOCUMENT.search(text) for text in texts)


def agreeing(old: str, new: str) -> int:
    """Count the characters in the common beginning of two texts."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        half = (low + high + 1) // 2
        if old.startswith(new[low:half], low):
            low = half
        else:
            high = half - 1
    return low


def same_but_form(old: str, new: str) -> str:
    """Return the kind of two texts that differ only in blanks or in their Unicode form; "" for other texts."""
    place = agreeing(old, new)
    differ = old[place : place + 1], new[place : place + 1]
    if any(not text or text.isspace() for text in differ) and "".join(old.split()) == "".join(new.split()):
        return "whitespace"
    if old.isascii() and new.isascii():
        return ""
    forms = ("".join(unicodedata.normalize("NFKC", text).split()) for text in (old, new))
    return "unicode" if next(forms) == next(forms) else ""


def same_words(old: str, new: str) -> bool:
    words = sorted(re.findall(r"\w+", old))
    return len(words) > 1 and words == sorted(re.findall(r"\w+", new))


_OBJECT = re.compile(r"\{[^{}]*\}")


def sorted_json(text: str) -> str | None:
    """Return the text of a JSON object or list with sorted keys; None if it is none."""
    try:
        value = decode_json(text)
    except ValueError:
        return None
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else None


def same_keys(old: str, new: str) -> bool:
    """Whether two texts are equal once each JSON object in them has sorted keys."""
    if "{" not in old or "{" not in new:
        return False
    whole = sorted_json(old)
    if whole is not None and whole == sorted_json(new):
        return True
    start, end = old.find("{"), old.rfind("}") + 1
    other, last = new.find("{"), new.rfind("}") + 1
    if old[:start] == new[:other] and old[end:] == new[last:]:
        inner = sorted_json(old[start:end])
        if inner is not None:
            return inner == sorted_json(new[other:last])
    was, now = (_OBJECT.sub(lambda match: sorted_json(match[0]) or match[0], text) for text in (old, new))
    return was == now


def kind_of(old: str, new: str, label: str, part: Part, lines: tuple[str, str]) -> str:
    """Return the kind of an edit inside a line. `label`: the text before it; `lines`: both lines, whole."""
    if part.what == "flag":
        return "flag"
    if form := same_but_form(old, new):
        return form
    if part.what == "tool":
        return "tool_changed"
    if part.what == "call":
        return "tool_call_rewritten"
    near = label[-NEAR:]
    for key in ("header", "reminder"):
        if all(_LABEL[key].search(line) for line in lines):
            return key
    was, now = (
        [atom.what for atom in atoms(text) if atom.what not in ("space", "mark")] for text in (old, new)
    )
    both = set(was) & set(now)
    for what, key in _SURE:
        if what in both:
            return "server_date" if key == "date" and _is_of_server(part, near) else key
    if was or now:
        all_ = set(was) | set(now)
        for key, pattern in _LABELS:
            if key in ("date", "time") and not all_ & {"number", "time", "date", "word"}:
                continue
            if key == "flag" and not pattern.search(near + old + new):
                continue
            if key != "flag" and not (was and now and pattern.search(near)):
                continue
            if key in ("date", "time") and all_ == {"word"}:
                continue
            if key == "user" and all_ == {"number"}:
                return "counter"
            return key
    if same_words(old, new):
        return "order"
    for what, key in (("hex", "id"), ("id", "id"), ("locale", "user"), ("path", "workspace")):
        if what in both or (what in ("hex", "id") and {"hex", "id"} & set(was) and {"hex", "id"} & set(now)):
            return key
    if was and now and set(was) == set(now) == {"number"}:
        return "counter"
    return "other"


_SURE = (("uuid", "uuid"), ("time", "time"), ("date", "date"), ("email", "user"), ("phone", "user"))
"""Atoms that tell the kind without a label."""


def _is_of_server(part: Part, label: str) -> bool:
    """Whether this is the line of the system message that vLLM itself writes for gpt-oss."""
    return (
        label.endswith("Current date: ")
        and part.text.startswith("You are ChatGPT")
        and "<|end|>" in part.text
    )
