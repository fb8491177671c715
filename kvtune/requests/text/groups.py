"""Groups changes by kind, place and label, each group with an example. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtune.requests.text.changes import Change
from kvtune.requests.text.divergence import Divergence

MOST = 64
"""Most groups by place and label. Of more, the smallest of a kind are one group."""
FORMS = ("whitespace", "unicode", "reasoning", "reminder", "tool_call_rewritten")
"""Kinds that are mended for the whole prompt at once, wherever they are."""
LABEL = 24
"""Characters of a label that tell groups apart."""

Changed = tuple[Divergence, tuple[Change, ...]]
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that differ from an earlier one in one kind of text, at one place, after one label.

    `example`: the two prompts nearest in time, and where they differ. `after`: tokens of all requests, after the
    change, that the earlier prompt has, too. `requests`: positions in the log. `before`: the groups that are mended
    first, as they stand before this one in most of its requests.
    """

    key: Key
    requests: tuple[int, ...]
    after: int
    example: tuple[Divergence, Change]
    before: frozenset[Key] = frozenset()

    @property
    def kind(self) -> str:
        return self.key[0]

    @property
    def at(self) -> int:
        """The first token of the example that differs."""
        return self.example[1].at


@dataclass(frozen=True, slots=True)
class Grouped:
    """All groups, those with the largest `after` first. `keys`: of each request's changes, the group of each."""

    groups: tuple[Group, ...]
    keys: Mapping[int, Sequence[Key]]

    def chosen(self, groups: Iterable[Group]) -> dict[int, set[int]]:
        """Return which changes of each request are in these groups, by position."""
        wanted = {group.key for group in groups}
        numbers = {
            request: {number for number, key in enumerate(keys) if key in wanted}
            for request, keys in self.keys.items()
        }
        return {request: ats for request, ats in numbers.items() if ats}

    def up_to(self, group: Group) -> tuple[Group, ...]:
        """Return the group and all groups before it."""
        return tuple(other for other in self.groups if other.key == group.key or other.key in group.before)


def grouped(changed: Sequence[Changed]) -> Grouped:
    tokens: Counter[Key] = Counter()
    for _, changes in changed:
        for change in changes:
            tokens[_key(change)] += change.after
    largest = {key for key, _ in tokens.most_common(MOST)}
    keys = {
        divergence.request: tuple(
            key if (key := _key(change)) in largest else (key[0], "", "") for change in changes
        )
        for divergence, changes in changed
    }
    members: dict[Key, list[tuple[Divergence, Change]]] = {}
    before: Counter[tuple[Key, Key]] = Counter()
    for divergence, changes in changed:
        first: dict[Key, Change] = {}
        for key, change in zip(keys[divergence.request], changes, strict=True):
            if key not in first:
                before.update((key, other) for other in first)
                first[key] = change
        for key, change in first.items():
            members.setdefault(key, []).append((divergence, change))
    groups = [
        Group(
            key,
            tuple(divergence.request for divergence, _ in group_members),
            sum(change.after for _, change in group_members),
            min(group_members, key=lambda member: (member[0].request - member[0].like, member[1].at)),
            frozenset(other for other in members if 2 * before[key, other] > len(group_members)),
        )
        for key, group_members in members.items()
    ]
    return Grouped(tuple(sorted(groups, key=lambda group: (-group.after, group.at))), keys)


def _key(change: Change) -> Key:
    kind = change.edit.kind
    label = "" if change.orders or kind in FORMS else change.edit.label[-LABEL:]
    return kind, place_of(change), label


def place_of(change: Change) -> str:
    """Return where a change is: the part of the prompt, or whose turn it is, of which there may be many."""
    place, role = change.edit.place, change.edit.role
    if place.startswith("messages[") and role in ("user", "assistant", "tool"):
        return f"a message of the {role}"
    return "a tool" if place.startswith("tool ") else place
