"""Hides passwords and keys in what is shown or stored: people share run files, pages and screens.

Hidden are shapes of keys (SHAPES), what vLLM itself hides (VLLM_HIDES), and keys that this call was given (Secrets).
A text is searched as a value, before it becomes JSON or HTML. Numbers, booleans, null and names of fields stay.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from kvtune.base.bounded import decode_json

HIDDEN = "***"
VLLM_HIDES = ("api-key", "hf-token", "watermark-config")
"""Flags that vLLM itself keeps out of its log. A test compares them with the installed vLLM."""
HEADER = "header"
"""The flag of `watch`, `record` and `tap` whose value may be a key; it takes one word, whatever that is."""
KEYS = (*VLLM_HIDES, HEADER)
TAKE_ONE = ("api-key", HEADER)
"""The word after one of these is its value, also if it begins as a flag does."""
VARIABLES = ("KVTUNE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables of the environment that hold a secret."""
SHORTEST = 8
"""Shorter values are not searched for: they occur in every text."""
ORDINARY = (
    *("accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "host"),
    *("origin", "referer", "traceparent", "tracestate", "user-agent", "x-request-id", "x-session-id"),
)
"""Headers whose value is no secret."""
NAME = (
    r"(?>(?i:[\w.-]*(?:secret|passw|passphrase|credential|(?:api|access|private|account)[_-]?key)[\w.-]*+"
    r"|[\w.-]*(?:hf|hub|access|auth|refresh|bearer|api|security|session[_-]|id[_-])[_-]?token(?![\w.-]))"
    r"|[\w.-]*(?:pwd|PGPASS)(?![\w.-])|[A-Z][A-Z0-9]*_(?:[A-Z0-9]+_)*(?:TOKEN|KEY|AUTH|PASSWORD)(?![\w.-]))"
)
"""A name whose value is a secret, wherever it stands."""
FIELD = r"(?>(?i:(?:[\w.-]*[_.-])?(?:key|token|auth|sas|sig|authorization|cookie))|[\w.-]*[a-z](?:Key|Token))(?![\w.-])"
"""A name whose text is a secret in a setting of vLLM. Elsewhere, figures of kvtune have such names, too."""
OF_TEXT = r"(?i:(?:[\w.-]*[_.-])?(?:eos|bos|pad|unk|sep|cls|mask|image|audio|video|first|last)[_-]?token)"
"""Fields of a model's tokens."""
IS = r"\\{0,4}['\"]?\s*+[:=]\s*+"
END = r"\\?(?:\Z|(?=\n))"
QUOTED = (
    rf"\"(?:[^\"\\\n]|\\[^\n])*+(?:\"|{END})|'(?:[^'\\\n]|\\[^\n])*+(?:'|{END})"
    rf"|\\{{1,4}}[\"'](?:(?!\\{{1,4}}[\"'])[^\n])*+(?:\\{{1,4}}[\"']|{END})"
)
"""A text in quotes, which may be escaped, and may be cut off."""
LIST = r"\[[^\[\]\n]*+\]"
WORD = r"[^\s,;&'\"}\])]++"
SAID = (
    r"(?!(?:[A-Z_]*KEY|TOKEN|VALUE|NAME|FILE|to|is|a|an|the|of|or|and|for|from|in|not|no|was|with|"
    r"has|as|if|that|by|on|at|set|only|wrong|missing|required|invalid|incorrect|empty|too|needed|given|it|its|this|your|"
    r"auth|authentication|tokens?|keys?|header|scheme)(?=[\s.,:;!?)'\"`]|\Z)|\.\.)"
)
"""Not a word of a sentence, nor one that stands for a value."""
DATABASE = r"(?i:(?:postgres(?:ql)?|mysql|mariadb|oracle|mssql|sqlite)(?:\+\w+)?://)"
"""URLs of these keep the user's name: kvtune shows where a study is."""
SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*+://"
URL = r"[^\s'\"<>]*"
SHAPES = tuple(
    (words.split(), pattern)
    for words, pattern in (
        # a URL's text before its host and after it; all of it if an @ leaves open which is which
        (
            "://",
            rf"(?<![\w+.-])(?:{SCHEME}([^\s'\"<>?#]*+[?#]{URL}@{URL}|[^\s'\"<>:/]*+/[^\s'\"<>:]*+:{URL}@{URL})"
            rf"|{DATABASE}(?:[^\s'\"<>:/]*:({URL})@)?|{SCHEME}(?:({URL})@)?)[^\s'\"<>?#]*+(?:[?#]([^\s'\"<>]+))?",
        ),
        ("@", r"(?<![\w@/.:=,-])([A-Za-z][\w.+-]*+:[^\s:@/,='\"]++)@(?=[\w\[])"),
        # keys that say by their first letters what they are
        ("private", r"-----BEGIN [A-Z ]*PRIVATE KEY-----((?s:.*?))(?:-----END|\Z)"),
        (
            "sk- gh glpat- xox nvapi- akia asia aiza hf_ eyj",
            r"(?<![\w-])(sk-[\w-]{8,}|(?:gh[opsur]_|github_pat_|glpat-|xox[a-z]-|nvapi-)[\w-]{8,}|A[KS]IA[A-Z0-9]{8,}"
            r"|AIza[\w-]{30,}|hf_(?=[a-zA-Z]*\d)[a-zA-Z0-9]{8,}|hf_[a-zA-Z]{16,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)+)",
        ),
        # headers
        (
            "authorization cookie",
            rf"(?i)(?<![\w-])(?:proxy-)?(?:authorization|(?:set-)?cookie){IS}(?:(?:bearer|basic|token)\s++)?+{SAID}"
            rf"({QUOTED}|[^\n]+)",
        ),
        ("bearer", rf"(?i)(?<![\w-])bearer\s++{SAID}({QUOTED}|{WORD})"),
        ("basic", rf"(?<![\w-])[Bb]asic\s++({QUOTED}|(?=\S*[\d=+/]|\S*[a-z][A-Z])[\w+/=-]{{8,}})"),
        # a name and its value
        (
            "secret pass cred key token pwd auth sas",
            rf"(?<![\w.-])(?=[\w.-]++{IS})(?:{NAME}{IS}{SAID}({QUOTED}|{LIST}|(?<=: )[^\n,;&'\"}}\])]++|{WORD})"
            rf"|(?i:key|token|auth){IS}({QUOTED}|\[(?=['\"])[^\[\]\n]*+\])"
            rf"|{FIELD}{IS}((?=[\w+/~-]*\d)(?=[\w+/~-]*[A-Za-z])[\w+/~-]{{12,}}+={{0,2}})(?![\w.]))",
        ),
        (
            "sig= signature= ?",
            r"(?i)(?<![\w-])(?:sig|x-\w+-signature|(?<=[?&])[\w.-]*(?:key|token|auth|sas))=([^\s&'\"]+)",
        ),
        (
            "-- _",
            rf"(?<![\w.-])(?:--|(?=[A-Z][A-Z0-9]*_[A-Z0-9_]+(?![\w.-]))){NAME}[ \t]++{SAID}"
            rf"({QUOTED}|[\w+/][^\s,;'\"]*)",
        ),
        (
            "pass key secret",
            r"(?i)(?<![\w-])(?:password|passphrase|passwd|api[ _-]?key|secret(?: key)?|(?:access|api|hf) token)"
            rf"(?:\s+(?:is|was)\s++|(?: provided)?{IS}){SAID}({QUOTED}|[^\s,;'\"]+)",
        ),
    )
)
"""What a key looks like, wherever it stands: words, one of which is in the text; a pattern, whose groups are hidden."""
NO_ADDRESS = (
    rf"(?s)\A\s*(?!(?:[\w.-]+=)?(?:\.{{0,2}}/(?!/)|~|{SCHEME})|(?:trace|requests):\w+=|\S*\s+\S)(?:[\w.-]+=)?"
)
ADDRESSES = tuple(
    ([word], NO_ADDRESS + pattern)
    for word, pattern in (("?", r"([^?]*\?.*@.*)"), ("@", r"([^?]*:[^?]*)@"), ("?", r"[^?]*\?(.*=.*)"))
)
"""The same of a word that is an address without its scheme, and no path of a file or a load."""
QUOTE = re.compile(r"(?:\\*['\"])?")
FLAG = re.compile(r"-[a-z]{1,3}|--[a-z][a-z0-9]*([-_.][a-z0-9]+)*(=.*)?", re.S)

Hide = Callable[[str], str]


class Secrets:
    """What one call was given as keys. They are found in a text as whole words, also as Python and JSON quote them."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        long = {text for value in values if len(text := value.strip()) >= SHORTEST}
        self.values = sorted(long, key=len, reverse=True)
        forms = [form for text in self.values for form in (text, repr(text)[1:-1], json.dumps(text)[1:-1])]
        words = "|".join(re.escape(form) for form in dict.fromkeys(forms))
        self._words = re.compile(rf"(?<!\w)(?<!\w[.-])(?:{words})(?!\w)(?![.-]\w)") if words else None

    @classmethod
    def given(cls, words: Sequence[str], environment: Mapping[str, str]) -> Secrets:
        """Return those of a command line and of VARIABLES."""
        values = [environment.get(name, "") for name in VARIABLES]

        def hide(text: str) -> str:
            parts = (part.partition("=")[2] for part in re.split("[?&;#]", text))
            values.extend((text, text.partition(":")[2], *parts))
            return HIDDEN

        _without(words, hide)
        return cls(values)

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> Secrets:
        return cls(text for name, value in headers.items() for text in _of_header(name, value))

    def hide(self, text: str) -> str:
        return self._words.sub(HIDDEN, text) if self._words else text


NONE = Secrets()
_call: ContextVar[Secrets | None] = ContextVar("secrets", default=None)


@contextlib.contextmanager
def holding(secrets: Secrets) -> Iterator[None]:
    """Hide these secrets, too, in what the `with` block shows and stores."""
    token = _call.set(secrets)
    try:
        yield
    finally:
        _call.reset(token)


def held() -> Secrets:
    """Return the secrets of this call."""
    return _call.get() or NONE


def masked_text(text: str) -> str:
    """Return a text, such as an error or a line of a log, with its secrets hidden."""
    return held().hide(_text(text, _hide))


def masked_value(value: Any, fields: bool = False) -> Any:
    """Return what will be JSON with the secrets in its texts hidden. `fields`: also by names, which others gave."""
    return _values(value, masked_text, _hide if fields else None)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets hidden."""
    return [held().hide(word) for word in _without(words, _hide)]


def without_password(url: str) -> str:
    """Return a URL, with or without its scheme, without what stands before its host and after `?` or `#`."""
    return _word(url, _hide)


def _hide(text: str) -> str:
    return HIDDEN


def _text(text: str, hide: Hide, shapes: Sequence[tuple[list[str], str]] = SHAPES) -> str:
    def shown(match: re.Match[str]) -> str:
        parts, end = [], match.start()
        for number in range(1, len(match.groups()) + 1):
            if match[number]:
                quote = QUOTE.match(match[number])[0]  # type: ignore[index]
                parts += [
                    text[end : match.start(number)],
                    quote,
                    hide(match[number].strip(quote or None)),
                    quote,
                ]
                end = match.end(number)
        return "".join((*parts, text[end : match.end()]))

    low = text.lower()
    for words, shape in shapes:
        if any(word in low for word in words):
            text = re.sub(shape, shown, text)  # compiled when the first text asks for it
    return text


def _without(words: Sequence[str], hide: Hide) -> list[str]:
    kept: list[str] = []
    key, first = "", False
    for word in words:
        name, equals, value = word.partition("=")
        if key and ((first and key in TAKE_ONE) or not FLAG.fullmatch(word)):
            kept.append(_of_key(key, word, hide))
            key, first = "" if key == HEADER else key, False
            continue
        key, first = _key(name), True
        if equals and word.startswith("--"):
            kept.append(f"{name}={_of_key(key, value, hide) if key else _word(value, hide)}")
            key = ""
        else:
            kept.append(word if FLAG.fullmatch(word) else _word(word, hide))
    return kept


def _key(name: str) -> str:
    """Return the secret flag that a word names, also cut short, as vLLM's parser allows; "" for another word."""
    if not name.startswith("--") or len(name) < 4:
        return ""
    plain = name[2:].replace("_", "-")
    short = next((key for key in KEYS if key.startswith(plain) and plain != "watermark"), "")
    return short or (plain if _is_key(plain) else "")


def _of_key(key: str, value: str, hide: Hide) -> str:
    name, _, text = value.partition(":")
    for secret in _of_header(name.strip(), text.strip()) if key == HEADER else (value,):
        hide(secret)
    return HIDDEN


def _of_header(name: str, value: str) -> tuple[str, ...]:
    """Return the secrets of a header: its value, and what follows `Bearer` or `Basic`."""
    scheme, _, key = value.partition(" ")
    if name.lower() in ORDINARY:
        return ()
    return (value, key) if scheme.lower() in ("bearer", "basic") else (value,)


def _word(word: str, hide: Hide) -> str:
    """Hide the secrets of a word of a command line: JSON fields, URLs with and without scheme, and shapes."""
    name, equals, value = word.partition("=")
    if equals and value.lstrip()[:1] in ("{", "[") and re.fullmatch(r"[\w.-]+", name):
        return f"{name}={_word(value, hide)}"
    if word.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            given = decode_json(word)
            shown = _values(given, lambda text: _word(text, hide), hide)
            return word if shown == given else json.dumps(shown, separators=(",", ":"))
    return _text(word, hide, (*ADDRESSES, *SHAPES))


def _values(value: Any, text: Hide, hide: Hide | None = None, key: bool = False) -> Any:
    """Return the value with its texts as `text` gives them. `hide`: does it to fields whose name is a FIELD's."""
    if isinstance(value, str):
        return hide(value) if key and hide else text(value)
    if isinstance(value, Mapping):
        return {
            name: _values(value[name], text, hide, key or (hide is not None and _is_key(name)))
            for name in value
        }
    return [_values(inner, text, hide, key) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_key(name: str) -> bool:
    return re.fullmatch(f"{NAME}|{FIELD}", name) is not None and re.fullmatch(OF_TEXT, name) is None
