"""A mended log on the real engine: each request hits what the replay said, with text that went through a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.data.run.file import read_run
from tests.lab.engine.real import kvtune, profiled
from tests.requests.text.logs import reasoning_stripped, time_in_header, write
from tests.tokenizers import make_tokenizer

FLAGS = ("--block-size", "32", "--num-gpu-blocks-override", "1200", "--max-model-len", "4096")


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("make", [time_in_header, reasoning_stripped], ids=lambda make: str(make.__name__))
def test_a_mended_log_hits_what_its_replay_said(model: str, make: object, tmp_path: Path) -> None:
    pattern = make()  # type: ignore[operator]
    tokenizer = make_tokenizer(tmp_path / "tokenizer", pattern.template)
    log = write(pattern, tmp_path / "log.jsonl")
    mended, run = tmp_path / "mended.jsonl", tmp_path / "log.kvrun"
    words = (f"{log},concurrency=1", "--model", model, "--tokenizer", str(tokenizer))
    done = kvtune(
        *("explain-log", *words, "--mended", str(mended), "-o", str(run), "--tries", "1", "--", *FLAGS),
        output=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    texts = read_run(run).header.extra.texts
    assert texts is not None
    assert texts.mended_hit_tokens > texts.hit_tokens
    # The engine renders the log's text by the same tokenizer, and gets the mended log as token ids.
    before = profiled(
        tmp_path, model, "-w", f"requests:path={log},tokenizer={tokenizer},concurrency=1", engine=FLAGS
    ).run.table("requests")
    after = profiled(tmp_path, model, "-w", f"requests:path={mended},concurrency=1", engine=FLAGS).run.table(
        "requests"
    )
    assert int(before["hit_tokens"].sum()) == texts.hit_tokens
    assert int(after["hit_tokens"].sum()) == texts.mended_hit_tokens
    assert int(after["prompt_tokens"].sum()) == texts.mended_query_tokens
