"""Writes the trace of `kvtune serve --record`: Mooncake JSONL, read by `trace:path=FILE`.

A line has a request's arrival (ms), its lengths in tokens, and a salted hash for each started block of 512 tokens. Two
hashes are equal only if the prompts are equal up to the block's end. The salt is random and never stored, so no token
can be guessed from a hash. Lines are in the order in which requests finish; `by` tells a reader so. Imports no vLLM.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtune.base.files import lines_descriptor, write_lines

BLOCK = 512
MOST_BYTES = 256 << 20
START = b'{"timestamp":'


class PrefixHasher:
    """Chained, salted hashes of a prompt's blocks of 512 tokens, 61 bits each."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = os.urandom(32) if salt is None else salt

    def hash_ids(
        self, tokens: Sequence[int], block_hashes: Sequence[bytes] = (), hashed_tokens: int = 0
    ) -> list[int]:
        """Return an id for each started block; the id of an unfinished last block differs from any full block's.

        `block_hashes`: the engine's chained hashes of blocks of `hashed_tokens`. If given, they are hashed instead of
        the tokens: far less work, and prompts that the engine separates (adapters, images) get separate ids.
        """
        if hashed_tokens and len(block_hashes) >= len(tokens) // hashed_tokens:
            return self._of_hashes(tokens, block_hashes, hashed_tokens)
        data = _bytes(tokens)
        step = BLOCK * 8
        digest = hashlib.blake2b(key=self._salt, digest_size=8)
        ids = []
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            digest.update(piece)
            block = digest
            if len(piece) < step:  # an unfinished block must not match a full one
                block = digest.copy()
                block.update(b"unfinished")
            ids.append(_number(block.digest()))
        return ids

    def _of_hashes(
        self, tokens: Sequence[int], block_hashes: Sequence[bytes], hashed_tokens: int
    ) -> list[int]:
        """Return an id for each block: a hash of the engine's last hash up to its end, and of any tokens after that."""
        whole = len(tokens) // BLOCK
        if BLOCK % hashed_tokens:
            blocks = [_last_hash(tokens, block_hashes, hashed_tokens, n * BLOCK) for n in range(1, whole + 1)]
        else:
            step = BLOCK // hashed_tokens
            blocks = list(block_hashes[step - 1 : whole * step : step])
        if whole * BLOCK < len(tokens):
            blocks.append(b"unfinished" + _last_hash(tokens, block_hashes, hashed_tokens, len(tokens)))
        key, hashed, number = self._salt, hashlib.blake2b, int.from_bytes
        return [number(hashed(block, key=key, digest_size=8).digest(), "little") >> 3 for block in blocks]


def _last_hash(tokens: Sequence[int], block_hashes: Sequence[bytes], hashed_tokens: int, end: int) -> bytes:
    """Return bytes that identify the prompt up to `end`: the engine's last hash, and the tokens after its block."""
    full = end // hashed_tokens
    before = block_hashes[full - 1] if full else b""
    return before + _bytes(tokens[full * hashed_tokens : end]) if full * hashed_tokens < end else before


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> 3


class Line(msgspec.Struct):
    """A finished request: its arrival in ms, its tokens, an id for each started block of its prompt, and its writer."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    by: str = "kvtune"


class TraceWriter:
    """Appends complete lines to a new file or a recording, up to `most_bytes`. FileExistsError for any other file.

    Only this user can read the file. The line that a crash cut off is removed. A full disk ends the recording, not the
    server.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        try:
            self._descriptor = lines_descriptor(path, START)
        except FileExistsError:
            raise FileExistsError(f"{path} exists, and is no recording") from None
        self._left = most_bytes - os.fstat(self._descriptor).st_size
        self._lines = msgspec.json.Encoder()
        self.written = 0
        self.dropped = 0
        self.why = ""

    def add(self, rows: Sequence[Line]) -> None:
        """Write finished requests. They are in the file when this returns, even if the server is killed right after."""
        whole, kept = self._lines.encode_lines(rows), len(rows)
        if self.why:
            whole, kept = b"", 0
        elif len(whole) > self._left:
            whole = whole[: max(0, self._left)].rpartition(b"\n")[0]
            whole += b"\n" if whole else b""
            kept, self.why = whole.count(b"\n"), "the trace has reached its size limit"
        self._left -= len(whole)
        try:
            if (done := write_lines(self._descriptor, whole)) < len(whole):
                kept, self.why = whole[:done].count(b"\n"), "the disk is full"
        except OSError as error:
            kept, self.why = 0, f"the trace cannot be written: {error.strerror or error}"
        self.written += kept
        self.dropped += len(rows) - kept
