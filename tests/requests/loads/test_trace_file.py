from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.loads import trace_rows
from kvtune.requests.loads.spec import build
from kvtune.requests.loads.tokens import block_hashes
from kvtune.requests.types import Span

LINES: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 10000, "input_length": 600, "output_length": 7, "hash_ids": [9, 10]},
]
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    return write(tmp_path, LINES)


def write(folder: Path, lines: list[dict[str, Any]] | str) -> Path:
    path = folder / "trace,1.jsonl"  # a comma in the name must not end the value
    path.write_text(lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines))
    return path


def fails(path: Path, *names: str, keys: str = "") -> None:
    with pytest.raises(UsageError) as caught:
        build(f"trace:path={path}{keys}")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    for name in (str(path), *names):
        assert name in caught.value.message


def test_mooncake_hashes_are_streams(mooncake: Path) -> None:
    work = build(f"trace:path={mooncake}")
    assert [r.prompt_tokens for r in work.requests] == [1100, 512, 1536, 600]
    assert [r.output_tokens for r in work.requests] == [5, 1, 7, 7]
    assert [r.arrival_s for r in work.requests] == [0.0, 0.0, 3.0, 10.0]
    assert work.requests[0].prompt == (Span(0, 0, 512), Span(1, 0, 512), Span(2, 0, 76))
    first, third = (block_hashes(work.requests[i].prompt, 16) for i in (0, 2))
    assert len(first) == 68
    assert third[:68] == first
    assert work.concurrency is None


def test_limit_speed_and_window(mooncake: Path) -> None:
    def arrivals(keys: str) -> list[float | None]:
        return [r.arrival_s for r in build(f"trace:path={mooncake},{keys}").requests]

    assert arrivals("limit=2") == [0.0, 0.0]
    assert arrivals("speed=2") == [0.0, 0.0, 1.5, 5.0]
    assert arrivals("from=1") == [2.0, 9.0]
    assert arrivals("from=1,to=10") == [2.0]
    assert arrivals("to=3") == [0.0, 0.0]
    assert arrivals("concurrency=2") == [None] * 4
    fails(mooncake, "no request between from= and to=", keys=",from=4,to=5")


def test_the_rest_of_a_limited_trace_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(LINES[0]) + "\n" + json.dumps(LINES[2]) + "\nbroken\n")
    assert len(build(f"trace:path={path},limit=2").requests) == 2
    assert len(build(f"trace:path={path},to=1").requests) == 1
    fails(path, "line 3")


def test_equal_requests_have_equal_hashes(mooncake: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy.jsonl"
    other.write_text("\n" + mooncake.read_text().replace(": 3000", ": 3000.0") + "\n\n")
    assert build(f"trace:path={mooncake}").hash == build(f"trace:path={other}").hash
    assert build(f"trace:path={mooncake}").hash != build(f"trace:path={mooncake},speed=2").hash


def test_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    assert build(f"trace:path={write(tmp_path, LINES)}").note == ""
    extra = LINES[0] | {"session_id": 7, "\x1b[2J": 1}
    work = build(f"trace:path={write(tmp_path, [extra, *LINES[1:]])}")
    assert work.note == r"not read of its lines: '\x1b[2J', 'session_id'"
    many = LINES[0] | {f"x{number}": 0 for number in range(9)}
    work = build(f"trace:path={write(tmp_path, [many, *LINES[1:]])}")
    assert work.note.endswith("'x4' and 4 more")


def test_order_is_checked_or_restored_by_sort(tmp_path: Path) -> None:
    path = write(tmp_path, [LINES[2], LINES[0]])
    fails(path, "line 2", "earlier")
    work = build(f"trace:path={path},sort=1")
    assert [r.id for r in work.requests] == ["line-2", "line-1"]
    assert [r.arrival_s for r in work.requests] == [0.0, 3.0]


def test_files_that_are_not_traces_are_named(tmp_path: Path) -> None:
    fails(write(tmp_path, ""), "is empty")
    fails(write(tmp_path, "\n  \n"), "is empty")
    fails(write(tmp_path, "a,b,c\n1,2,3\n"), "line 1", "neither")


def test_burstgpt(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        BURST
        + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n"
        + "46.5,GPT-4,7,230,237,API log\n",
    )
    work = build(f"trace:path={path}")
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in work.requests] == [
        (0.0, 472, 18),
        (41.5, 7, 230),
    ]
    assert work.requests[0].prompt[0].stream != work.requests[1].prompt[0].stream
    fails(write(tmp_path, BURST + "5,ChatGPT,x,18,490,API log\n"), "line 2", "Request tokens 'x'")
    fails(write(tmp_path, BURST + "5,ChatGPT,4,-18,490,API log\n"), "line 2", "Response tokens is negative")
    fails(write(tmp_path, BURST + "5,ChatGPT,0,18,490,API log\n"), "line 2", "Request tokens is 0")
    fails(write(tmp_path, BURST + "now,ChatGPT,4,18,490,API log\n"), "line 2", "timestamp 'now'")
    fails(write(tmp_path, BURST + "5,ChatGPT,4\n"), "line 2", "3 cells")
    fails(write(tmp_path, BURST), "is empty")
    fails(write(tmp_path, AZURE), "no column 'Timestamp'", keys=",format=burstgpt")


def test_azure(tmp_path: Path) -> None:
    path = write(
        tmp_path, AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    work = build(f"trace:path={path}")
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in work.requests] == [
        (0.0, 374, 44),
        (pytest.approx(4.314579), 396, 109),
    ]
    zoned = write(
        tmp_path, AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,5,6\n"
    )
    assert build(f"trace:path={zoned}").requests[1].arrival_s == pytest.approx(0.99007)
    fails(write(tmp_path, AZURE + "yesterday,374,44\n"), "line 2", "timestamp 'yesterday'")


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_rows, "MOST_LINE", 1000)
    fails(write(tmp_path, '{"timestamp": 0}\n' + "x" * 1000), "line 1")
    fails(write(tmp_path, BURST + "1,m,5,1,1,x\n" + "x" * 1000), "line 3", "longer than 1,000")


def test_a_trace_of_few_bytes_and_endless_tokens_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, BURST + f"1,m,{1 << 24},1,1,x\n" * 300)
    fails(path, "line 257", "4,294,967,296 tokens")
    assert len(build(f"trace:path={path},limit=200").requests) == 200
