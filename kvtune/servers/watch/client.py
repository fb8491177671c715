"""Asks a server over HTTP, and believes nothing of what it says: the only client in kvtune for servers of others.

No redirect is followed: it could carry keys and prompts to another host. An answer has limits of bytes (unpacked), of
seconds from the first to the last byte, and of nesting. Whatever is wrong raises KvtuneError with one line, in which
the values of the headers are hidden.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvtune.base.bounded import decode_json_as, unpack
from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.base.masking import Secrets, without_password
from kvtune.data.show.terminal import one_line

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "KVTUNE_API_KEY"
HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
GET_S, POST_S = 5.0, 60.0
"""Most seconds of a question, from the connection to the last byte. /tokenize renders long chats."""
MOST_BYTES = 8 << 20
"""Largest answer. /metrics of one engine has 54 kB."""
MOST_TOKENS_BYTES = 64 << 20
"""Largest answer of /tokenize and /detokenize."""
VARIABLES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What httpx takes from the environment."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)
AT_ONCE = 8
"""Questions that are asked at once. Prometheus takes 20 of all who ask."""
JSON = TypeVar("JSON")
Taken = TypeVar("Taken")
Fields = Mapping[str, Any] | None
"""The fields of a JSON body; None: a question without one."""


def lookup(host: str, port: int) -> list[str]:
    """Return the addresses of a name, of one family: a machine may have one of each."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    rows = [sorted({str(row[4][0]) for row in answers if row[0] == family}) for family in FAMILIES]
    return next((row for row in rows if row), [])


def base_of(url: str) -> str:
    """Return the root URL: http://host:8000 for `host:8000`, `http://host:8000/v1` and `http://host:8000/metrics`."""
    text = url if "://" in url else f"http://{url}"
    wrong = UsageError(
        f"{one_line(without_password(url))!r} is not the address of a server", "give it as http://HOST:PORT"
    )
    if any(not letter.isprintable() or letter == " " for letter in text):
        raise wrong
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
        host.encode("idna")
    except ValueError:  # of a port, an IPv6 address, a label that is empty or too long
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise wrong
    path = parts.path.rstrip("/")
    for ending in ("/v1", "/metrics", "/health"):
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """Return HTTP headers from `NAME: VALUE` texts, and from the API key in the environment. Errors quote no value."""
    headers = {}
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        headers["Authorization"] = f"Bearer {_sendable(key, KEY_VARIABLE)}"
    for number, text in enumerate(texts, start=1):
        which = "--header" if len(texts) == 1 else f"--header number {number}"
        name, colon, value = text.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name.strip()):
            raise UsageError(
                f"{which} is not NAME: VALUE", "for example --header 'Authorization: Bearer KEY'"
            )
        headers[name.strip()] = _sendable(value.strip(), which)
    return headers


def _sendable(value: str, where: str) -> str:
    """Return the value if an HTTP header can hold it. UsageError names its place and not the value."""
    if wrong := next((place for place, letter in enumerate(value, 1) if not " " <= letter <= "~"), 0):
        raise UsageError(
            f"{where} has a character that no HTTP header can hold, at place {wrong}",
            "give letters, digits and punctuation of ASCII",
        )
    return value


class SilentError(KvtuneError):
    """No whole answer in time."""


class StatusError(KvtuneError):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status = status


@dataclass
class Client:
    """A client of one server. `headers` are sent with every request. `insecure`: certificates are not checked."""

    base: str
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    post_s: float = POST_S
    transport: httpx.AsyncBaseTransport | None = None
    """Instead of the network, for tests."""

    def __post_init__(self) -> None:
        import httpx

        self._secrets = Secrets.of_headers(self.headers)
        try:
            httpx.URL(self.base)
        except httpx.InvalidURL:
            raise UsageError(
                f"{without_password(self.base)} is not the address of a server", "give it as http://HOST:PORT"
            ) from None
        try:
            self._http = httpx.AsyncClient(
                headers={**self.headers, "Accept-Encoding": "identity"},
                verify=not self.insecure,
                timeout=None,
                follow_redirects=False,
                transport=self.transport,
            )
        except Exception as error:  # of the proxies' variables, or of the certificates' files
            names = [name for each in VARIABLES for name in (each, each.lower()) if os.environ.get(name)]
            raise UsageError(
                f"the settings for HTTP cannot be used: {self._hidden(reason(error))}",
                f"look at {', '.join(names) or 'the proxy and the certificates of this machine'}",
            ) from None
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        if not self._loop.is_closed():
            with contextlib.suppress(Exception):
                self._wait(self._http.aclose())
            self._loop.close()

    def ask(
        self, path: str, body: Fields = None, *, seconds: float | None = None, most: int | None = None
    ) -> bytes:
        """Return the answer if its status is 200: to a POST of the `body`, to a GET without.

        KvtuneError for any other, and for whatever else goes wrong.
        """
        seconds = seconds or (GET_S if body is None else self.post_s)
        most = most or (MOST_BYTES if body is None else MOST_TOKENS_BYTES)
        return bytes(self._wait(self._asked(path, body, seconds, most)))

    def ask_all(
        self, paths: Sequence[str], taken: Callable[[int, bytes], Taken], *, seconds: float, whole_s: float
    ) -> list[Taken | KvtuneError]:
        """Ask several questions, AT_ONCE at a time. Return what is `taken` of each answer, by its place, or its error.

        After `whole_s` seconds no further question is asked and no answer is taken.
        """
        end = time.monotonic() + whole_s

        async def one(place: int, path: str) -> Taken | KvtuneError:
            async with limit:
                try:
                    left = min(seconds, end - time.monotonic())
                    if left <= 0:
                        raise SilentError(f"not asked within {whole_s:.0f} s", "ask for fewer")
                    return taken(place, await self._asked(path, None, left, MOST_BYTES))
                except KvtuneError as error:
                    return KvtuneError(error.message, error.hint)  # the other's frames hold the answer

        async def all_of() -> list[Taken | KvtuneError]:
            return await asyncio.gather(*(one(place, path) for place, path in enumerate(paths)))

        limit = asyncio.Semaphore(AT_ONCE)
        return list(self._wait(all_of()))

    async def _asked(self, path: str, body: Fields, seconds: float, most: int) -> bytes:
        import httpx

        address = self.base + path
        try:
            status, target, content = await self._answer(address, body, seconds, most)
        except KvtuneError:
            raise
        except TimeoutError:
            raise SilentError(
                f"{self.base} did not answer within {seconds:.0f} s",
                "check the address, or try again under less load",
            ) from None
        except httpx.TransportError as error:
            raise KvtuneError(*self._unreachable(error)) from None
        except Exception as error:
            raise KvtuneError(f"{address}: {self._hidden(reason(error))}", "check the address") from None
        if status != 200:
            raise StatusError(status, *self._refused(address, status, target))
        return bytes(content)

    def json(self, path: str, kind: type[JSON], body: Fields = None, **limits: Any) -> JSON:
        """Return the JSON of the answer to a question (see `ask`) as `kind`."""
        return self.read(self.ask(path, body, **limits), path, kind)

    def read(self, answer: bytes, path: str, kind: type[JSON]) -> JSON:
        """Return the answer's JSON as `kind`. KvtuneError if it is something else."""
        try:
            return decode_json_as(answer, kind)
        except ValueError as error:
            what = "JSON of another kind" if isinstance(error, msgspec.ValidationError) else "no JSON"
            raise KvtuneError(
                f"{self.base}{path} answers with {what}", "check that the URL is a vLLM server's"
            ) from None

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end; Ctrl-C cancels it first, so that the next one finds a tidy connection."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    self._loop.run_until_complete(task)
            raise

    async def _answer(self, address: str, body: Fields, seconds: float, most: int) -> tuple[int, str, bytes]:
        method = "GET" if body is None else "POST"
        async with asyncio.timeout(seconds), self._http.stream(method, address, json=body) as answer:
            raw = bytearray()
            async for chunk in answer.aiter_raw():
                raw += chunk
                if len(raw) > most:
                    what = f"answers with more than {most >> 20} MiB"
                    raise KvtuneError(f"{address} {what}", "check that the URL is a vLLM server's")
            if answer.status_code != 200:
                return answer.status_code, answer.headers.get("Location", ""), b""
            try:  # a gateway may have compressed it, unasked
                return 200, "", unpack(bytes(raw), answer.headers.get("Content-Encoding", ""), most)
            except ValueError as error:
                raise KvtuneError(f"{address} answers with {error}", "ask the server itself") from None

    def _refused(self, address: str, status: int, target: str) -> tuple[str, str]:
        """Return what is wrong, and what to do."""
        if 300 <= status < 400:
            return (
                f"{address} sends kvtune on to {self._hidden(_without_more(target))} ({status}); kvtune follows no "
                "redirect, so that keys and prompts reach only the server that you named",
                "give that address if the server is yours",
            )
        if status in (401, 403) and "Authorization" in self.headers:
            return (
                f"{address} does not take this key ({status})",
                f"{KEY_VARIABLE} is the server's --api-key; a gateway may want its own, or hide the path from everyone",
            )
        if status == 403:
            return (
                f"{address} is forbidden (403)",
                "give the server's own address: a gateway often hides /metrics; or a key that may read it, with "
                f"{KEY_VARIABLE}=KEY or --header 'NAME: VALUE'",
            )
        if status == 401:
            return (
                f"{address} wants a key ({status})",
                f"give it with {KEY_VARIABLE}=KEY, or --header 'NAME: VALUE'",
            )
        if status == 404:
            return (
                f"{address} is not there (404)",
                "give the server's own address: a gateway often hides /metrics",
            )
        return (f"{address} answers {status}", "look at the server's log")

    def _hidden(self, text: str) -> str:
        return one_line(self._secrets.hide(text))

    def _unreachable(self, error: Exception) -> tuple[str, str]:
        base = self.base
        why = self._hidden(reason(error))
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return (
                f"{base}: its certificate is not trusted here",
                "name its authority with SSL_CERT_FILE=FILE, or add --insecure",
            )
        if "WRONG_VERSION_NUMBER" in why or "RECORD_LAYER" in why:
            return (f"{base} does not speak TLS", f"try http://{base.partition('://')[2]}")
        if base.startswith("http://") and type(error).__name__ in ("RemoteProtocolError", "ReadError"):
            return (
                f"{base} closed the connection: {why}",
                f"if it wants TLS: https://{base.partition('://')[2]}",
            )
        if type(error).__name__ == "ProxyError" or _proxy(base):
            return (
                f"{base} cannot be reached: {why}",
                f"{_proxy(base) or 'a proxy variable'} is set: NO_PROXY={urlsplit(base).hostname} bypasses the proxy",
            )
        return (
            f"no server answers at {base}: {why}",
            "is it running? `vllm serve` listens on port 8000 by default",
        )


def _without_more(target: str) -> str:
    """Return where a redirect leads, without user, password, query and fragment."""
    try:
        parts = urlsplit(target)
    except ValueError:
        return "an address that is none"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"[:200] if host else parts.path[:200] or "nowhere"


def _proxy(base: str) -> str:
    scheme = base.partition(":")[0]
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), "")
