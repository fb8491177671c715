"""The trace that `kvtune serve --record` leaves: Mooncake JSONL, so that `trace:path=FILE` and other tools read it.

A line holds a request's arrival (ms), its lengths, and one salted hash for each started block of 512 tokens: equal only
where two prompts are equal up to that block's end. The salt is drawn at start and kept nowhere: no token can be guessed
from a hash. Lines are in the order of finishing (`sort=1` reads them). No vLLM here.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

BLOCK = 512
MOST_BYTES = 256 << 20


class PrefixHasher:
    """Chained, salted hashes of a prompt's blocks of 512 tokens, 61 bits each."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = os.urandom(32) if salt is None else salt

    def hash_ids(
        self, tokens: Sequence[int], block_hashes: Sequence[bytes] = (), hashed_tokens: int = 0
    ) -> list[int]:
        """One id for each started block; the id of an unfinished last block covers what it holds.

        Where an engine has hashed the prompt's blocks of `hashed_tokens` already, its chained hashes are hashed
        instead of the tokens: far less work, and what the engine keeps apart (adapters, images) is apart here.
        """
        if hashed_tokens and len(block_hashes) >= len(tokens) // hashed_tokens:
            return self._of_hashes(tokens, block_hashes, hashed_tokens)
        data = _bytes(tokens)
        step = BLOCK * 8
        digest = hashlib.blake2b(key=self._salt, digest_size=8)
        found = []
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            digest.update(piece)
            own = digest
            if len(piece) < step:  # an unfinished block is never the beginning of a finished one
                own = digest.copy()
                own.update(b"unfinished")
            found.append(_number(own.digest()))
        return found

    def _of_hashes(
        self, tokens: Sequence[int], block_hashes: Sequence[bytes], hashed_tokens: int
    ) -> list[int]:
        """The last hash before each end, and the tokens between the two: none where blocks end at 512, too."""
        whole = len(tokens) // BLOCK
        if BLOCK % hashed_tokens:
            told = [_last_hash(tokens, block_hashes, hashed_tokens, n * BLOCK) for n in range(1, whole + 1)]
        else:
            step = BLOCK // hashed_tokens
            told = list(block_hashes[step - 1 : whole * step : step])
        if whole * BLOCK < len(tokens):
            told.append(b"unfinished" + _last_hash(tokens, block_hashes, hashed_tokens, len(tokens)))
        key, hashed, number = self._salt, hashlib.blake2b, int.from_bytes
        return [number(hashed(one, key=key, digest_size=8).digest(), "little") >> 3 for one in told]


def _last_hash(tokens: Sequence[int], block_hashes: Sequence[bytes], hashed_tokens: int, end: int) -> bytes:
    """What stands for the prompt up to `end`."""
    full = end // hashed_tokens
    told = block_hashes[full - 1] if full else b""
    return told + _bytes(tokens[full * hashed_tokens : end]) if full * hashed_tokens < end else told


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> 3


class Line(msgspec.Struct):
    """A finished request: its arrival in ms, its tokens, and an id for each started block of its prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceWriter:
    """Appends whole lines to a new file, up to `most_bytes`; a full disk ends the recording, never the server."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._left = most_bytes - os.fstat(self._descriptor).st_size
        self._lines = msgspec.json.Encoder()
        self.written = 0
        self.dropped = 0
        self.why = ""

    def add(self, rows: Sequence[Line]) -> None:
        """Finished requests: in the file when this returns, so that a killed server keeps them."""
        whole, kept = self._lines.encode_lines(rows), len(rows)
        if self.why:
            whole, kept = b"", 0
        elif len(whole) > self._left:
            whole = whole[: max(0, self._left)].rpartition(b"\n")[0]
            whole += b"\n" if whole else b""
            kept, self.why = whole.count(b"\n"), "the trace has its full size"
        self._left -= len(whole)
        try:
            if whole and (done := os.write(self._descriptor, whole)) < len(whole):
                torn = whole[:done].rpartition(b"\n")[2]
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(torn))
                kept, self.why = whole[:done].count(b"\n"), "the disk is full"
        except OSError as error:
            kept, self.why = 0, f"the trace cannot be written: {error.strerror or error}"
        self.written += kept
        self.dropped += len(rows) - kept
