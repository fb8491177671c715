"""Hides keys in what is shown or stored (`***`): people share run files, pages and screens. Three kinds are hidden:

what this call was given (Secrets); what begins as known keys do (BEGINS); what stands where a key stands: after a name
that ends in key, token, secret or password (_value), before a URL's host and after its `?` (_address).
Texts are searched before they become JSON or HTML. JSON's own syntax, figures and names of fields stay.
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
VARIABLES = ("KVTUNE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHORTEST = 8
"""Shorter values are not searched for: they occur in every text."""
ORDINARY = re.compile(
    "(?i:accept(-encoding|-language)?|cache-control|connection|content-type|host|origin|referer|trace(parent|state)"
    "|user-agent|x-(request|session)-id)"
)
"""Headers whose value is no secret."""
SENTENCE = r"(?:[a-z]{1,3}|token|wrong|missing|invalid|required)(?=[.,:;!?)'\"`]*(?:\s|\Z))"
"""How a sentence about a key goes on."""
NO_KEY = r"(?:[A-Z_]*KEY|TOKEN|VALUE|NAME|FILE)(?=[\s.,:;!?)'\"`]|\Z)|\.\."
"""What a text writes in place of a key."""
BEGINS = {
    "-----begin": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<key>(?s:.+?))(?=-----END|\Z)",
    "sk- ghp_ gho_ ghs_ ghu_ ghr_ github_pat_ glpat- xox nvapi- akia asia aiza hf_ eyj": r"(?<![\w-])(?P<key>"
    r"sk-[\w-]{8,}|(?:gh[opsur]_|github_pat_|glpat-|xox[a-z]-|nvapi-)[\w-]{8,}|A[KS]IA[A-Z0-9]{8,}|AIza[\w-]{30,}"
    r"|hf_(?=[a-zA-Z]*\d|[a-zA-Z]{16})[a-zA-Z0-9]{8,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)+)",
    "bearer": rf"(?<![\w-])(?i:bearer)\s++(?!{NO_KEY}|{SENTENCE})\\*['\"]?+"
    r"(?P<key>(?<=\")[^\"\n\\]++|(?<=')[^'\n\\]++|[^\s'\"\\]++)",
    "basic": r"(?<![\w-])[Bb]asic\s++\\*['\"]?+"
    r"(?P<key>(?=\S*[\d=+/]|\S*[a-z][A-Z])[\w+/=-]{8,}|(?<=['\"])[^'\"\n\\]++)",
    "@": r"(?<![\w@/.:=,+-])(?P<key>[A-Za-z][\w.+-]*+:[^\s:@/,='\"]++)(?=@[\w\[])",  # USER:PASSWORD@HOST
}
"""What keys begin with, after the small letters of which a text with such a key has some: few texts are searched."""
KEYS = [(letters.split(), re.compile(pattern)) for letters, pattern in BEGINS.items()]
SURE = re.compile(
    "(?i:secret|passw|passphrase|credential|(api|access|private|account)key|(authorization|cookie|sig|signature)$"
    "|(hf|hub|access|auth|refresh|bearer|api|security|session|id)token$)|pwd$|PGPASS$"
)
"""A name that has one of these, without - and _, says that its value is a key, whatever that is."""
VARIABLE = re.compile("[A-Z][A-Z0-9]*_[A-Z0-9_]*")
MAYBE = re.compile(r"(?i:(.*[_.-])?(key|token|auth|sas))|.*[a-z](Key|Token)")
"""Figures have such names, too: the value is a key if it is in quotes or looks drawn, or if the name is a VARIABLE."""
NAMES = ("key", "token", "secret", "pass", "cred", "pwd", "auth", "sas", "sig", "cookie")
"""What a key's name has."""
OF_TEXT = re.compile(r"(?i)(.*[_.-])?(eos|bos|pad|unk|sep|cls|mask|image|audio|video|first|last)[_-]?token")
"""Names of a model's tokens."""
NAMED = re.compile(
    r"(?<![\w.-])((?:(?i:api|access|private|auth|hf|secret) (?i:(?=key|token)))?"
    rf"(?=[\w.-]*(?i:{'|'.join(NAMES)}))[\w.-]++)"
    r"(\\{0,4}['\"])?(?:(?: provided)?(\s*+[:=]\s*+)|(\s++(?:is|was)\s++)|[ \t]++)"
)
"""A name, the quote that ends it, and what leads to its value: a sign, a verb, or a blank."""
ENDS = r"\"(?!\s*+(?:[,:}\]]|\Z))"
"""A quote that ends no text of JSON."""
HTTP = r"(?:(?i:bearer|basic|token)\s++)?+"
QUOTED = re.compile(
    rf"(?P<quote>(?P<inner>\\{{1,4}}|(?='))?[\"'])(?P<key>(?:(?!(?P=quote))(?(inner)(?=[^\"]|{ENDS}))\\?[^\n])*+)"
)
LISTED = re.compile(r"\[[\[\s]*\\*['\"]")
NESTED = re.compile(r"(\\{0,4}[\"'])(?:(?!\1)\\?[^\n])*+(?:\1)?|[\[\]{}]")
"""What tells where a list or an object ends."""
MOST_NESTED = 1 << 10
LINE = re.compile(rf"{HTTP}(?P<key>(?:\\.|=\"[^\"\n]*+\"|[^\n\"\\]|{ENDS})++)")
WORD = re.compile(rf"{HTTP}(?P<key>(?:[^\s'\"\\]|\\(?![\"']))++)")
FIELD = re.compile(r"(?P<key>[^\s,'\"}\]\\]++)")
JSON = re.compile(r"(?:-?\d[\d.eE+-]*|true|false|null|None|True|False)(?=[\s,}\]]|\Z)|[\[{]")
DRAWN = re.compile(r"(?P<key>(?=[\w+/~-]*\d)(?=[\w+/~-]*[A-Za-z])[\w+/~-]{12,}+={0,2})(?![\w.])")
SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*+://"
URL = re.compile(rf"(?<![\w+.-])({SCHEME})([^\s'\"<>]*)")
DATABASE = re.compile(r"(?i)(?:postgres(?:ql)?|mysql|mariadb|oracle|mssql|sqlite)(?:\+\w+)?://")
"""URLs of these keep the user's name: kvtune shows where a study is."""
ADDRESS = re.compile(
    rf"(?s)(\s*(?!(?:[\w.-]+=)?(?:\.{{0,2}}/(?!/)|~|{SCHEME})|(?:trace|requests):\w+=|\S*\s+\S)(?:[\w.-]+=)?)(.*)"
)
"""A word that may be an address without its scheme: no path of a file, and no load."""
FLAG = re.compile(r"-[a-z]{1,3}|--[a-z][a-z0-9]*([-_.][a-z0-9]+)*(=.*)?", re.S)

Hide = Callable[[str], str]


class Secrets:
    """What one call was given as keys. They are found in a text as whole words, also as Python and JSON quote them."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        long = {text for text in map(str.strip, values) if len(text) >= SHORTEST}
        self.values = sorted(long, key=len, reverse=True)
        forms = [form for text in self.values for form in (text, repr(text)[1:-1], json.dumps(text)[1:-1])]
        words = "|".join(re.escape(form) for form in dict.fromkeys(forms))
        self._words = re.compile(rf"(?<!\w)(?<!\w[.-])(?:{words})(?!\w)(?![.-]\w)") if words else None

    @classmethod
    def given(cls, words: Sequence[str], environment: Mapping[str, str]) -> Secrets:
        """Return those of a command line and of VARIABLES."""
        keys = [environment.get(name, "") for name in VARIABLES]

        def hide(text: str) -> str:
            parts = (part.partition("=")[2] for part in re.split("[?&;#]", text))
            name, _, value = text.partition(":")
            header = _of_header(name if value[:1] == " " else "", value.strip())
            keys.extend((text, *header, *parts))
            return HIDDEN

        list(_line(words, hide))
        return cls(keys)

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> Secrets:
        return cls(text for name, value in headers.items() for text in _of_header(name, value))

    def hide(self, text: str) -> str:
        return self._words.sub(HIDDEN, text) if self._words else text


NONE = Secrets()
_call: ContextVar[Secrets] = ContextVar("secrets", default=NONE)


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
    return _call.get()


def masked_text(text: str) -> str:
    """Return a text, such as an error or a line of a log, with its secrets hidden."""
    return held().hide(_text(text, _hide))


def masked_value(value: Any, fields: bool = False) -> Any:
    """Return what will be JSON with the secrets in its texts hidden. `fields`: also by names, which others gave."""
    return _values(value, masked_text, _hide if fields else None)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets hidden."""
    return [held().hide(word) for word in _line(words, _hide)]


def without_password(url: str) -> str:
    """Return a URL, with or without its scheme, without what stands before its host and after `?` or `#`."""
    return _word(url, _hide)


def _hide(text: str) -> str:
    return HIDDEN


def _text(text: str, hide: Hide) -> str:
    plain = text.casefold()
    if "://" in plain:
        text = URL.sub(lambda url: _address(url[1], url[2], hide), text)
    for letters, pattern in KEYS:
        if any(map(plain.__contains__, letters)):
            text = pattern.sub(lambda key: key[0].removesuffix(key["key"]) + hide(key["key"]), text)
    if not any(map(plain.__contains__, NAMES)):
        return text
    shown, copied, start = list[str](), 0, 0
    while match := NAMED.search(text, start):
        if value := _value(text, match):
            begin, end, quote = value
            shown += [text[copied:begin], quote, hide(text[begin:end].strip("\\'\" ")), quote]
            copied = start = end
        else:
            start = match.start() + (match[1].find(" ") + 1 or len(match[1]))
    return "".join((*shown, text[copied:]))


def _value(text: str, match: re.Match[str]) -> tuple[int, int, str] | None:
    """Return what is hidden after a name: from where to where, and the quotes that it gets."""
    (name, quote, sign, verb), begin = match.groups(""), match.end()
    parameter = text.endswith(("?", "&"), 0, match.start()) and re.search("(?i:key|token|auth|sas)$", name)
    sure = bool(parameter) or _is_key(name, sure=True)
    leads = sign or name.startswith("--") or (sure and (verb or VARIABLE.fullmatch(name)))
    stays = re.compile(rf"{HTTP}(?:{NO_KEY})" if sign else rf"{NO_KEY}|{SENTENCE}").match(text, begin)
    if stays or not leads or not (sure or _is_key(name)):
        return None
    inner = None if sign else NAMED.match(text, begin)
    if inner and inner[3] and _value(text, inner):  # `--secret key="..."`: what follows `key=`
        return None
    if value := QUOTED.match(text, begin):
        return *value.span("key"), ""
    if LISTED.match(text, begin) or (sure and text.startswith(("[", "{"), begin)):
        return begin, _end(text, begin), quote
    pattern = LINE if ":" in sign else WORD
    if quote:
        pattern = FIELD
        if JSON.match(text, begin):
            return None
    if sign and not sure:
        pattern = DRAWN
    value = pattern.match(text, begin)
    return value and (*value.span("key"), quote)


def _end(text: str, begin: int) -> int:
    """Return where the list or object that begins there ends; the line's end if it is cut off, or long."""
    depth = 0
    for part in NESTED.finditer(text, begin, begin + MOST_NESTED):
        depth += (part[0] in "[{") - (part[0] in "]}")
        if depth == 0:
            return part.end()
    line = text.find("\n", begin)
    return len(text) if line < 0 else line


def _is_key(name: str, *, sure: bool = False) -> bool:
    """Whether a name is a key's; `sure`: and never a figure's."""
    name = name.lstrip("-")
    maybe = MAYBE.fullmatch(name) is not None and OF_TEXT.fullmatch(name) is None
    return bool(SURE.search(re.sub("[-_ ]", "", name)) or (maybe and (not sure or VARIABLE.fullmatch(name))))


def _address(scheme: str, rest: str, hide: Hide) -> str:
    head, sign, query = re.match(r"(?s)([^?#]*)([?#]?)(.*)", rest).groups()  # type: ignore[union-attr]
    if "@" in query:  # does the user's part go on, or is it the query's?
        return f"{scheme}{hide(rest)}"
    user, _, host = head.rpartition("@")
    name, colon, password = user.partition(":") if DATABASE.fullmatch(scheme) else ("", "", user)
    host = f"{name}{colon}{password and hide(password)}@{host}" if "@" in head else host
    return f"{scheme}{host}{sign}{query and hide(query)}"


def _line(words: Sequence[str], hide: Hide) -> Iterator[str]:
    """Yield the words of a command line. After a secret's flag all are hidden to the next flag, after --header one."""
    key, first = "", False
    for word in words:
        name, equals, value = word.partition("=")
        # After --api-key and --header comes a value, also if it begins as a flag does.
        if key and ((first and key in ("api-key", "header")) or not FLAG.fullmatch(word)):
            yield hide(word)
            key, first = "" if key == "header" else key, False
            continue
        key, first = _key(name), True
        if equals and word.startswith("--"):
            yield f"{name}={hide(value) if key else _word(value, hide)}"
            key = ""
        else:
            yield word if FLAG.fullmatch(word) else _word(word, hide)


def _key(name: str) -> str:
    """Return the secret flag that a word names, also cut short, as vLLM's parser allows; "" for another word."""
    plain = name[2:].replace("_", "-") if name.startswith("--") and len(name) > 3 else ""
    if plain not in ("", "watermark"):
        plain = next((key for key in (*VLLM_HIDES, "header") if key.startswith(plain)), plain)
    return plain if plain in (*VLLM_HIDES, "header") or _is_key(plain) else ""


def _of_header(name: str, value: str) -> tuple[str, ...]:
    """Return the secrets of a header: its value, and what follows `Bearer` or `Basic`."""
    scheme, _, key = value.partition(" ")
    if ORDINARY.fullmatch(name):
        return ()
    return (value, key) if scheme.lower() in ("bearer", "basic") else (value,)


def _word(word: str, hide: Hide) -> str:
    """Hide the secrets of a word of a command line, also in JSON that stands alone or after `NAME=`."""
    name, given = re.match(r"(?s)([\w.-]+=)?(.*)", word).groups("")  # type: ignore[union-attr]
    if given.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = decode_json(given)
            shown = _values(value, lambda text: _word(text, hide), hide)
            return word if shown == value else f"{name}{json.dumps(shown, separators=(',', ':'))}"
    if match := ADDRESS.fullmatch(word):
        head, _, query = match[2].partition("?")
        if ":" in head.rpartition("@")[0] or "=" in query or "@" in query:
            word = f"{match[1]}{_address('', match[2], hide)}"
    return _text(word, hide)


def _values(value: Any, text: Hide, hide: Hide | None = None, key: bool = False) -> Any:
    """Return the value with its texts as `text` gives them. `hide`: does it to fields whose name is a key's."""
    if isinstance(value, str):
        return hide(value) if key and hide else text(value)
    if isinstance(value, Mapping):
        under = {name: key or (hide is not None and _is_key(name)) for name in value}
        return {name: _values(inner, text, hide, under[name]) for name, inner in value.items()}
    return [_values(inner, text, hide, key) for inner in value] if isinstance(value, (list, tuple)) else value
