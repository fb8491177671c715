"""Reads the commands in a shell's text without running any: their words, with variables, arrays and "$@" in place.

What only the shell knows stays as it is written, and `VARIABLE` finds it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kvtune.base.errors import UsageError

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
VARIABLE = re.compile(rf"\$(?:(?P<plain>{NAME}|[@*#?0-9])|\{{(?P<braced>[^{{}}$]*)\}})|\$\([^()]*\)")
ARRAY = re.compile(rf"\$\{{({NAME})\[[@*]\](?:[-+:][^}}]*)?\}}|\$([@*])")
ASSIGNED = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
OPERATORS = ";&|<>()\n"
BEGIN, END, WITHIN = (
    ("if", "case", "for", "while", "until"),
    ("fi", "esac", "done"),
    ("then", "else", "do", "!"),
)
DECLARE = ("export", "declare", "local", "readonly")
DEPTH = 8
"""How often a value is looked through for variables: defaults hold some, too."""
MOST_CHARS, MOST_WORDS = 1 << 14, 4096
"""The longest word and command, with their variables in place."""


def tokens(text: str) -> list[str]:
    """Return the words and operators of the text, without whole lines of comment. ValueError if a quote stays open."""
    text = re.sub(r"(?m)^\s*#.*$|\\\s*\Z|(?<=\s)[012](?=>)", "", re.sub(r"\\\r?\n", " ", text))
    placeholder = re.compile(r"(?<=\s)<([A-Za-z][\w. -]*)>(?=\s|\Z)")
    text = placeholder.sub(lambda match: "${" + re.sub(r"\W", "_", match[1]) + "}", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return list(lexer)


def commands(
    text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[list[str]]:
    """Yield each command's words. `arguments`: what "$@" stands for; ValueError: see `tokens`.

    What a condition assigns counts where nothing else has a value.
    """
    values, arrays = dict(environment or {}), {"@": list(arguments), "*": list(arguments)}
    words: list[str] = []
    depth = 0
    read = iter([*tokens(text), "\n"])
    for token in read:
        array = re.fullmatch(rf"({NAME})(\+?)=", words[-1]) if words else None
        if array and token.startswith("("):
            items = [] if ")" in token else _until_closed(read)
            if array[2] or not (depth and arrays.get(array[1])):
                arrays[array[1]] = [*(arrays.get(array[1], []) if array[2] else []), *items]
            words.pop()
        elif not token or token[0] not in OPERATORS + "#":
            words.append(token)
        else:
            if token[0] == "#":
                token = next((each for each in read if "\n" in each), "\n")
            depth += (words[:1] != [] and words[0] in BEGIN) - (words[:1] != [] and words[0] in END)
            while words and words[0] in WITHIN:
                words.pop(0)
            for name, value in _assignments(words, values).items():
                values[name] = values.get(name) or value if depth else value
            if words:
                command = list(islice(in_place(words, values, arrays), MOST_WORDS + 1))
                if len(command) > MOST_WORDS:
                    raise UsageError(f"a command has more than {MOST_WORDS:,} words", "give its line alone")
                yield command
            words = []
            if token[0] in "<>":
                next(read, "")


def _until_closed(read: Iterator[str]) -> list[str]:
    items: list[str] = []
    for token in read:
        if token.startswith(")"):
            break
        items += [token] if token.strip() else []
    return items


def _assignments(words: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """Return what a command assigns that is nothing but assignments."""
    matches = [ASSIGNED.fullmatch(word) for word in words[words[:1] != [] and words[0] in DECLARE :]]
    return {match[1]: expanded(match[3], values)[0] for match in matches if match} if all(matches) else {}


def expanded(text: str, values: Mapping[str, str]) -> tuple[str, bool]:
    """Return the text with its variables in place, by their defaults if need be, and whether all are known."""
    for _ in range(DEPTH):
        before = text
        length = len(text) + sum(len(_value(match, values)) for match in VARIABLE.finditer(text))
        if length > MOST_CHARS and VARIABLE.search(text):
            raise UsageError(
                f"a word has more than {MOST_CHARS:,} characters", "give the line with its values"
            )
        text = VARIABLE.sub(lambda match: _value(match, values), text)
        if text == before:
            break
    return text, VARIABLE.search(text) is None


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    parts = re.fullmatch(rf"({NAME})(:?[-+=?]|)(.*)", match["plain"] or match["braced"] or "", re.DOTALL)
    if parts is None:
        return match[0]
    name, operator, rest = parts.groups()
    given = values.get(name)
    if operator.endswith("+"):
        return rest if given else ""
    if given or (given is not None and not operator.startswith(":")):
        return given
    if operator[-1:] in ("-", "="):
        return rest
    return match[0] if given is None else ""


def in_place(
    words: Sequence[str], values: Mapping[str, str], arrays: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the words with variables and arrays in place. A word that is one variable becomes its value's words."""
    for word in words:
        array = ARRAY.fullmatch(word)
        if array and (name := array[1] or array[2]) in arrays:
            yield from in_place(arrays[name], values, {})
            continue
        text, whole = expanded(word, values)
        split = whole and VARIABLE.fullmatch(word) and not re.search(r"[{\[\"']", text)
        yield from text.split() if split else [text]
