"""Names every separate edit between two prompts: its kind, its place (message, line), the two texts. Pure.

    parts     equal parts are shared; of the others tools pair by name, messages by role and likeness
    lines     in two parts, lines are aligned by their masked text, so that lines which differ in values only are paired
    atoms     in two lines, the atoms are compared; what differs is named by `kinds.py`

An edit counts only if at least `LEAST` characters follow it that both prompts have: what is appended is no edit. The
work is bounded: equal heads and tails are dropped, long lines are cut, after `MOST` edits whole parts are compared, and
no alignment takes more than the steps that are left (`Work`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple, TypeVar

from kvtune.requests.text.kinds import (
    NEAR,
    REMINDER,
    SUMMARY,
    VALUES,
    agreeing,
    are_documents,
    are_examples,
    atoms,
    kind_of,
    masked,
    same_but_form,
    same_keys,
    same_words,
    sorted_json,
)
from kvtune.requests.text.parts import Part, of_body

LEAST = 128
"""Fewest shared characters that follow an edit."""
LONG = 400
"""Characters of a line; a longer one is cut after sentences, commas and brackets."""
MOST = 64
"""Edits of two prompts that are told apart."""
SHAPES = 1024
"""Shapes of lines that are kept."""
SHAPE_BEGINS = 24
"""Characters of a part's beginning that tell whose text it is."""
SHOWN = 200
"""Characters that are kept of a text that differs."""
STEPS = 2_000_000
"""Comparisons that two prompts may take."""
LIKE = 0.4
"""Least share of words that two messages of one turn have in common."""
CONTEXT = 3
"""Lines up to one that stands elsewhere, in which a heading tells what it is."""
JUDGED = 4000
"""Characters of a message by which it is judged whether it is another message, changed."""

LISTS = ("examples", "documents", "order")
"""Kinds of texts in another order or choice: one edit in each part of a prompt."""

Span = tuple[int, int]
One = TypeVar("One", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Edit:
    """`kind`: a key of `KINDS`. `place`: of the part, e.g. "messages[3]"; `line`: in its message, from 1.

    `label`: the text before it on its line, values masked. `old`, `new`: the texts that differ, shortened. `follows`:
    shared characters after it. The spans are positions of the texts in their parts, in a rendered prompt from its
    start; the moves are what a client would move: the text, or its line if that has only a label beside it.
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
    old_move: Span = (0, 0)
    new_move: Span = (0, 0)


class Work:
    """Counts the steps and the edits of a comparison. `left`: steps that it may still take; `taken`: those it took.

    `shapes`: lines that earlier comparisons of the same caller have named.
    """

    def __init__(self, steps: int = STEPS, shapes: Shapes | None = None) -> None:
        self.left, self.taken, self.edits = steps, 0, 0
        self.shapes: Shapes = {} if shapes is None else shapes

    def take(self, steps: int) -> bool:
        """Take this many steps; False if fewer are left."""
        if steps > self.left:
            return False
        self.left -= steps
        self.taken += steps
        return True


class _NoneLeft(Exception):
    """An alignment needs more steps than are left."""


class _Matcher(SequenceMatcher[One]):
    def __init__(self, old: Sequence[One], new: Sequence[One], work: Work) -> None:
        super().__init__(None, old, new, autojunk=False)
        self._work, self._old, self._count = work, old, Counter(new)

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> Match:
        if not self._work.take(sum(self._count[line] + 1 for line in self._old[alo:ahi])):
            raise _NoneLeft
        return super().find_longest_match(alo, ahi, blo, bhi)


Block = tuple[Literal["replace", "delete", "insert", "equal"], int, int, int, int]


def _aligned(old: Sequence[One], new: Sequence[One], work: Work) -> list[Block]:
    """Align two sequences, as `SequenceMatcher.get_opcodes` does; what is between equal ends is one block at worst."""
    head = _agree(old, new)
    tail = min(_agree(old[::-1], new[::-1]), min(len(old), len(new)) - head)
    was, now = old[head : len(old) - tail], new[head : len(new) - tail]
    try:
        if min(len(was), len(now)) < 2 and set(was).isdisjoint(now):
            raise _NoneLeft  # nothing to align
        middle = _Matcher(was, now, work).get_opcodes()
    except _NoneLeft:
        all_ = 0, len(was), 0, len(now)
        middle = [("replace", *all_)] if was and now else [("delete", *all_)] if was else [("insert", *all_)]
        middle = middle if was or now else []
    blocks: list[Block] = [("equal", 0, head, 0, head)] if head else []
    blocks += [(op, i1 + head, i2 + head, j1 + head, j2 + head) for op, i1, i2, j1, j2 in middle]
    if tail:
        blocks.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
    return blocks


def _agree(old: Sequence[object], new: Sequence[object]) -> int:
    if isinstance(old, str) and isinstance(new, str):
        return agreeing(old, new)
    for number, (line, other) in enumerate(zip(old, new, strict=False)):
        if line != other:
            return number
    return min(len(old), len(new))


Run = int | Edit
"""A number of characters that both prompts have, or an edit."""


def edits(old: Mapping[str, Any], new: Mapping[str, Any], work: Work | None = None) -> list[Edit]:
    """Name the edits between the bodies of two requests, in the new prompt's order."""
    return between(of_body(old), of_body(new), work)


def stripped(body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Return the edit of a chat template that drops the reasoning of the last turn once another question follows."""
    parts = of_body(body)
    last = max(
        (number for number, part in enumerate(parts) if (part.role, part.what) == ("user", "text")),
        default=-1,
    )
    thoughts = [part for part in parts[last + 1 :] if part.what == "reasoning"]
    return tuple(
        _edit("reasoning", thought, (thought.text, ""), ((0, len(thought.text)), (0, 0)))
        for thought in thoughts[:1]
    )


def between(old: Sequence[Part], new: Sequence[Part], work: Work | None = None) -> list[Edit]:
    """Name the edits between two prompts' parts, in the new prompt's order."""
    runs = list(_runs(list(old), list(new), work or Work()))
    edits: list[Edit] = []
    follows = 0
    for run in reversed(runs):
        if isinstance(run, int):
            follows += run
        elif follows >= LEAST or run.kind == "compaction":
            edit = replace(run, follows=follows)
            if edits and _one_edit(edit, edits[-1]):
                edits[-1] = _joined(edit, edits[-1])
            else:
                edits.append(edit)
    return edits[::-1]


def _one_edit(edit: Edit, next_: Edit) -> bool:
    if edit.place != next_.place:
        return False
    if edit.kind in LISTS and next_.kind in LISTS:
        return "order" in (edit.kind, next_.kind) or edit.kind == next_.kind
    if edit.kind != next_.kind:
        return False
    if edit.kind in ("keys", "line_added", "line_removed", "reminder", "whitespace", "unicode"):
        return next_.line - edit.line <= 2
    if edit.kind == "header":
        return next_.line == edit.line
    return edit.old_span[1] == next_.old_span[0] and edit.new_span[1] == next_.new_span[0]


def _joined(edit: Edit, next_: Edit) -> Edit:
    return replace(
        edit,
        kind=next_.kind if edit.kind == "order" else edit.kind,
        old_span=(edit.old_span[0], max(edit.old_span[1], next_.old_span[1])),
        new_span=(edit.new_span[0], max(edit.new_span[1], next_.new_span[1])),
        old_move=(edit.old_move[0], max(edit.old_move[1], next_.old_move[1])),
        new_move=(edit.new_move[0], max(edit.new_move[1], next_.new_move[1])),
    )


def _runs(old: list[Part], new: list[Part], work: Work) -> Iterator[Run]:
    order, old = _in_one_order(old, new)
    if order is not None:
        yield order
    pairs = list(_pairs(old, new, work))
    gone = {pair.old.text for pair in pairs if pair.old is not None and pair.new is None}
    come = {pair.new.text for pair in pairs if pair.new is not None and pair.old is None}
    moved = {text for text in gone & come if text.strip()}
    groups = [
        [pair for _, pair in some]
        for _, some in groupby(
            enumerate(pairs), lambda numbered: _of_one_edit(numbered[0], numbered[1], moved)
        )
    ]
    for some, next_, most in zip(groups, _starts_after(groups, old, new), _most_after(groups), strict=True):
        if most < LEAST and not some[0].kind:
            continue  # no edit in it counts
        was, now = some[0].old, some[0].new
        if not some[0].kind and was is not None and now is not None:
            for run in _compared(was, now, work):
                work.edits += isinstance(run, Edit)
                yield run
        else:
            work.edits += 1
            yield _alone(some, moved, next_)


def _most_after(groups: Sequence[Sequence[_Pair]]) -> list[int]:
    """Return for each group how many shared characters may follow an edit in it, at most."""
    best, most = [], 0
    for some in reversed(groups):
        most += sum(min(len(pair.old.text), len(pair.new.text)) for pair in some if pair.old and pair.new)
        best.append(most)
    return best[::-1]


def _starts_after(groups: Sequence[Sequence[_Pair]], old: Sequence[Part], new: Sequence[Part]) -> list[Span]:
    """Return for each group where the part after it begins, in the old and in the new prompt."""
    ends = (_end(old[-1]) if old else 0), (_end(new[-1]) if new else 0)
    runs = []
    for some in reversed(groups):
        runs.append(ends)
        starts = [pair.old.start for pair in some if pair.old is not None]
        others = [pair.new.start for pair in some if pair.new is not None]
        ends = (starts or [ends[0]])[0], (others or [ends[1]])[0]
    return runs[::-1]


def _of_one_edit(number: int, pair: _Pair, moved: set[str]) -> tuple[str, int]:
    """Return what is equal for pairs in a row that are one edit: parts of a summary, turns that only one prompt has."""
    part = pair.new or pair.old
    assert part is not None
    if pair.kind:
        return pair.kind, 0
    if (pair.old is None) == (pair.new is None) or part.what in ("tool", "flag") or part.text in moved:
        return "", number
    return ("added" if pair.old is None else "removed"), 0


def _in_one_order(old: list[Part], new: list[Part]) -> tuple[Edit | None, list[Part]]:
    """Return the edit of tools in another order, and the old parts with their tools in the new order."""
    was, now = ([part for part in parts if part.what == "tool"] for parts in (old, new))
    names = {part.place for part in was} & {part.place for part in now}
    was, now = ([part for part in parts if part.place in names] for parts in (was, now))
    before, after = ([part.place for part in parts] for parts in (was, now))
    if before == after or len(set(before)) < len(before) or sorted(before) != sorted(after):
        return None, old
    first = _agree(before, after)
    tail = _agree(before[::-1], after[::-1])
    spans = [(parts[first].start, _end(parts[len(parts) - tail - 1])) for parts in (was, now)]
    telling = [
        " ".join(name.removeprefix("tool ") for name in names_[first:])[:SHOWN] for names_ in (before, after)
    ]
    order = _edit(
        "tools",
        Part("tools", "tool", "tool", "", 0, first + 1),
        (telling[0], telling[1]),
        (spans[0], spans[1]),
    )
    by_name = {part.place: part for part in was}
    sorted_ = iter([by_name[name] for name in after])
    return order, [next(sorted_) if part.what == "tool" and part.place in names else part for part in old]


def _end(part: Part) -> int:
    return part.start + len(part.text)


class _Pair(NamedTuple):
    """Two parts, or one that only one prompt has. `kind`: of an edit that is known already, else ""."""

    old: Part | None
    new: Part | None
    kind: str = ""


def _pairs(old: Sequence[Part], new: Sequence[Part], work: Work) -> Iterator[_Pair]:
    """Align the parts of two prompts, in the order of the new one."""
    keys = [[(part.role, part.what, part.text) for part in parts] for parts in (old, new)]
    for op, i1, i2, j1, j2 in _aligned(keys[0], keys[1], work):
        if op == "equal":
            yield from map(_Pair, old[i1:i2], new[j1:j2])
        else:
            yield from _changed(old[i1:i2], new[j1:j2], work)


def _changed(was: Sequence[Part], now: Sequence[Part], work: Work) -> Iterator[_Pair]:
    """Pair the parts between two equal ones."""
    partners = _partners(was, now, work)
    taken = set(partners.values())
    kind = _summed_up(
        [part for place, part in enumerate(was) if place not in taken],
        [part for place, part in enumerate(now) if place not in partners],
    )
    done = 0
    for number, part in enumerate(now):
        if number not in partners:
            yield _Pair(None, part, kind)
            continue
        if part.what != "tool":
            yield from (
                _Pair(was[place], None, kind)
                for place in range(done, partners[number])
                if _waits(was, place, taken)
            )
            done = max(done, partners[number] + 1)
        yield _Pair(was[partners[number]], part)
    for place, part in enumerate(was):
        if place not in taken and (place >= done or part.what == "tool"):
            yield _Pair(part, None, kind)


def _waits(was: Sequence[Part], place: int, taken: set[int]) -> bool:
    return place not in taken and was[place].what != "tool"


def _partners(was: Sequence[Part], now: Sequence[Part], work: Work) -> dict[int, int]:
    """Return which old part each new part changes, by position: tools by name, messages by likeness, in order."""
    partners: dict[int, int] = {}
    taken: set[int] = set()
    last = -1
    for number, part in enumerate(now):
        if len(was) > 1 and not work.take(len(was)):
            break
        same = [
            place
            for place, other in enumerate(was)
            if place not in taken and other.role == part.role and other.what == part.what
        ]
        if part.what in ("tool", "flag"):
            same = [place for place in same if was[place].place == part.place][:1]
        else:
            same = [place for place in same if place > last]
            if len(same) > 1 or (same and not _pairs_anyway(part, was, now)):
                likeness = {
                    place: _likeness(was[place].text[:JUDGED], part.text[:JUDGED], work) for place in same
                }
                best = max(same, key=lambda place: (likeness[place], -place))
                same = [best] if likeness[best] >= LIKE or _pairs_anyway(part, was, now) else []
        if same:
            partners[number] = same[0]
            taken.add(same[0])
            last = same[0] if part.what not in ("tool", "flag") else last
    return partners


def _pairs_anyway(part: Part, was: Sequence[Part], now: Sequence[Part]) -> bool:
    """Whether this part is a change of an old one, however unlike: each prompt has one."""
    if len(was) == len(now) == 1:
        return True
    return (part.role in ("system", "developer", "prompt") or part.what in ("result", "call")) and len(
        was
    ) == len(now)


def _summed_up(removed: Sequence[Part], added: Sequence[Part]) -> str:
    """Return "compaction" if several turns were replaced by a shorter text that is a summary, else ""."""
    turns = [part for part in removed if part.what not in ("tool", "flag")]
    texts = [part.text for part in added if part.what == "text"]
    shorter = sum(map(len, texts)) < sum(len(part.text) for part in turns)
    return "compaction" if len(turns) > 1 and shorter and any(map(SUMMARY.search, texts)) else ""


def _alone(pairs: Sequence[_Pair], moved: set[str], next_: Span) -> Edit:
    """Return the edit of parts in a row that only one prompt has, or of a summary and what it stands for.

    `next_`: where the parts after these begin in the old and in the new prompt.
    """
    both = [
        [part for part in side if part is not None]
        for side in zip(*(pair[:2] for pair in pairs), strict=True)
    ]
    parts = both[1] or both[0]
    part, place = parts[0], parts[0].place
    kind = pairs[0].kind
    if not kind and part.text in moved:
        kind, place = _order_of(part.text), place.partition(".")[0]
    kind = kind or _kind_alone(parts, "added" if both[1] else "removed")
    texts = [some[0].text[:SHOWN] if some else "" for some in both]
    spans = [
        (some[0].start, _end(some[-1])) if some else (end, end) for some, end in zip(both, next_, strict=True)
    ]
    return _edit(kind, replace(part, place=place), (texts[0], texts[1]), (spans[0], spans[1]))


def _edit(
    kind: str, part: Part, texts: tuple[str, str], spans: tuple[Span, Span], label: str = "", lines: int = 0
) -> Edit:
    old, new = texts[0][:SHOWN], texts[1][:SHOWN]
    return Edit(kind, part.place, part.role, part.line + lines, label, old, new, *spans, 0, *spans)


def _kind_alone(parts: Sequence[Part], change: str) -> str:
    what = parts[0].what
    if what == "tool":
        return f"tool_{change}"
    if what == "flag" or all(part.what == "reasoning" for part in parts):
        return what
    if all(REMINDER.search(part.text) or _is_inside(part) for part in parts):
        return "reminder"
    return f"turn_{change}"


def _is_inside(part: Part) -> bool:
    """Whether this is a system message that is no system prompt, but stands between the turns."""
    between_turns = part.place.startswith("messages") and part.place.partition(".")[0] != "messages[0]"
    return between_turns and part.role in ("system", "developer")


def _order_of(*texts: str) -> str:
    return "examples" if are_examples(*texts) else "documents" if are_documents(*texts) else "order"


class _Line(NamedTuple):
    text: str
    start: int
    number: int


def _compared(was: Part, now: Part, work: Work) -> Iterator[Run]:
    """Compare two parts."""
    old, new = was.text, now.text
    if old == new:
        yield len(new)
        return
    whole = _Change(was, now)
    if work.edits >= MOST or not work.take(len(old) + len(new)):
        yield whole.edit("other", (0, len(old)), (0, len(new)))
    elif was.what == "result" and len(old) >= 4 * len(new) and _likeness(old[:JUDGED], new, work) < LIKE:
        yield whole.edit("cleared", (0, len(old)), (0, len(new)))
    elif now.what == "call":
        yield whole.trimmed("tool_call_rewritten", old, new)
    elif kind := _form_of(was, now):
        yield whole.trimmed(kind, old, new)
        yield min(len(old), len(new)) // 2
    elif now.what == "tool":
        yield whole.trimmed("tool_changed", old, new)
        yield _agree(old, new) + _agree(old[::-1], new[::-1])
    else:
        yield from _lines_of(whole, old, new, work)


def _form_of(was: Part, now: Part) -> str:
    """Return the kind of parts that say the same in another form, else ""."""
    sorted_text = sorted_json(was.text) if now.what == "tool" or now.text[:1] in ("{", "[") else None
    if sorted_text is not None and sorted_text == sorted_json(now.text):
        return "keys"
    form = same_but_form(was.text, now.text)
    if form == "whitespace":
        return form if was.text.split() == now.text.split() else ""
    forms = (unicodedata.normalize("NFKC", part.text) for part in (was, now))
    return form if form and next(forms) == next(forms) else ""


class _Change(NamedTuple):
    """Two parts that differ: makes edits of their texts."""

    was: Part
    now: Part

    def in_prompt(self, span: Span, side: int) -> Span:
        """Return the position of a text in the old (0) or the new (1) prompt."""
        start = self[side].start
        return start + span[0], start + span[1]

    def edit(self, kind: str, old: Span, new: Span, label: str = "") -> Edit:
        before = self.now.text.count("\n", 0, new[0])
        texts = self.was.text[slice(*old)], self.now.text[slice(*new)]
        spans = self.in_prompt(old, 0), self.in_prompt(new, 1)
        return _edit(kind, self.now, texts, spans, label, before)

    def trimmed(self, kind: str, old: str, new: str, offsets: Span = (0, 0)) -> Edit:
        """Return an edit of these texts, which begin `offsets` these positions, without what is equal at both ends."""
        head = _agree(old, new)
        tail = min(_agree(old[::-1], new[::-1]), min(len(old), len(new)) - head)
        label = masked(new[:head].rpartition("\n")[2][-NEAR:])
        return self.edit(
            kind,
            (offsets[0] + head, offsets[0] + len(old) - tail),
            (offsets[1] + head, offsets[1] + len(new) - tail),
            label,
        )


_CUT = re.compile(r"(?<=[.!?;] )|(?<=[,}\]])(?=[ \"{\[])")
_PIECE = re.compile(rf"(?s).{{1,{LONG}}}(?:\s|$)|.{{1,{LONG}}}")


def _cut(text: str) -> list[str]:
    """Return the lines of a text; one that is long is cut."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if len(line) <= LONG:
            lines.append(line)
        else:
            for piece in _CUT.split(line):
                lines += [piece] if len(piece) <= LONG else _PIECE.findall(piece)
    return [line for line in lines if line]


def _lines_of(whole: _Change, old: str, new: str, work: Work) -> Iterator[Run]:
    was, now = old.splitlines(keepends=True), new.splitlines(keepends=True)
    head = _agree(was, now)
    tail = min(_agree(was[::-1], now[::-1]), min(len(was), len(now)) - head)
    offset = sum(map(len, was[:head]))
    if offset:
        yield offset
    end = sum(map(len, was[len(was) - tail :])) if tail else 0
    middle = old[offset : len(old) - end], new[offset : len(new) - end]
    if same_keys(*middle):
        yield whole.trimmed("keys", *middle, (offset, offset))
        yield min(map(len, middle)) // 2
    elif (shape := _shape_of(whole.now, middle)) is None:
        yield from _Lines(whole, middle, offset, work).runs()
    else:
        shapes = work.shapes
        if shape not in shapes:
            if len(shapes) >= SHAPES:
                shapes.clear()
            own = Work()  # what is kept depends on the shape alone, whatever this comparison may still take
            shapes[shape] = _named(whole, middle, offset, _Lines(whole, middle, offset, own).runs())
            work.left, work.taken = max(0, work.left - own.taken), work.taken + own.taken
        yield from _of_shape(whole, middle, offset, shapes[shape], work)
    if end:
        yield end


class _Shape(NamedTuple):
    """What is equal for lines of which the same values differ: one client's prompts differ alike again and again."""

    masks: str
    whats: tuple[str, ...]
    differ: tuple[int, ...]
    part: str
    role: str
    begins: str


class _Named(NamedTuple):
    """An edit of a shape: its atoms, and those that a client would move."""

    kind: str
    label: str
    atoms: Span
    move: Span


Shapes = dict[_Shape, tuple[_Named, ...] | None]
"""The edits of each shape; None if one begins or ends inside an atom."""


def _shape_of(part: Part, texts: tuple[str, str]) -> _Shape | None:
    """Return the shape of lines that differ in values and words alone, and are no other order of the same; None for
    others. Lines that differ in words are told from each other by all of their text.
    """
    if max(map(len, texts)) > LONG:
        return None
    was, now = map(atoms, texts)
    differ = tuple(
        [number for number, (before, other) in enumerate(zip(was, now, strict=False)) if before != other]
    )
    kinds = {was[number].what for number in differ}
    if len(was) != len(now) or any(was[number].what != now[number].what for number in differ):
        return None
    if not kinds <= {*VALUES, "word"}:
        return None
    if len(differ) > 1 and {was[number].text for number in differ} & {now[number].text for number in differ}:
        return None
    masks = masked(texts[1])
    if "word" in kinds:
        lines = zip(*(text.splitlines(keepends=True) for text in texts), strict=True)
        masks = "".join([mask if (mask := masked(new)) == masked(old) else old + new for old, new in lines])
    whats = tuple([atom.what for atom in now])
    return _Shape(masks, whats, differ, part.what, part.role, part.text[:SHAPE_BEGINS])


def _named(
    whole: _Change, texts: tuple[str, str], offset: int, runs: Iterator[Run]
) -> tuple[_Named, ...] | None:
    """Return the edits by their atoms; None if one begins or ends inside an atom."""
    places = []
    for side, text in enumerate(texts):
        ends = accumulate((len(atom.text) for atom in atoms(text)), initial=whole[side].start + offset)
        places.append({end: number for number, end in enumerate(ends)})
    names = []
    for run in runs:
        if isinstance(run, Edit):
            spans = [
                tuple(places[side].get(end, -1) for end in span)
                for side, span in ((0, run.old_span), (1, run.new_span), (0, run.old_move), (1, run.new_move))
            ]
            if spans[0] != spans[1] or spans[2] != spans[3] or min(map(min, spans)) < 0:
                return None
            names.append(_Named(run.kind, run.label, (spans[1][0], spans[1][1]), (spans[3][0], spans[3][1])))
    return tuple(names)


def _of_shape(
    whole: _Change, texts: tuple[str, str], offset: int, named: tuple[_Named, ...] | None, work: Work
) -> Iterator[Run]:
    if named is None:
        yield from _Lines(whole, texts, offset, work).runs()
        return
    ends = [list(accumulate((len(atom.text) for atom in atoms(text)), initial=offset)) for text in texts]
    done = offset
    for name in named:
        spans, moves = ([(some[span[0]], some[span[1]]) for some in ends] for span in (name.atoms, name.move))
        if spans[1][0] > done:
            yield spans[1][0] - done
        edit = whole.edit(name.kind, spans[0], spans[1], name.label)
        yield replace(edit, old_move=whole.in_prompt(moves[0], 0), new_move=whole.in_prompt(moves[1], 1))
        done = spans[1][1]
    if ends[1][-1] > done:
        yield ends[1][-1] - done


class _Lines:
    """Compares the lines of two texts, which begin `at` this position in their parts."""

    def __init__(self, whole: _Change, texts: tuple[str, str], offset: int, work: Work) -> None:
        self._whole, self._work = whole, work
        self._was, self._now = map(_cut, texts)
        self._starts = [list(accumulate(map(len, lines), initial=offset)) for lines in (self._was, self._now)]
        was, now = (Counter(filter(_tells, lines)) for lines in (self._was, self._now))
        self._gone, self._come = was - now, now - was

    def runs(self) -> Iterator[Run]:
        was, now = self._was, self._now
        if len(was) > 1 and not self._gone and not self._come and len(was) == len(now):
            yield self._edit(_order_of(*self._texts(0, len(was), 0, len(now))), 0, len(was), 0, len(now))
            return
        masks = [masked(line) for line in was], [masked(line) for line in now]
        blocks = _aligned(*masks, self._work)
        for number, (op, i1, i2, j1, j2) in enumerate(blocks):
            if self._work.edits >= MOST and number + 1 < len(blocks):
                last = blocks[-1]
                end = (last[1], last[3]) if last[0] == "equal" else (len(was), len(now))
                yield self._edit("other", i1, end[0], j1, end[1])
                yield from self._paired(last[1], last[2], last[3]) if last[0] == "equal" else ()
                return
            if op == "equal":
                yield from self._paired(i1, i2, j1)
            elif op == "replace":
                yield from self._replaced(i1, i2, j1, j2)
            else:
                yield self._apart(i1, i2, j1, j2)

    def _edit(self, kind: str, i1: int, i2: int, j1: int, j2: int) -> Edit:
        old, new = self._starts
        edit = self._whole.edit(kind, (old[i1], old[i2]), (new[j1], new[j2]))
        if kind not in LISTS:
            return edit
        moves = [
            self._whole.in_prompt((starts[0], starts[-1]), side) for side, starts in enumerate(self._starts)
        ]
        return replace(edit, old_move=moves[0], new_move=moves[1])

    def _texts(self, i1: int, i2: int, j1: int, j2: int) -> tuple[str, str]:
        return "".join(self._was[i1:i2]), "".join(self._now[j1:j2])

    def _apart(self, i1: int, i2: int, j1: int, j2: int) -> Edit:
        """Lines that only one prompt has, or that stand elsewhere in the other one."""
        old, new = self._texts(i1, i2, j1, j2)
        text = old or new
        lines, only = (self._was[i1:i2], self._gone) if old else (self._now[j1:j2], self._come)
        telling = list(filter(_tells, lines))
        moved = bool(telling) and all(line not in only for line in telling)
        if moved or are_examples(text) or are_documents(text):
            kind = _order_of(text)
        elif REMINDER.search(text):
            kind = "reminder"
        else:
            kind = "line_removed" if old else "line_added"
        return self._edit(kind, i1, i2, j1, j2)

    def _paired(self, i1: int, i2: int, j1: int) -> Iterator[Run]:
        was, now = self._was, self._now
        for i, j in zip(range(i1, i2), range(j1, j1 + i2 - i1), strict=True):
            last = i + 1 == len(was) or j + 1 == len(now)
            if self._work.edits >= MOST and was[i] != now[j]:
                same = _agree(was[i:i2][::-1], now[j : j1 + i2 - i1][::-1])
                yield self._edit("other", i, i2 - same, j, j1 + i2 - i1 - same)
                yield sum(map(len, was[i2 - same : i2]))
                return
            if last and len(was) != len(now) and was[i].rstrip("\n") == now[j].rstrip("\n"):
                yield len(now[j])  # a line after it was put in or left out, with the line end between them
            elif was[i] != now[j] and self._stands_elsewhere(i, j):
                around = self._whole.now.text[: self._starts[1][j + 1]].splitlines()[-CONTEXT:]
                yield self._edit(_order_of("\n".join(around)), i, i + 1, j, j + 1)
            else:
                yield from _line(
                    self._whole, was[i], now[j], (self._starts[0][i], self._starts[1][j]), self._work
                )

    def _stands_elsewhere(self, i: int, j: int) -> bool:
        """Whether these are two lines, of which one or both stand elsewhere in the other prompt."""
        old, new = self._was[i], self._now[j]
        moved = [_tells(line) and line not in only for line, only in ((old, self._gone), (new, self._come))]
        return all(moved) or (any(moved) and masked(old) != masked(new))

    def _replaced(self, i1: int, i2: int, j1: int, j2: int) -> Iterator[Run]:
        was, now = self._was, self._now
        moved = [
            [line for line in lines if _tells(line) and line not in only]
            for lines, only in ((was[i1:i2], self._gone), (now[j1:j2], self._come))
        ]
        old, new = self._texts(i1, i2, j1, j2)
        if moved[0] and sorted(moved[0]) == sorted(moved[1]) and 2 * sum(map(len, moved[0])) > len(old):
            yield self._edit(_order_of(old, new), i1, i2, j1, j2)
            return
        while i1 < i2 and j1 < j2 and i2 - i1 != j2 - j1 and _likeness(was[i1], now[j1], self._work) < 0.5:
            if i2 - i1 > j2 - j1:
                yield self._apart(i1, i1 + 1, j1, j1)
                i1 += 1
            else:
                yield self._apart(i1, i1, j1, j1 + 1)
                j1 += 1
        both = min(i2 - i1, j2 - j1)
        yield from self._paired(i1, i1 + both, j1)
        if i1 + both < i2:
            yield self._apart(i1 + both, i2, j1 + both, j1 + both)
        if j1 + both < j2:
            yield self._apart(i1 + both, i1 + both, j1 + both, j2)


def _tells(line: str) -> bool:
    """Whether a line tells which line it is."""
    return len(line) > 3


def _line(whole: _Change, old: str, new: str, offsets: Span, work: Work) -> Iterator[Run]:
    """Compare two lines."""
    if old == new:
        yield len(new)
        return
    ends = (offsets[0], offsets[0] + len(old)), (offsets[1], offsets[1] + len(new))
    listed = (
        _order_of(old, new) if are_examples(old, new) or (are_documents(old) and are_documents(new)) else ""
    )
    if work.edits >= MOST or not work.take(len(old) + len(new)):
        yield whole.edit("other", *ends)
        return
    if len(old) + len(new) > 80 and masked(old) != masked(new) and _likeness(old, new, work) < 0.3:
        yield whole.edit(listed or "other", *ends)
        return
    spans = list(_spans(old, new, work))
    if same_keys(old, new):
        yield whole.trimmed("keys", old, new, offsets)
        return
    if len(spans) > 1 and same_words(old, new):
        yield whole.trimmed(listed or "order", old, new, offsets)
        return
    done = 0
    for was, now in spans:
        if now[0] > done:
            yield now[0] - done
        label = new[: now[0]]
        whole_line = len(spans) == 1 and all(
            _LABELLED.fullmatch(line[: span[0]]) and _END_OF_LINE.fullmatch(line[span[1] :])
            for line, span in ((old, was), (new, now))
        )
        kind = kind_of(old[slice(*was)], new[slice(*now)], label, whole.now, (old, new))
        if listed and kind in ("other", "counter", "order"):
            kind = listed
        moved = [(start + span[0], start + span[1]) for start, span in zip(offsets, (was, now), strict=True)]
        edit = whole.edit(kind, moved[0], moved[1], masked(label)[-NEAR:])
        if whole_line:
            edit = replace(edit, old_move=whole.in_prompt(ends[0], 0), new_move=whole.in_prompt(ends[1], 1))
        yield edit
        done = now[1]
    if len(new) > done:
        yield len(new) - done


_LABELLED = re.compile(r"\W*[\w -]{0,40}[:=]?[\s\"']*")
_END_OF_LINE = re.compile(r"[\s\"'.;,]*")


def _spans(old: str, new: str, work: Work) -> Iterator[tuple[Span, Span]]:
    """Yield where two lines differ. Differences with only a blank or a mark or two between them are one."""
    was, now = atoms(old), atoms(new)
    starts = [list(accumulate((len(atom.text) for atom in some), initial=0)) for some in (was, now)]
    joined: list[list[int]] = []
    for op, *block in _aligned(was, now, work):
        if op == "equal":
            continue
        between_ = was[joined[-1][1] : block[0]] if joined else []
        if joined and len(between_) <= 2 and all(atom.what in ("space", "mark") for atom in between_):
            joined[-1][1], joined[-1][3] = block[1], block[3]
        else:
            joined.append(block)
    for i1, i2, j1, j2 in joined:
        yield (starts[0][i1], starts[0][i2]), (starts[1][j1], starts[1][j2])


_WORD = re.compile(r"\w+")


def _likeness(old: str, new: str, work: Work) -> float:
    """Return the share of words that two texts have in common."""
    if old == new:
        return 1.0
    if not work.take(len(old) + len(new)):
        return 0.0
    was, now = Counter(_WORD.findall(old)), Counter(_WORD.findall(new))
    return 2 * (was & now).total() / max(1, was.total() + now.total())
