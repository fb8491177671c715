"""A stand-in for vLLM's server: it renders bodies as bytes, keeps a prefix cache, and answers as the four APIs do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.servers.watch.played import running

BLOCK = 32


def ids_of(body: Mapping[str, Any]) -> list[int]:
    """The prompt's token ids: a byte a token of system, tools and messages."""
    parts = [
        body.get("system"),
        body.get("tools"),
        body.get("messages"),
        body.get("input"),
        body.get("prompt"),
    ]
    return list("\n".join(json.dumps(part) for part in parts if part is not None).encode())


@dataclass
class Vllm:
    """`render`: the ids of a body. `renders`: whether /render is there. `details`: whether usage has hits.

    `heads`: of the requests. `served_by`: what a router's header x-backend-id says, answer after answer; None: it has
    none.
    """

    render: Callable[[Mapping[str, Any]], list[int]] = ids_of
    renders: bool = True
    details: bool = True
    started: float = 1.0
    seen: list[list[int]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    served_by: list[str | None] = field(default_factory=list)
    rendered: int = 0
    queries: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hit(self, ids: list[int]) -> int:
        """Look a prompt up, and keep it: whole blocks, never the last token's."""
        best = 0
        for other in self.seen:
            same = next(
                (n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b),
                min(len(ids), len(other)),
            )
            best = max(best, same)
        self.seen.append(ids)
        self.queries += len(ids)
        return min(best, len(ids) - 1) // BLOCK * BLOCK

    def usage(self, path: str, ids: list[int]) -> dict[str, Any]:
        hit = self.hit(ids)
        if path == "/v1/messages":
            cached = {"cache_read_input_tokens": hit} if self.details else {}
            return {"input_tokens": len(ids) - hit * self.details, "output_tokens": 3, **cached}
        if path == "/v1/responses":
            return {
                "input_tokens": len(ids),
                "output_tokens": 3,
                "input_tokens_details": {"cached_tokens": hit},
            }
        details = {"prompt_tokens_details": {"cached_tokens": hit}} if self.details else {}
        return {"prompt_tokens": len(ids), "completion_tokens": 3, **details}


@contextmanager
def vllm(**options: Any) -> Iterator[Vllm]:
    state = Vllm(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: 40 ms a request

        def do_GET(self) -> None:
            label = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="100"}} 1.0\n'
            counts = f"vllm:num_requests_running 0.0\nvllm:prefix_cache_queries_total {state.queries}\n"
            text = f"{label}{counts}process_start_time_seconds {state.started}\n"
            self._send(200 if self.path == "/metrics" else 404, text.encode(), "text/plain")

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            try:
                body = json.loads(content)
            except ValueError:
                self._json(400, {"error": {"message": "no JSON"}})
                return
            if self.path.endswith("/render"):
                state.rendered += 1
                self._json(200 if state.renders else 403, {"token_ids": state.render(body)})
                return
            if self.path == "/tokenize":
                self._json(200, {"tokens": state.render(body)})
                return
            state.heads.append({name.lower(): value for name, value in self.headers.items()})
            usage = state.usage(self.path, state.render(body))
            name = state.served_by.pop(0) if state.served_by else None
            if not body.get("stream"):
                self._json(200, {"usage": usage}, name)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in ({"choices": []}, {"usage": usage}):
                text = f"data: {json.dumps(event)}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            self.wfile.write(b"0\r\n\r\n")

        def _json(self, status: int, value: object, name: str | None = None) -> None:
            self._send(status, json.dumps(value).encode(), "application/json", name)

        def _send(self, status: int, content: bytes, kind: str, name: str | None = None) -> None:
            self.send_response(status)
            if name is not None:
                self.send_header("x-backend-id", name)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with running(Handler) as state.port:
        yield state
