"""Reads the commands in a shell's text without running any: their words, with variables, arrays and "$@" in place.

What only the shell knows stays as it is written, and `VARIABLE` finds it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile

from kvtune.base.errors import UsageError

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
VARIABLE = re.compile(rf"\$(?:(?P<plain>{NAME}|[@*#?0-9])|\{{(?P<braced>[^{{}}$]*)\}})|\$\([^()]*\)")
ARRAY = re.compile(rf"\$\{{({NAME})\[[@*]\](?:[-+:][^}}]*)?\}}|\$([@*])")
ASSIGNED = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
OPERATORS = ";&|<>()\n"
BEGIN, END = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
LEADING = ("then", "else", "do", "!", "export", "declare", "local", "readonly")
"""Words that may stand before a command or an assignment, with their options."""
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


def commands(text: str, arguments: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield each command's words. `arguments`: what "$@" stands for; ValueError: see `tokens`.

    What a condition assigns counts where nothing else has a value.
    """
    values, arrays = dict[str, str](), {"@": list(arguments), "*": list(arguments)}
    words: list[str] = []
    depth = 0
    read = iter([*tokens(text), "\n"])
    for token in read:
        array = re.fullmatch(rf"({NAME})(\+?)=", words[-1]) if words else None
        if array and token.startswith("("):
            inside = () if ")" in token else takewhile(lambda each: not each.startswith(")"), read)
            items = in_place([each for each in inside if each.strip()], values, arrays)
            held = arrays.get(array[1], [])
            arrays[array[1]] = [*held, *items] if array[2] else (held if depth else []) or items
            words.pop()
        elif re.fullmatch("&?[<>]+&?", token):
            next(read, "")
        elif not token or token[0] not in OPERATORS + "#":
            words.append(token)
        else:
            if token[0] == "#":
                token = next((each for each in read if "\n" in each), "\n")
            depth += (words[:1] != [] and words[0] in BEGIN) - (words[:1] != [] and words[0] in END)
            words = list(dropwhile(lambda word: word in LEADING or word.startswith("-"), words))
            assigned = [ASSIGNED.fullmatch(word) for word in words]
            for name, more, value in (match.groups() for match in assigned if match and all(assigned)):
                before = values.get(name, "")
                value = expanded(before + value if more else value, values)
                values[name] = before or value if depth and not more else value
            if words:
                yield in_place(words, values, arrays)
            words = []


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Return the text with its variables in place, by their defaults if need be."""
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
    return text


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


def in_place(words: Sequence[str], values: Mapping[str, str], arrays: Mapping[str, list[str]]) -> list[str]:
    """Return the words with variables and arrays in place. A word that is one variable becomes its value's words."""
    placed: list[str] = []
    for word in words:
        array = ARRAY.fullmatch(word)
        text = expanded(word, values)
        if array and (array[1] or array[2]) in arrays:
            placed += arrays[array[1] or array[2]]
        elif VARIABLE.fullmatch(word) and not re.search(r"[{\[\"'$]", text):
            placed += text.split()
        else:
            placed.append(text)
        if len(placed) > MOST_WORDS:
            raise UsageError(f"a command has more than {MOST_WORDS:,} words", "give its line alone")
    return placed
