"""Names what differs between two prompts, and says how to mend it: the first kind of one table that fits. Pure.

`edits.py` asks about parts, about lines, then about the values in a line, and cuts further what is of no kind. A value
is named by what both texts are, or else by the label before it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from kvtune.base.bounded import Scan
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
_WHAT = {**{name: name for name in _OF}, "plain": "word", "hex": "id"}
VALUES = frozenset(_WHAT.values()) - {"word", "space", "mark"}
"""Atoms that are values. Lines that differ in values alone are the same line."""
MASK = "\N{REPLACEMENT CHARACTER}"
KEPT = 1024
"""Lines whose atoms are kept: a line is compared with the one of the prompt before, and of the one after."""


@lru_cache(maxsize=KEPT)
def atoms(text: str) -> tuple[tuple[str, str], ...]:
    """Cut a text into atoms: what each is, and its text."""
    return tuple([(_WHAT[match.lastgroup or "mark"], match[0]) for match in _ATOM.finditer(text)])


@lru_cache(maxsize=KEPT)
def masked(text: str) -> str:
    """Return the text with one mark for each value, so that texts which differ in values alone are equal."""
    return "".join([MASK if what in VALUES else atom for what, atom in atoms(text)]).rstrip()


_SURE = {"uuid": "uuid", "time": "time", "date": "date", "email": "user", "phone": "user"}
"""The kinds of atoms that tell it whatever stands before them; then of those that tell it if no label does."""
_UNLABELLED = {"id": "id", "locale": "user", "path": "workspace"}
_LABEL = {
    key: re.compile(pattern, re.IGNORECASE)
    for key, pattern in {
        "header": r"^\s*x-[\w-]+:|\bcch=|\bcc_version=|billing[-_ ]header|attribution",
        "reminder": r"<system-reminder|<total_tokens>|tokens? (?:left|remaining)",
        "id": (
            r"\b(?:request|req|trace|session|conversation|correlation|run|ticket|thread|span|message|call|"
            r"user|customer|account|tenant|order)"
            r"[ _-]*id\b|\bx-[\w-]*id\b|nonce|checksum|\bhash\b|\bid\b"
        ),
        "user": (
            r"\b(?:(?:user|first|last|full|customer)[ _-]?names?|user|customer|name|e-?mail|locale|"
            r"lang(?:uage)?|time ?zone|tz|phone|city|country|"
            r"address|company|tenant|org(?:anization)?|account|"
            r"talk(?:ing)? (?:to|with)|assisting|helping|hello|hi|dear)\b"
        ),
        "flag": r"reasoning|thinking|effort|verbosity|/(?:no_?)?think",
        "date": r"\b(?:today|date|day|month)\b",
        "time": r"\b(?:time|now|clock|timestamp|ts)\b",
        "workspace": r"\b(?:git status|branch|commits?|cwd|working director(?:y|ies))\b",
    }.items()
}
LIKE = 0.4
"""Least share of words that two versions of a message have in common, of its first `JUDGED` characters."""
JUDGED = 4000
NEAR = 40
"""Characters of text before a value in which a label is looked for."""
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
_SUMMARY = re.compile(
    r"\bsummar(?:y|i[sz]ed?)\b|\bcompact(?:ed|ion)\b|\bcondensed\b|continued from a previous conversation|"
    r"conversation so far|earlier (?:messages|turns|conversation)",
    re.IGNORECASE,
)
_REMINDER = re.compile(r"<system-reminder|<total_tokens>", re.IGNORECASE)

WORD = re.compile(r"\w+")


def likeness(old: str, new: str) -> float:
    """Return the share of words that two texts have in common."""
    was, now = Counter(WORD.findall(old)), Counter(WORD.findall(new))
    return 2 * (was & now).total() / max(1, was.total() + now.total())


Scope = Literal["tools", "parts", "text", "lines", "line", "value"]


@dataclass(frozen=True)
class Difference:
    """Two texts that differ. `part`: the part of the new prompt, or else of the old one, in which they stand.

    `scope`: what they are: "tools" in another order; "parts" that one prompt has and not the other (`gone`, `come`), or
    a summary and what it sums up; two versions of a part's "text" (from the first line that differs to the last) or of
    a "line" (in which `several` values differ); "lines" that are no versions of each other; a "value", after a `label`.
    `moved`: they stand elsewhere in the other prompt. `around`: what may tell of which list they are.
    """

    scope: Scope
    part: Part
    old: str = ""
    new: str = ""
    label: str = ""
    around: tuple[str, ...] = ()
    moved: bool = False
    several: bool = True
    gone: Sequence[Part] = ()
    come: Sequence[Part] = ()

    @cached_property
    def value(self) -> str:
        """The kind of a value; "" for one that nothing tells, and for other texts."""
        return next(self._values(), "") if self.scope == "value" else ""

    def _values(self) -> Iterator[str]:
        yield from (key for key in ("header", "reminder") if all(map(_LABEL[key].search, self.around)))
        was, now = ({what for what, _ in atoms(text)} - {"space", "mark"} for text in (self.old, self.new))
        yield from (key for what, key in _SURE.items() if what in was & now)
        near, dated = self.label[-NEAR:], bool((was | now) & {"number", "time", "date"})
        for key, label in _LABEL.items():
            if key == "flag":
                labelled = bool((was or now) and label.search(near + self.old + self.new))
            else:
                labelled = bool(was and now and (dated or key not in ("date", "time")) and label.search(near))
            if labelled:
                yield "counter" if key == "user" and was | now == {"number"} else key
        if not self.same_words:
            yield from (key for what, key in _UNLABELLED.items() if what in was & now)
            yield from ["counter"] if was == now == {"number"} else []

    @cached_property
    def same_words(self) -> bool:
        was, now = (sorted(WORD.findall(text)) for text in (self.old, self.new))
        return len(was) > 1 and was == now


def _is_summary(d: Difference) -> bool:
    """Whether several turns were replaced by a shorter text that says it is a summary."""
    texts = [part.text for part in d.come if part.what == "text"]
    shorter = sum(map(len, texts)) < sum(len(part.text) for part in d.gone)
    return len(d.gone) > 1 and shorter and any(map(_SUMMARY.search, texts))


def _was_cleared(d: Difference) -> bool:
    shorter = d.scope == "text" and d.part.what == "result" and len(d.old) >= 4 * len(d.new)
    return shorter and likeness(d.old[:JUDGED], d.new) < LIKE


def _same_but_blanks(d: Difference) -> bool:
    return d.scope in ("text", "value") and "".join(d.old.split()) == "".join(d.new.split())


def _same_but_form(d: Difference) -> bool:
    """Whether two texts differ in their Unicode form alone."""
    normal = unicodedata.normalize
    return d.scope in ("text", "value") and normal("NFKC", d.old) == normal("NFKC", d.new)


def _same_json(d: Difference) -> bool:
    objects = d.scope in ("text", "line") and "{" in d.old and "{" in d.new
    return objects and sorted_json(d.old) == sorted_json(d.new)


def sorted_json(text: str) -> str:
    """Return the text with sorted keys in each JSON object in it."""
    scan, pieces, done = Scan(text), [], 0
    for match in re.finditer(r"\{", text):
        if match.start() >= done:
            try:
                value, end = scan.value_at(match.start())
            except ValueError:
                continue
            pieces += [text[done : match.start()], json.dumps(value, sort_keys=True)]
            done = end
    return "".join([*pieces, text[done:]])


def _is_flag(d: Difference) -> bool:
    return d.value == "flag" or (d.scope in ("parts", "value") and d.part.what == "flag")


def _is_of_server(d: Difference) -> bool:
    """Whether this is the date in the system message that vLLM itself writes for gpt-oss."""
    of_vllm = d.part.text.startswith("You are ChatGPT") and "<|end|>" in d.part.text
    return d.value == "date" and of_vllm and d.label.endswith("Current date: ")


def _is_shuffled(d: Difference) -> bool:
    """Whether the same texts stand in another order."""
    return d.moved or (d.scope in ("line", "value") and d.several and not d.value and d.same_words)


def _is_listed(d: Difference, heading: re.Pattern[str]) -> bool:
    """Whether what differs is the choice or the order of items with such headings, or below one."""
    unknown = d.scope in ("lines", "value") and d.value in ("", "counter")
    texts = d.around or tuple(filter(None, (d.old, d.new)))
    return (unknown or _is_shuffled(d)) and all(map(heading.search, texts))


def _is_reminder(d: Difference) -> bool:
    if parts := [*d.gone, *d.come]:
        return all(_REMINDER.search(part.text) or _stands_between_turns(part) for part in parts)
    only = d.scope == "lines" and not (d.old and d.new)
    return d.value == "reminder" or (only and bool(_REMINDER.search(d.old + d.new)))


def _stands_between_turns(part: Part) -> bool:
    return part.role in ("system", "developer") and bool(re.match(r"messages\[[1-9]", part.place))


@dataclass(frozen=True, slots=True)
class Kind:
    """`test`: whether a difference is of this kind; None: if its value is."""

    title: str
    mend: str
    test: Callable[[Difference], bool] | None = None


_AFTER = "after the shared text"
KINDS = {
    "tools": Kind(
        "tools in another order", "Sort the tools by name before each request.", lambda d: d.scope == "tools"
    ),
    "tool_added": Kind(
        "a tool that was added",
        "Offer all tools from the first request on, or put new tools last.",
        lambda d: d.part.what == "tool" and bool(d.come),
    ),
    "tool_removed": Kind(
        "a tool that was left out",
        "Offer the same tools in each request of a conversation.",
        lambda d: d.part.what == "tool" and bool(d.gone),
    ),
    "compaction": Kind(
        "a conversation that was summed up",
        "Each summary makes all that follows new: sum up rarely and much at a time.",
        _is_summary,
    ),
    "cleared": Kind(
        "an old tool result that was cleared",
        "Clear old results rarely and many at a time: each cut makes all that follows new.",
        _was_cleared,
    ),
    "tool_call_rewritten": Kind(
        "a tool call that was written anew",
        "Send each call back as the model wrote it: the same arguments, the same JSON, the same id.",
        lambda d: d.scope == "text" and d.part.what == "call",
    ),
    "whitespace": Kind(
        "white space", "Build the prompt in one place, with the same line ends and blanks.", _same_but_blanks
    ),
    "unicode": Kind(
        "another Unicode form of the same text",
        "Normalize texts to one form before sending: NFC.",
        _same_but_form,
    ),
    "keys": Kind(
        "JSON keys in another order",
        "Write JSON with sorted keys: json.dumps(.., sort_keys=True).",
        _same_json,
    ),
    "tool_changed": Kind(
        "a tool that changed",
        "Keep each tool's definition the same for a whole conversation.",
        lambda d: d.scope == "text" and d.part.what == "tool",
    ),
    "flag": Kind(
        "a flag of the chat template",
        f"Send requests with different flags to different servers, or put the flag {_AFTER}.",
        _is_flag,
    ),
    "header": Kind(
        "a billing or attribution line",
        "Turn the line off in the client, or update it: newer clients keep the line the same in one conversation.",
    ),
    "uuid": Kind("a UUID", f"Put the id {_AFTER}, or leave it out of the prompt."),
    "time": Kind(
        "a time of day or time stamp", "Move the time into the last message, or give the date alone."
    ),
    "server_date": Kind(
        "the date that vLLM writes into a gpt-oss prompt",
        "Set VLLM_SYSTEM_START_DATE=YYYY-MM-DD for the server; else everything misses once a day.",
        _is_of_server,
    ),
    "date": Kind("a date", "Move the date into the last message; it costs one miss of everything a day."),
    "id": Kind(
        "the id of a user, a session or a request", f"Put the id {_AFTER}, or leave it out of the prompt."
    ),
    "user": Kind("a user's name or data", f"Put it {_AFTER}, or into the user's message."),
    "workspace": Kind(
        "a folder, a branch or the state of a repository",
        "Tell it in the last message, not in the system prompt.",
    ),
    "examples": Kind(
        "another choice or order of examples",
        f"Choose the examples once, or put the chosen ones {_AFTER}.",
        lambda d: _is_listed(d, _EXAMPLE),
    ),
    "documents": Kind(
        "another choice or order of documents",
        f"Sort the documents, for instance by id, or put them {_AFTER}.",
        lambda d: _is_listed(d, _DOCUMENT),
    ),
    "order": Kind("parts in another order", "Keep one order: what changes least comes first.", _is_shuffled),
    "counter": Kind("a number that changes", f"Put the number {_AFTER}."),
    "reasoning": Kind(
        "reasoning stripped from an earlier turn",
        "Send each turn back as it was answered, or keep the template from dropping its reasoning.",
        lambda d: d.scope == "parts" and {part.what for part in (*d.gone, *d.come)} == {"reasoning"},
    ),
    "reminder": Kind(
        "a reminder of the client between the turns",
        "Append reminders to the last message and keep them there, or serve a chat template that leaves a system "
        "message in its place.",
        _is_reminder,
    ),
    "turn_removed": Kind(
        "a turn that was left out",
        "Drop old turns rarely and many at a time: each cut makes all that follows new.",
        lambda d: bool(d.gone) and not d.come,
    ),
    "turn_added": Kind(
        "a turn that was put in between",
        "Append to the end of the conversation, not into it.",
        lambda d: bool(d.come) and not d.gone,
    ),
    "line_added": Kind(
        "a line that was put in", f"Put the text {_AFTER}.", lambda d: d.scope == "lines" and not d.old
    ),
    "line_removed": Kind(
        "a line that was left out",
        f"Send the line always, or put it {_AFTER}.",
        lambda d: d.scope == "lines" and not d.new,
    ),
    "other": Kind(
        "other text",
        "Put the text that differs after the text that is shared.",
        lambda d: d.scope in ("lines", "value"),
    ),
}
"""The kinds, in the order in which they are tried."""


def kind_of(d: Difference) -> str:
    """Return the first kind that fits; "": none does, and the texts are cut further."""
    fitting = (key for key, kind in KINDS.items() if (kind.test(d) if kind.test else d.value == key))
    return next(fitting, "")
