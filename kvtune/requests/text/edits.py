"""Names every separate edit between two prompts: its kind, its place (message, line), the two texts. Pure.

Parts pair by role and likeness, lines by their text without its values; then come the values of two lines. At each step
`kinds.py` is asked what differs; what is of no kind is cut further. Positions are those in the prompt. An edit counts
if `LEAST` shared characters follow it: what is appended is no edit. The work is bounded: long lines are cut, `MOST`
edits are told apart, and what takes more steps than are left (`Work`) is not aligned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from kvtune.requests.text.kinds import JUDGED, LIKE, NEAR, Difference, atoms, kind_of, likeness, masked
from kvtune.requests.text.parts import Part, of_body

LEAST = 128
"""Fewest shared characters that follow an edit."""
ALIKE = 0.25
"""Least share of the shorter prompt that both have; what prompts of two applications differ in is one edit."""
LONG = 400
"""Characters of a line; a longer one is cut after sentences, commas and brackets."""
MOST = 64
"""Edits of two prompts that are told apart; then as many parts are named as a whole."""
SHOWN = 200
"""Characters that are kept of a text that differs."""
STEPS = 2_000_000
"""Comparisons that two prompts may take."""
VERSION = 0.5
"""Least share of words that two lines have in common of which one may be a version of the other."""
SHORT = 80
"""Characters of two lines, or of a part, that are compared word by word, however unlike they are."""
CONTEXT = 3
"""Lines up to one that stands elsewhere, in which a heading tells what it is."""
LEADING = ("system", "developer", "prompt")
"""Roles of parts of which a prompt has one in one place."""
LISTS = ("examples", "documents", "order")
"""Kinds of texts in another order or choice: one edit in each part of a prompt."""
SAME_TEXT = ("keys", "whitespace", "unicode")
"""Kinds of texts that say the same in another form."""
NEAR_BY = {
    **dict.fromkeys(LISTS, 1 << 30),
    **dict.fromkeys(("line_added", "line_removed", "reminder", *SAME_TEXT), 2),
    "header": 0,
}
"""Most lines between two edits of a kind that are one. Edits of other kinds are one if nothing stands between them."""

Span = tuple[int, int]
Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Edit:
    """`kind`: a key of `KINDS`. `place`: of the part, e.g. "messages[3]"; `line`: in its message, from 1.

    `label`: the text before it on its line, values masked. `old`, `new`: the texts that differ, shortened; the spans
    are their positions in the prompts. `moved`: the positions of what a client would move, if that is more: a line that
    is a value and its label, all lines of which some stand in another order. `follows`: shared characters after it.
    """

    kind: str
    place: str
    role: str
    line: int
    label: str
    old: str
    new: str
    old_span: Span
    new_span: Span
    follows: int = 0
    moved: tuple[Span, Span] | None = None


Run = int | Edit
"""A number of characters that both prompts have, or an edit."""


class Work:
    """Counts the steps and the edits of a comparison. `left`: steps that it may still take; `taken`: those it took."""

    def __init__(self, steps: int = STEPS) -> None:
        self.left, self.taken, self.edits = steps, 0, 0

    def take(self, steps: int) -> bool:
        """Take this many steps; False if fewer are left."""
        if steps > self.left:
            return False
        self.left -= steps
        self.taken += steps
        return True


class _NoneLeft(Exception):
    """An alignment needs more steps than are left."""


class _Matcher(SequenceMatcher[Item]):
    def __init__(self, old: Sequence[Item], new: Sequence[Item], work: Work) -> None:
        super().__init__(None, old, new, autojunk=False)
        self._work, self._old, self._count = work, old, Counter(new)

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> Match:
        if not self._work.take(sum(self._count[item] + 1 for item in self._old[alo:ahi])):
            raise _NoneLeft
        return super().find_longest_match(alo, ahi, blo, bhi)


def _aligned(
    old: Sequence[Item], new: Sequence[Item], work: Work
) -> Iterator[tuple[bool, int, int, int, int]]:
    """Yield whether items are equal, and where they begin and end in the old and in the new sequence."""
    head, tail = _equal_ends(old, new)
    was, now = old[head : len(old) - tail], new[head : len(new) - tail]
    matches = [Match(0, 0, head)]
    if min(len(was), len(now)) > 1 or not set(was).isdisjoint(now):
        with suppress(_NoneLeft):
            blocks = _Matcher(was, now, work).get_matching_blocks()
            matches += [Match(match.a + head, match.b + head, match.size) for match in blocks]
    i = j = 0
    for a, b, size in [*matches, Match(len(old) - tail, len(new) - tail, tail)]:
        if i < a or j < b:
            yield False, i, a, j, b
        i, j = a + size, b + size
        if size:
            yield True, a, i, b, j


def _equal_ends(old: Sequence[object], new: Sequence[object]) -> Span:
    """Count the items at the beginning and at the end that two sequences have in common."""
    head, tail = (
        next((n for n, (was, now) in enumerate(pairs) if was != now), min(len(old), len(new)))
        for pairs in (zip(old, new, strict=False), zip(reversed(old), reversed(new), strict=False))
    )
    return head, min(tail, min(len(old), len(new)) - head)


class Text(NamedTuple):
    """A text, and where it starts and ends in its prompt; of several parts the text of the first."""

    text: str
    start: int
    end: int

    def cut(self, start: int, end: int) -> Text:
        return Text(self.text[start - self.start : end - self.start], start, end)


def _of_parts(parts: Sequence[Part], start: int = 0) -> Text:
    """Return the text of parts in a row; of no parts an empty one at the start."""
    end = parts[-1].start + len(parts[-1].text) if parts else start
    return Text(parts[0].text, parts[0].start, end) if parts else Text("", start, end)


def _edit(kind: str, part: Part, old: Text, new: Text, label: str = "", moved: Sequence[Text] = ()) -> Edit:
    line = part.line + part.text.count("\n", 0, max(0, new.start - part.start))
    texts = old.text[:SHOWN], new.text[:SHOWN]
    moves = (moved[0][1:], moved[1][1:]) if moved else None
    return Edit(kind, part.place, part.role, line, label, *texts, old[1:], new[1:], 0, moves)


def edits(old: Mapping[str, Any], new: Mapping[str, Any], work: Work | None = None) -> list[Edit]:
    """Name the edits between the bodies of two requests, in the new prompt's order."""
    return between(of_body(old), of_body(new), work)


def stripped(body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Return the edit of a chat template that drops the reasoning of the last turn once another question follows."""
    parts = of_body(body)
    asked = [number for number, part in enumerate(parts) if (part.role, part.what) == ("user", "text")]
    last = asked[-1] + 1 if asked else 0
    thoughts = [part for part in parts[last:] if part.what == "reasoning"]
    return tuple(_edit("reasoning", part, _of_parts([part]), _of_parts([])) for part in thoughts[:1])


def between(old: Sequence[Part], new: Sequence[Part], work: Work | None = None) -> list[Edit]:
    """Name the edits between two prompts' parts, in the new prompt's order."""
    work = work or Work()
    runs: list[Run] = []
    for run in _runs(old, new, work):
        work.edits += isinstance(run, Edit)
        runs.append(run)
    edits: list[Edit] = []
    follows = 0
    for run in reversed(runs):
        if isinstance(run, int):
            follows += run
        elif edits and _is_one_edit(run, edits[-1]):
            edits[-1] = _joined(run, edits[-1], follows)
        else:
            edits.append(replace(run, follows=follows))
    counted = [edit for edit in edits[::-1] if edit.follows >= LEAST or edit.kind == "compaction"]
    kinds = {edit.kind for edit in counted}
    shorter = min(sum(len(part.text) for part in parts) for parts in (old, new))
    if follows < ALIKE * shorter and "other" in kinds and "compaction" not in kinds:
        return [replace(_joined(counted[0], counted[-1], counted[0].follows), kind="other")]
    return counted[: 2 * MOST]


def _is_one_edit(edit: Edit, next_: Edit) -> bool:
    kinds = {edit.kind, next_.kind}
    if edit.place != next_.place or (len(kinds) > 1 and not ("order" in kinds and kinds <= {*LISTS})):
        return False
    if edit.kind in NEAR_BY:
        return next_.line - edit.line <= NEAR_BY[edit.kind]
    return (edit.old_span[1], edit.new_span[1]) == (next_.old_span[0], next_.new_span[0])


def _joined(edit: Edit, next_: Edit, follows: int) -> Edit:
    kind = next_.kind if edit.kind == "order" else edit.kind
    old = edit.old_span[0], max(edit.old_span[1], next_.old_span[1])
    new = edit.new_span[0], max(edit.new_span[1], next_.new_span[1])
    return replace(edit, kind=kind, old_span=old, new_span=new, follows=follows)


def _runs(old: Sequence[Part], new: Sequence[Part], work: Work) -> Iterator[Run]:
    order, old = _in_one_order(old, new)
    yield from order
    end = Part("", "", "text", "")
    old, new = ([*parts, replace(end, start=_of_parts(parts).end)] for parts in (old, new))
    was, now = (Counter(part.text for part in parts) for parts in (old, new))
    moved = {text for text in was if text.strip() and was[text] == now[text]}
    last_i = last_j = 0
    for i, j in _pairs(old, new, work):
        yield from _alone(old[last_i:i], new[last_j:j], (old[i].start, new[j].start), moved)
        yield from _compared(old[i], new[j], work)
        last_i, last_j = i + 1, j + 1


def _in_one_order(old: Sequence[Part], new: Sequence[Part]) -> tuple[list[Edit], Sequence[Part]]:
    """Return the edit of tools in another order, and the old parts with their tools in the new order."""
    was, now = ({part.place: part for part in parts if part.what == "tool"} for parts in (old, new))
    before, after = [was[name] for name in was if name in now], [now[name] for name in now if name in was]
    head, tail = _equal_ends([part.place for part in before], [part.place for part in after])
    if head == len(before):
        return [], old
    texts = [
        _of_parts(tools[head : len(tools) - tail])._replace(
            text=" ".join(part.place.removeprefix("tool ") for part in tools[head:])
        )
        for tools in (before, after)
    ]
    part = Part("tools", "tool", "tool", "", 0, head + 1)
    edit = _edit(kind_of(Difference("tools", part)), part, texts[0], texts[1])
    sorted_ = iter([was[part.place] for part in after])
    return [edit], [next(sorted_) if part.what == "tool" and part.place in now else part for part in old]


def _pairs(old: Sequence[Part], new: Sequence[Part], work: Work) -> Iterator[tuple[int, int]]:
    """Pair each new part with the old one that it is, or else with the first of which it is another version."""
    keys = [[(part.role, part.what, part.text) for part in parts] for parts in (old, new)]
    for equal, i1, i2, j1, j2 in _aligned(keys[0], keys[1], work):
        as_many = i2 - i1 if i2 - i1 == j2 - j1 else 0
        if equal:
            yield from zip(range(i1, i2), range(j1, j2), strict=True)
        elif i2 - i1 == 1 or work.take((i2 - i1) * (j2 - j1)):
            for j in range(j1, j2):
                versions = (i for i in range(i1, i2) if _is_version(old[i], new[j], as_many, work))
                if (i := next(versions, -1)) >= 0:
                    yield i, j
                    i1 = i + 1


def _is_version(old: Part, new: Part, as_many: int, work: Work) -> bool:
    """Whether this is a tool of the same name, or a message that is like the other. `as_many`: parts that both prompts
    have there, 0: one has more.
    """
    if (old.role, old.what) != (new.role, new.what):
        return False
    if new.what in ("tool", "flag"):
        return old.place == new.place
    if as_many == 1 or (as_many and (new.role in LEADING or new.what in ("result", "call"))):
        return True
    texts = old.text[:JUDGED], new.text[:JUDGED]
    return work.take(sum(map(len, texts))) and likeness(*texts) >= LIKE


def _alone(gone: Sequence[Part], come: Sequence[Part], next_: Span, moved: Collection[str]) -> Iterator[Edit]:
    """Name the parts before a pair that one prompt has: tools, flags and moved parts one by one, turns together.

    `next_`: where the pair stands in the old and in the new prompt.
    """

    def is_turn(part: Part) -> bool:
        return part.what not in ("tool", "flag") and part.text not in moved

    lost, added = list(filter(is_turn, gone)), list(filter(is_turn, come))
    turns = [(lost, added)]
    if lost and added and not kind_of(Difference("parts", added[0], gone=lost, come=added)):
        turns = [([], added), (lost, [])]  # no kind is named for both together: each is its own edit
    edits: list[tuple[list[Part], list[Part]]] = []
    for is_new, part in (*((True, part) for part in come), *((False, part) for part in gone)):
        if not is_turn(part):
            edits.append(([], [part]) if is_new else ([part], []))
        elif part is (added or lost)[0]:
            edits += turns
    for before, after in edits:
        part = (after or before)[0]
        old, new = _of_parts(before, next_[0]), _of_parts(after, next_[1])
        difference = Difference("parts", part, moved=part.text in moved, gone=before, come=after)
        place = part.place.partition(".")[0] if part.text in moved else part.place
        yield _edit(kind_of(difference), replace(part, place=place, text=""), old, new)


def _compared(was: Part, now: Part, work: Work) -> Iterator[Run]:
    """Name what differs between two versions of a part: at once, or else line by line."""
    if was.text == now.text:
        yield len(now.text)
        return
    old, new = _of_parts([was]), _of_parts([now])
    if work.edits >= MOST or not work.take(len(was.text) + len(now.text)):
        yield _edit("other", now, old, new)
        return
    lines = [part.text.splitlines(keepends=True) for part in (was, now)]
    first, last = _equal_ends(lines[0], lines[1]) if now.what in ("text", "reasoning") else (0, 0)
    head, tail = (len("".join(some)) for some in (lines[1][:first], lines[1][len(lines[1]) - last :]))
    old, new = (text.cut(text.start + head, text.end - tail) for text in (old, new))
    yield head
    kind = kind_of(Difference("text", now, old.text, new.text))
    if not kind and now.what != "flag" and 2 * len(new.text) > len(now.text) > SHORT:
        kind = "other" if likeness(was.text[:JUDGED], now.text[:JUDGED]) < LIKE else ""
    if kind:
        yield from _trimmed(kind, now, old, new)
    else:
        ends = old.start, new.start
        for run in _Lines(now, old, new, work).runs():
            if work.edits >= MOST:
                yield from _trimmed("other", now, old.cut(ends[0], old.end), new.cut(ends[1], new.end))
                break
            ends = (run.old_span[1], run.new_span[1]) if isinstance(run, Edit) else ends
            yield run
    yield tail


def _trimmed(kind: str, part: Part, old: Text, new: Text) -> Iterator[Run]:
    """Make one edit of two texts, without what is equal at both ends."""
    head, tail = (0, 0) if kind == "cleared" else _equal_ends(old.text, new.text)
    yield head
    label = masked(new.text[:head].rpartition("\n")[2][-NEAR:])
    texts = [text.cut(text.start + head, text.end - tail) for text in (old, new)]
    yield _edit(kind, part, texts[0], texts[1], label)
    yield len(new.text) - head if kind in SAME_TEXT else tail


_CUT = re.compile(r"(?<=[.!?;] )|(?<=[,}\]])(?=[ \"{\[])")
_PIECE = re.compile(rf"(?s).{{1,{LONG}}}(?:\s|$)|.{{1,{LONG}}}")


def _cut(text: str) -> list[str]:
    """Return the lines of a text; one that is long is cut."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        for piece in _CUT.split(line) if len(line) > LONG else [line]:
            lines += _PIECE.findall(piece) if len(piece) > LONG else [piece]
    return list(filter(None, lines))


def _starts(texts: Iterable[str], start: int) -> list[int]:
    return list(accumulate(map(len, texts), initial=start))


def _tells(line: str) -> bool:
    """Whether a line tells which line it is."""
    return len(line) > 3


class _Lines:
    """The lines of two texts."""

    def __init__(self, part: Part, old: Text, new: Text, work: Work) -> None:
        self._part, self._old, self._new, self._work = part, old, new, work
        self._was, self._now = _cut(old.text), _cut(new.text)
        self._starts = _starts(self._was, old.start), _starts(self._now, new.start)
        was, now = Counter(filter(_tells, self._was)), Counter(filter(_tells, self._now))
        self._gone, self._come = was - now, now - was

    def runs(self) -> Iterator[Run]:
        was, now = self._was, self._now
        if not self._gone and not self._come and len(was) == len(now):
            yield from self._block(0, len(was), 0, len(now))
            return
        for equal, i1, i2, j1, j2 in _aligned(list(map(masked, was)), list(map(masked, now)), self._work):
            yield from self._versions(i1, j1, i2 - i1) if equal else self._block(i1, i2, j1, j2)

    def _block(self, i1: int, i2: int, j1: int, j2: int) -> Iterator[Run]:
        """Name lines that only one text has, or that stand in another order; pair others."""
        moved = self._moved(self._was[i1:i2], self._now[j1:j2])
        if moved or i1 == i2 or j1 == j2:
            yield self._edit(i1, i2, j1, j2, moved=moved)
            return
        while i1 < i2 and j1 < j2 and i2 - i1 != j2 - j1 and likeness(self._was[i1], self._now[j1]) < VERSION:
            gone = i2 - i1 > j2 - j1
            yield from self._block(i1, i1 + gone, j1, j1 + (not gone))
            i1, j1 = i1 + gone, j1 + (not gone)
        both = min(i2 - i1, j2 - j1)
        yield from self._versions(i1, j1, both)
        if i2 - i1 != j2 - j1:
            yield from self._block(i1 + both, i2, j1 + both, j2)

    def _edit(self, i1: int, i2: int, j1: int, j2: int, *around: str, moved: bool) -> Edit:
        old = self._old.cut(self._starts[0][i1], self._starts[0][i2])
        new = self._new.cut(self._starts[1][j1], self._starts[1][j2])
        kind = kind_of(Difference("lines", self._part, old.text, new.text, around=around, moved=moved))
        return _edit(kind, self._part, old, new, moved=(self._old, self._new) if kind in LISTS else ())

    def _moved(self, was: Sequence[str], now: Sequence[str]) -> bool:
        """Whether these lines stand elsewhere in the other text, or most of them in another order here."""
        old, new = list(filter(_tells, was)), list(filter(_tells, now))
        both = (
            [line for line in old if line not in self._gone],
            [line for line in new if line not in self._come],
        )
        if not was or not now:
            return both == (old, new) and bool(old or new)
        return sorted(both[0]) == sorted(both[1]) and 2 * sum(map(len, both[0])) > sum(map(len, was))

    def _versions(self, i1: int, j1: int, count: int) -> Iterator[Run]:
        """Compare lines in pairs."""
        for i, j in zip(range(i1, i1 + count), range(j1, j1 + count), strict=True):
            old, new = self._was[i], self._now[j]
            if old.rstrip("\n") == new.rstrip("\n"):
                yield len(new)
                continue
            same = masked(old) == masked(new)
            elsewhere = [_tells(old) and old not in self._gone, _tells(new) and new not in self._come]
            if all(elsewhere) or (any(elsewhere) and not same):
                before = self._part.text[: self._starts[1][j + 1] - self._part.start].splitlines()
                yield self._edit(i, i + 1, j, j + 1, "\n".join(before[-CONTEXT:]), moved=True)
            elif not same and len(old) + len(new) > SHORT and likeness(old, new) < LIKE:
                yield self._edit(i, i + 1, j, j + 1, moved=False)
            else:
                old_line = self._old.cut(*self._starts[0][i : i + 2])
                yield from _line(self._part, old_line, self._new.cut(*self._starts[1][j : j + 2]), self._work)


_LABELLED = re.compile(r"\W*[\w -]{0,40}[:=]?[\s\"']*")
_END_OF_LINE = re.compile(r"[\s\"'.;,]*")


def _line(part: Part, old: Text, new: Text, work: Work) -> Iterator[Run]:
    """Name what differs between two versions of a line: at once, or else value by value."""
    spans = _spans(old, new, work)
    if kind := kind_of(Difference("line", part, old.text, new.text, several=len(spans) > 1)):
        yield from _trimmed(kind, part, old, new)
        return
    done = new.start
    for was, now in spans:
        yield now.start - done
        done = now.end
        label, rest = new.text[: now.start - new.start], new.text[done - new.start :]
        kind = kind_of(Difference("value", part, was.text, now.text, label, (old.text, new.text)))
        alone = len(spans) == 1 and _LABELLED.fullmatch(label) and _END_OF_LINE.fullmatch(rest)
        yield _edit(kind, part, was, now, masked(label)[-NEAR:], (old, new) if alone else ())
    yield new.end - done


def _spans(old: Text, new: Text, work: Work) -> list[tuple[Text, Text]]:
    """Return where two lines differ. Differences with only a blank or a mark or two between them are one."""
    was, now = atoms(old.text), atoms(new.text)
    joined: list[list[int]] = []
    for equal, *block in _aligned(was, now, work):
        if not equal:
            kept = was[joined[-1][1] : block[0]] if joined else ()
            if joined and len(kept) <= 2 and all(what in ("space", "mark") for what, _ in kept):
                block = [joined[-1][0], block[1], joined.pop()[2], block[3]]
            joined.append(block)
    olds, news = _starts((atom for _, atom in was), old.start), _starts((atom for _, atom in now), new.start)
    return [(old.cut(olds[i1], olds[i2]), new.cut(news[j1], news[j2])) for i1, i2, j1, j2 in joined]
