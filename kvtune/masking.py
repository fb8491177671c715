"""Hides passwords and keys in command lines before they are shown or stored: people share run files."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
KEYS = ("api-key", "hf-token", "header")
"""Flags whose value may be a secret: those of `vllm serve`, and `--header` of `record` and `explain`."""


def without_password(url: str) -> str:
    """Return a database's URL without its password, and without any text that may be part of the password."""
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    try:
        read = make_url(url)
    except (ArgumentError, ValueError):
        return f"{url.partition('://')[0]}://{HIDDEN}"
    # If a password contains an @, make_url puts its second half in the host.
    host = read.host and read.host.rpartition("@")[2]
    shown = URL.create(
        read.drivername,
        username=read.username,
        password=None if read.password is None and host == read.host else HIDDEN,
        host=host,
        port=read.port,
        database=read.database,
    ).render_as_string(hide_password=True)
    return f"{shown}?{HIDDEN}" if read.query else shown


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the command line with the passwords of URLs and the values of `KEYS` hidden."""
    kept: list[str] = []
    hide = False
    for word in words:
        name, equals, value = word.partition("=")
        is_key = name.startswith("--") and name[2:].replace("_", "-") in KEYS
        if hide and not word.startswith("--"):
            kept.append(HIDDEN)
        elif is_key and equals:
            kept.append(f"{name}={HIDDEN}")
        elif word.startswith("--") and equals and "://" in value:
            kept.append(f"{name}={_masked(value)}")
        else:
            kept.append(_masked(word))
        hide = (is_key and not equals) or (hide and not word.startswith("--"))
    return kept


def _masked(word: str) -> str:
    return without_password(word) if re.match(r"[\w+.-]+://", word) else word
