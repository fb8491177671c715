"""A server that answers like vLLM and computes a toy: its logits depend on each block of the prompt, with noise.

Its cache is true to hits: whole blocks under a salt. `wrong` says which hits read a block of another text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

import numpy as np

BLOCK = 16
WORDS = 64
METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",enable_prefix_caching="True",kv_cache_size_tokens="8000"}} 1.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{{model_name="toy"}} 10.0
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum{{model_name="toy"}} 20.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="toy"}} 1000.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{model_name="toy"}} {queries}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{model_name="toy"}} {hits}
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{{model_name="toy"}} {asked}
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{{model_name="toy"}} {loaded}
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a fault may depend on: tokens that hit, that a tier loaded, of the prompt; how many hits came before."""

    cached: int
    loaded: int
    prompt: int
    number: int


@dataclass
class Toy:
    """`noise`: of each logit, in nats. `details`: whether answers say what was cached. `salted`: salts separate.

    `rare`: the share of answers whose noise is a hundred times as large, as where a token takes another expert.
    `lasts`: a hit that was wrong is so again, as what it computed is in the cache now.
    """

    noise: float = 0.0
    wrong: Callable[[Hit], bool] = lambda hit: False
    details: bool = True
    salted: bool = True
    seed: int = 1
    held: set[tuple[str, int]] = field(default_factory=set)
    tier: set[tuple[str, int]] | None = None
    """What a tier holds: all that was ever computed."""
    reads: bool = False
    """Whether it tokenizes text, a word a token."""
    empties: bool = True
    """Whether a reset empties all of the cache, and not a part of it."""
    loaded: int = 0
    queries: int = 0
    hits: int = 0
    times_hit: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    rare: float = 0.0
    lasts: bool = True
    spoiled: set[str] = field(default_factory=set)
    longest: int = 2000
    """Tokens that a request may have: no prompt of several chunks, which cost a test most of its time."""

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        salt = body["cache_salt"] if self.salted else ""
        told = [self.read(ids, salt, body["max_tokens"]) for ids in body["prompt"]]
        details = {"cached_tokens": sum(cached for cached, *_ in told)} if self.details else None
        choices = [
            {
                "text": "",
                "index": index,
                "logprobs": {"tokens": [f"token_id:{token}" for token in tokens], "top_logprobs": tops},
            }
            for index, (_, tokens, tops) in enumerate(told)
        ]
        return {"choices": choices, "usage": {"prompt_tokens_details": details}}

    def read(self, ids: list[int], salt: str, count: int) -> tuple[int, list[int], list[dict[str, float]]]:
        names = _names(ids, salt)
        most = (len(ids) - 1) // BLOCK
        local = next((n for n, name in enumerate(names[:most]) if name not in self.held), most)
        tier = self.tier or self.held
        known = next((n for n, name in enumerate(names[:most]) if n >= local and name not in tier), most)
        cached, loaded = BLOCK * known, BLOCK * (known - local)
        self.queries, self.hits = self.queries + len(ids), self.hits + BLOCK * local
        self.loaded += loaded
        read = list(ids)
        if cached:
            self.times_hit += 1
            if salt in self.spoiled or self.wrong(Hit(cached, loaded, len(ids), self.times_hit)):
                self.spoiled |= {salt} if self.lasts else set()
                start = cached // (2 * BLOCK) * BLOCK
                read[start : start + BLOCK] = [word + 1 for word in reversed(read[start : start + BLOCK])]
        tokens, tops = self.answer(read, count)
        self.held |= (stored := set(_names([*ids, *tokens[:-1]], salt)))
        if self.tier is not None:
            self.tier |= stored
        return cached, tokens, tops

    def answer(self, ids: Sequence[int], count: int) -> tuple[list[int], list[dict[str, float]]]:
        blocks = [_vector(_hash(ids[start : start + BLOCK])) for start in range(0, len(ids), BLOCK)]
        whole = np.sum(blocks, axis=0) / np.sqrt(len(blocks))
        tokens: list[int] = []
        tops = []
        noise = self.noise * (100 if self.draw.random() < self.rare else 1)
        for _ in range(count):
            logits = 2 * whole + 2 * _vector(_hash([*ids[-3:], *tokens]))
            logits = logits + noise * self.draw.standard_normal(WORDS)
            logprobs = logits - np.log(np.exp(logits).sum())
            first = np.argsort(-logprobs)[:5]
            tokens.append(int(first[0]))
            tops.append({f"token_id:{word}": float(logprobs[word]) for word in first})
        return tokens, tops


def _names(ids: Sequence[int], salt: str) -> list[tuple[str, int]]:
    return [(salt, _hash(ids[: end + BLOCK])) for end in range(0, len(ids) - BLOCK + 1, BLOCK)]


def _hash(ids: Sequence[int]) -> int:
    return crc32(np.asarray(ids, np.int64).tobytes())


@lru_cache(1 << 14)
def _vector(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(WORDS)


@contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """Serve the toy, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16

        def do_GET(self) -> None:
            card = {"data": [{"id": "toy", "max_model_len": toy.longest}]}
            known = {"/v1/models": card, "/version": {"version": "0.32.0"}}
            if self.path == "/metrics":
                asked = 0 if toy.tier is None else 1 + toy.queries
                counts = {"queries": toy.queries, "hits": toy.hits, "asked": asked, "loaded": toy.loaded}
                text = METRICS.format(block=BLOCK, **counts)
                self.reply(200, text.encode())
            else:
                self.reply(200 if self.path in known else 404, json.dumps(known.get(self.path)).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and toy.reads:
                tokens = [crc32(word.encode()) % 4000 for word in body["prompt"].split()]
                self.reply(200, json.dumps({"tokens": tokens}).encode())
                return
            if self.path != "/v1/completions":
                resets = self.path == "/reset_prefix_cache" and toy.tier is not None
                if resets:
                    toy.held = {name for name in toy.held if not toy.empties and name[1] % 2}
                self.reply(200 if resets else 404, b"{}")
                return
            with toy.lock:
                toy.bodies.append(body)
                try:
                    status, answer = 200, toy.complete(body)
                except ValueError:
                    status, answer = 400, {}
            self.reply(status, json.dumps(answer).encode())

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
