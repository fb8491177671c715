"""Hides passwords and keys in command lines and texts before they are shown or stored: people share run files.

Hidden are the values that vLLM itself hides (`VLLM_HIDES`), values of flags and JSON fields whose name looks secret, in
URLs what stands before the host and after `?`, and every secret that this process was given (`in_use`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from kvtune.bounded import decode_json

HIDDEN = "***"
VLLM_HIDES = ("api-key", "hf-token", "watermark-config")
"""Flags that vLLM itself keeps out of its log. A test compares them with the installed vLLM."""
HEADER = "header"
"""The flag of `watch`, `record` and `explain` whose value may be a key; it takes one word, whatever that is."""
KEYS = (*VLLM_HIDES, HEADER)
TAKE_ONE = ("api-key", HEADER)
"""The word after one of these is its value, also if it begins as a flag does."""
VARIABLES = ("KVTUNE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables of the environment that hold a secret."""
SHORTEST = 4
"""Shorter values of VARIABLES are not looked for in texts: they occur in every text."""
LONG = 16
"""A header's value from this length on is taken for a secret, whatever its name."""

SECRET = (
    r"(?i:[\w.-]*(?:secret|passw|passphrase|pwd|credential|cookie|authorization|api[_-]?key|access[_-]?key"
    r"|private[_-]?key)[\w.-]*|(?:[\w.-]*[_.-])?(?:key|token|auth|sas))|[\w.-]*[a-z](?:Key|Token)"
)
"""A name that looks secret. `max_tokens` and `tokenizer` do not; of `eos_token`, a text that is no secret is hidden."""
DATABASES = ("postgresql", "postgres", "mysql", "mariadb", "oracle", "mssql", "sqlite")
"""URLs of these keep the user's name: kvtune shows where a study is."""
FLAG = re.compile(r"-[a-z]{1,3}|--[a-z][a-z0-9]*([-_.][a-z0-9]+)*(=.*)?", re.S)
URL = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*)://(.*)", re.S)
PAIR = re.compile(rf"(?<![\w.-])(['\"]?)({SECRET})\1(\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&'\"}}\])]+)")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\"]+")
REST = re.compile(r"(?i)\b(authorization|cookie)(['\"]?\s*[:=]\s*).+")
WORD = re.compile(r"[^\s'\"]+")
QUERY = re.compile(r"([?#]).+", re.S)
"""A URL's query or fragment."""
PLACE = re.compile(r"((?:\[[^\]]*\]|[^/:?#\s]*)(?::\d+)?(?:/[^?#]*)?)([?#].*)?", re.S)
"""Of a URL: host, port and path; then its query."""
PATH = re.compile(r"([\w:.-]+[=:])?(\.{0,2}/(?!/)|~)")

_given: set[str] = set()


def remember_header(name: str, value: str) -> None:
    """Keep a header's value that looks secret, so that no text of this process shows it."""
    if re.fullmatch(SECRET, name) or len(value) >= LONG:
        _given.update((value, value.rpartition(" ")[2]))


def in_use() -> list[str]:
    """Return the secrets that this process was given, the longest first."""
    known = {os.environ.get(name, "") for name in VARIABLES} | _given
    return sorted({text for each in known if len(text := each.strip()) >= SHORTEST}, key=len, reverse=True)


def without_known(text: str) -> str:
    """Return the text with each secret `in_use` hidden, also as Python and JSON quote it."""
    for secret in in_use():
        for form in {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}:
            text = text.replace(form, HIDDEN)
    return text


def without_password(url: str) -> str:
    """Return a database's URL without its password, and without any text that may be part of the password."""
    scheme, _, rest = url.partition("://")
    named, at, after = rest.rpartition("@")
    user, colon, _ = named.partition(":")
    place = PLACE.fullmatch(after)
    if place is None or re.search(r"[/?#@\s]", user):
        return f"{scheme}://{HIDDEN}"
    password = f":{HIDDEN}" if colon else ""
    return f"{scheme}://{user}{password}{at}{place[1]}" + (f"?{HIDDEN}" if place[2] else "")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the command line with its secrets hidden."""
    kept: list[str] = []
    hide = ""
    first = False
    for word in words:
        name, equals, value = word.partition("=")
        key = _key(name)
        if hide and ((first and hide in TAKE_ONE) or not FLAG.fullmatch(word)):
            kept.append(HIDDEN)
            hide, first = "" if hide == HEADER else hide, False
            continue
        if key and equals:
            kept.append(f"{name}={HIDDEN}")
        elif word.startswith("--") and equals:
            kept.append(f"{name}={masked(value)}")
        else:
            kept.append(word if FLAG.fullmatch(word) else masked(word))
        hide, first = "" if equals else key, True
    return [without_known(word) for word in kept]


def _key(name: str) -> str:
    """Return the secret flag that a word names, also cut short, as vLLM's parser allows; "" for another word."""
    if not name.startswith("--") or len(name) < 4:
        return ""
    plain = name[2:].replace("_", "-")
    short = next((key for key in KEYS if key.startswith(plain) and plain != "watermark"), "")
    return short or (plain if re.fullmatch(SECRET, plain) else "")


def masked(word: str) -> str:
    """Return a word with its secrets hidden: JSON fields, URLs with and without scheme, pairs of name and value."""
    if assigned := re.match(r"([\w.-]+=)(\s*[{\[].*)", word, re.S):
        return assigned[1] + masked(assigned[2])
    if word.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            hidden = _fields(given := decode_json(word))
            return word if hidden == given else json.dumps(hidden, separators=(",", ":"))
    if URL.search(word):
        word = URL.sub(_url, word)
    elif re.search("[@=]", word) or not re.search(r"\s", word.strip()):
        word = word if PATH.match(word.lstrip()) else _address(word)
    return masked_text(word)


def masked_text(text: str) -> str:
    """Return free text, such as an error or a line of a log, with its secrets hidden."""
    text = WORD.sub(_before_host, text)
    text = REST.sub(rf"\1\2{HIDDEN}", text)
    text = BEARER.sub(rf"\1 {HIDDEN}", text)
    text = PAIR.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{_quoted(m[4])}", text)
    return without_known(text)


def _before_host(match: re.Match[str]) -> str:
    """Hide the user and password of a URL in free text, with or without its scheme."""
    word = match[0]
    if "://" in word:
        return URL.sub(_url, word)
    user, at, host = word.rpartition("@")
    return f"{HIDDEN}@{host}" if at and ":" in user and host and not PATH.match(word) else word


def _quoted(value: str) -> str:
    quote = value[0] if value[0] in "'\"" else ""
    return f"{quote}{HIDDEN}{quote}"


def _url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    if scheme.lower().partition("+")[0] in DATABASES:
        user, at, host = rest.rpartition("@")
        if at and QUERY.search(user):
            return f"{scheme}://{HIDDEN}"
        return without_password(f"{scheme}://{user}{at}{host.partition('#')[0]}")
    return f"{scheme}://{_address(rest)}"


def _address(text: str) -> str:
    """Hide what stands before the host and after it. All of it if an @ after a ? leaves open which is which."""
    before, at, rest = text.rpartition("@")
    if at and QUERY.search(before):
        return HIDDEN
    return QUERY.sub(rf"\1{HIDDEN}", f"{HIDDEN if at else ''}{at}{rest}")


def _fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if re.fullmatch(SECRET, name) and value[name] is not None and not isinstance(value[name], bool)
            else _fields(value[name])
            for name in value
        }
    if isinstance(value, list):
        return [_fields(each) for each in value]
    return masked(value) if isinstance(value, str) else value
