"""Asks a running server over HTTP, and changes nothing: GET, /tokenize and /detokenize only.

In: a URL as a user types it. A request that fails raises KvtuneError with one next step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtune.errors import KvtuneError, UsageError
from kvtune.masking import masked, remember_header
from kvtune.watch import metrics
from kvtune.watch.events import Source, sources
from kvtune.watch.metrics import Scrape
from kvtune.workload.conversation import as_chat, is_chat, template_flags

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "KVTUNE_API_KEY"
TIMEOUT_S = 5.0
NOT_VLLM = "another kind of server, or one that was started with --disable-log-stats"


def base_of(url: str) -> str:
    """Return the root URL: http://host:8000 for `host:8000`, `http://host:8000/v1` and `http://host:8000/metrics`."""
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UsageError(f"{masked(url)!r} is not the address of a server", "give it as http://HOST:PORT")
    path = parts.path.rstrip("/")
    for ending in ("/v1", "/metrics", "/health"):
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


@dataclass
class Server:
    """A client of one server. `headers` are sent with every request. `insecure`: certificates are not checked."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False

    def __post_init__(self) -> None:
        import httpx

        self.base = base_of(self.url)
        self._client: httpx.Client = httpx.Client(
            headers=dict(self.headers), verify=not self.insecure, timeout=TIMEOUT_S, follow_redirects=True
        )

    def close(self) -> None:
        self._client.close()

    def scrape(self) -> Scrape:
        text = self._get("/metrics").text
        try:
            scrape = metrics.read(text, time.time())
        except (ValueError, KeyError, IndexError):
            raise KvtuneError(f"{self.base}/metrics is not in Prometheus' format", NOT_VLLM) from None
        if not scrape.values:
            raise KvtuneError(f"{self.base}/metrics has no series of vLLM", f"it is {NOT_VLLM}")
        return scrape

    def version(self) -> str:
        return str(self._json("/version").get("version", ""))

    def longest(self) -> int:
        """Return the model's max_model_len in tokens; 0 if the server does not report it."""
        cards = self._json("/v1/models").get("data")
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        length = card.get("max_model_len")
        return length if isinstance(length, int) else 0

    def event_sources(self) -> dict[int, Source]:
        """Return the event sources by rank; empty if events are off, or if vLLM (before 0.32) cannot name them."""
        return sources(self._json("/kv_event_sources"))

    def tokenized(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a request's body, as the server renders it."""
        if is_chat(body):
            chat = as_chat(body)
            kept = ("messages", "tools", "chat_template", "continue_final_message")
            asked = {name: chat[name] for name in kept if chat.get(name)}
            asked["add_generation_prompt"] = chat.get("add_generation_prompt", True)
            asked["chat_template_kwargs"] = template_flags(chat)  # /tokenize has no fields for these
        else:
            asked = {name: body[name] for name in ("prompt", "add_special_tokens") if name in body}
        tokens = self._post("/tokenize", asked).get("tokens")
        if not isinstance(tokens, list):
            raise KvtuneError(
                f"{self.base}/tokenize gave no tokens", 'log token ids: "return_token_ids": true'
            )
        return tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; empty if the server has no tokenizer."""
        try:
            return str(self._post("/detokenize", {"tokens": list(tokens)}).get("prompt", ""))
        except KvtuneError:
            return ""

    def _json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; empty if the server cannot be reached, or answers anything else."""
        try:
            answer = self._client.get(self.base + path)
            value = answer.json() if answer.status_code == 200 else {}
        except (ValueError, OSError):
            return {}
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "httpx":
                raise
            return {}
        return value if isinstance(value, dict) else {}

    def _get(self, path: str) -> httpx.Response:
        return self._checked("GET", path, None)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._checked("POST", path, body)
        try:
            value = answer.json()
        except ValueError:
            raise KvtuneError(
                f"{self.base}{path} answers with something else than JSON",
                "check that the URL is a vLLM server's",
            ) from None
        return value if isinstance(value, dict) else {}

    def _checked(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        import httpx

        address = self.base + path
        try:
            answer = self._client.request(method, address, json=body)
        except httpx.TransportError as error:
            raise _unreachable(self.base, error) from None
        except httpx.HTTPError as error:
            raise KvtuneError(f"{address}: {error}", "check the address") from None
        if answer.status_code == 200:
            return answer
        raise _refused(address, answer.status_code, "Authorization" in self._client.headers)


def _unreachable(base: str, error: Exception) -> KvtuneError:
    why = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return KvtuneError(
            f"{base}: its certificate is not trusted here",
            "name its authority with SSL_CERT_FILE=FILE, or add --insecure",
        )
    if "WRONG_VERSION_NUMBER" in why or "RECORD_LAYER" in why:
        return KvtuneError(f"{base} does not speak TLS", f"try http://{base.partition('://')[2]}")
    if "Timeout" in type(error).__name__:
        return KvtuneError(
            f"{base} did not answer within {TIMEOUT_S:.0f} s",
            "check the address, or try again under less load",
        )
    if base.startswith("http://") and type(error).__name__ in ("RemoteProtocolError", "ReadError"):
        return KvtuneError(
            f"{base} closed the connection: {why}", f"if it wants TLS: https://{base.partition('://')[2]}"
        )
    if type(error).__name__ == "ProxyError" or _proxy(base):
        return KvtuneError(
            f"{base} cannot be reached: {why}",
            f"{_proxy(base) or 'a proxy variable'} is set: NO_PROXY={urlsplit(base).hostname} bypasses the proxy",
        )
    return KvtuneError(
        f"no server answers at {base}: {why}", "is it running? `vllm serve` listens on port 8000 by default"
    )


def _proxy(base: str) -> str:
    scheme = base.partition(":")[0]
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), "")


def _refused(address: str, status: int, has_key: bool) -> KvtuneError:
    if status in (401, 403) and has_key:
        return KvtuneError(
            f"{address} does not take this key ({status})",
            f"{KEY_VARIABLE} is the server's --api-key; a gateway may want its own",
        )
    if status in (401, 403):
        return KvtuneError(
            f"{address} wants a key ({status})", f"give it with {KEY_VARIABLE}=KEY, or --header 'NAME: VALUE'"
        )
    if status == 404:
        return KvtuneError(
            f"{address} is not there (404)", "give the server's own address: a gateway often hides /metrics"
        )
    return KvtuneError(f"{address} answers {status}", "look at the server's log")


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """Return HTTP headers from `NAME: VALUE` texts, and from the API key in the environment. Errors quote no value."""
    headers = {}
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        headers["Authorization"] = f"Bearer {_sendable(key, KEY_VARIABLE)}"
    for number, text in enumerate(texts, start=1):
        which = "--header" if len(texts) == 1 else f"--header number {number}"
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name.strip(), re.ASCII):
            raise UsageError(
                f"{which} is not NAME: VALUE", "for example --header 'Authorization: Bearer KEY'"
            )
        headers[name.strip()] = _sendable(value.strip(), which)
    for name, value in headers.items():
        remember_header(name, value)
    return headers


def _sendable(value: str, where: str) -> str:
    """Return the value if an HTTP header can hold it. UsageError names its place and not the value."""
    if wrong := next((at for at, letter in enumerate(value, 1) if not " " <= letter <= "~"), 0):
        raise UsageError(
            f"{where} has a character that no HTTP header can hold, at place {wrong}",
            "give letters, digits and punctuation of ASCII",
        )
    return value
