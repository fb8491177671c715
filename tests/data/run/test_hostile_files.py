"""Damaged and hostile run files: each is one line of an error, costs little, and stops nothing beside it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtune.base.errors import UsageError
from kvtune.data.run import durations
from kvtune.data.run import file as file_module
from kvtune.data.run.durations import known_durations
from kvtune.data.run.file import read_columns, read_label, read_run, store_extra
from kvtune.data.run.types import TABLES
from tests.simulator import run as kvtune

GOLDEN = Path(__file__).parents[2] / "golden" / "schema1-real.kvrun"
STEP_US = "tables/steps/step_us.npy"
Parts = dict[str, bytes]


def parts_of(path: Path) -> Parts:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: Parts, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method, compresslevel=1) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def column(name: str, array: Any) -> Callable[[Parts], bytes]:
    return lambda parts: packed({**parts, f"tables/{name}.npy": npy(array)})


def part(name: str, content: bytes) -> Callable[[Parts], bytes]:
    return lambda parts: packed({**parts, name: content})


def flipped(parts: Parts) -> bytes:
    """Bytes changed in the midst of the header's compressed data."""
    whole = bytearray(packed(parts))
    whole[200:260] = bytes(60)
    return bytes(whole)


def with_flag(offset: int, value: int) -> Callable[[Parts], bytes]:
    """A field of the header's entry in the zip's list of parts changed."""

    def made(parts: Parts) -> bytes:
        whole = bytearray(packed(parts))
        at = whole.index(b"PK\x01\x02")
        whole[at + offset] = value
        return bytes(whole)

    return made


def renamed(parts: Parts) -> bytes:
    return packed({name: content for name, content in parts.items() if name != "header.json"})


def head_says(shape: str) -> Callable[[Parts], bytes]:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return part(STEP_US, b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(80))


def header_says(**changes: object) -> Callable[[Parts], bytes]:
    return lambda parts: packed(
        {**parts, "header.json": json.dumps({**json.loads(parts["header.json"]), **changes}).encode()}
    )


def rows(name: str) -> int:
    with zipfile.ZipFile(GOLDEN) as archive:
        return len(np.load(io.BytesIO(archive.read(f"tables/{name}.npy"))))


STEPS = rows("steps/step_us")
DAMAGED: dict[str, Callable[[Parts], bytes]] = {
    "compressed data flipped": flipped,
    "encrypted": with_flag(8, 1),
    "unknown method": with_flag(10, 98),
    "bzip2": lambda parts: packed(parts, zipfile.ZIP_BZIP2),
    "no header": renamed,
    "header list": part("header.json", b"[]"),
    "header no text": part("header.json", b'{"schema": 1, "model": "\xff"}'),
    "header of half a character": part("header.json", b'{"schema": 1, "model": "\\ud800"}'),
    "schema text": header_says(schema="x"),
    "schema low": header_says(schema=-7),
    "model number": header_says(model=3),
    "same part twice": lambda parts: packed(parts).replace(b"memory/rss_bytes", b"memory/uss_bytes"),
}
BAD_TABLES: dict[str, Callable[[Parts], bytes]] = {
    "shape huge": head_says("(10000000000000,)"),
    "shape negative": head_says("(-1,)"),
    "longer": column("steps/step_us", np.zeros(STEPS + 1)),
    "nan": column("steps/step_us", np.full(STEPS, np.nan)),
    "text for numbers": column("steps/step_us", np.full(STEPS, "1")),
    "numbers for text": column("requests/id", np.zeros(rows("requests/id"))),
    "floats for whole numbers": column("steps/running", np.zeros(STEPS)),
    "wider": column("steps/running", np.zeros(STEPS, "i8")),
    "no characters": column("requests/id", np.full(rows("requests/id"), 0x110000, "<u4").view("<U1")),
    "half characters": column("requests/id", np.full(rows("requests/id"), 0xD800, "<u4").view("<U1")),
    "process below 0": column("steps/process", np.full(STEPS, -1, "i2")),
    "a request too far": column("tokens/request", np.full(rows("tokens/request"), 9999, "i4")),
    "tokens without end": column("tokens/count", np.full(rows("tokens/count"), 2**31 - 1, "i4")),
}


@pytest.mark.parametrize("damage", [*DAMAGED, *BAD_TABLES])
def test_every_damage_is_one_line_that_names_the_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.kvrun"
    path.write_bytes({**DAMAGED, **BAD_TABLES}[damage](parts_of(GOLDEN)))
    with pytest.raises(UsageError, match=r"a\.kvrun") as caught:
        read_run(path)
    assert len(caught.value.message.splitlines()) == 1 and caught.value.hint


def test_a_sound_file_packed_in_another_way_still_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrun"
    path.write_bytes(packed(parts_of(GOLDEN), zipfile.ZIP_STORED))
    assert read_run(path).header == read_run(GOLDEN).header


BOMBS = {
    "header": ("header.json", (64 << 20) + 1),
    "column": (STEP_US, 20 << 20),
    "foreign part": ("more.bin", 20 << 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_sizes_are_checked_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: str
) -> None:
    name, size = BOMBS[bomb]
    path = tmp_path / "a.kvrun"
    path.write_bytes(packed({**parts_of(GOLDEN), name: bytes(size)}))
    monkeypatch.setattr(file_module, "_part", lambda *_: pytest.fail("unpacked"))
    if bomb == "header":  # the limit of its own, with the sum out of the way
        monkeypatch.setattr(file_module, "MOST_RATIO", 1 << 30)
    for read in (read_run, read_label, lambda path: store_extra(path, misses={})):
        with pytest.raises(UsageError, match="bytes"):
            read(path)


def test_an_entry_that_lies_about_its_size_unpacks_no_more_than_it_says(tmp_path: Path) -> None:
    whole = bytearray(packed({"header.json": b" " * (8 << 20)}))
    at = whole.index(b"PK\x01\x02")
    whole[at + 24 : at + 28] = (100).to_bytes(4, "little")
    path = tmp_path / "a.kvrun"
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="not a readable run file"):
        read_run(path)


def test_a_zip_with_an_endless_list_of_parts_is_not_listed(tmp_path: Path) -> None:
    end = bytearray(packed({})[-22:])
    end[12:16] = (2 << 20).to_bytes(4, "little")
    path = tmp_path / "a.kvrun"
    path.write_bytes(bytes(2 << 20) + end)
    with pytest.raises(UsageError, match="list of parts"):
        read_label(path)


def test_a_run_of_hours_is_far_below_the_limits() -> None:
    """Eight hours at 100 steps and 6,000 tokens a second, packed half as well as a short run."""
    width = {
        name: sum(np.dtype(kind).itemsize for kind in columns.values()) for name, columns in TABLES.items()
    }
    seconds = 8 * 3600
    unpacked = seconds * (100 * (width["steps"] + width["receipts"]) + 6000 * width["tokens"])
    assert unpacked < file_module.MOST_BYTES / 2
    with zipfile.ZipFile(GOLDEN) as archive:
        ratio = sum(info.file_size for info in archive.infolist()) / GOLDEN.stat().st_size
    assert ratio < file_module.MOST_RATIO / 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with one good run beside every damaged one, a pipe, and a device."""
    made = tmp_path / "out"
    made.mkdir()
    (made / "good.kvrun").write_bytes(GOLDEN.read_bytes())
    for number, damage in enumerate(DAMAGED.values()):
        (made / f"damaged-{number}.kvrun").write_bytes(damage(parts_of(GOLDEN)))
    os.mkfifo(made / "pipe.kvrun")
    (made / "zero.kvrun").symlink_to("/dev/zero")
    monkeypatch.setenv("KVTUNE_OUTPUT", str(made))
    return made


def test_a_listing_has_a_row_for_each_file_that_cannot_be_read_and_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    unreadable = [row for row in listed if row["state"] == "unreadable"]
    assert [Path(row["file"]).name for row in listed if row not in unreadable] == ["good.kvrun"]
    assert len(unreadable) == len(DAMAGED) + 2 and all(row["why"] for row in unreadable)
    assert {row["why"].rpartition(": ")[2] for row in unreadable} >= {"not a regular file"}
    assert kvtune(["runs"]) == 0
    told = capsys.readouterr().out
    assert told.count("unreadable: ") == len(unreadable)


def test_last_and_plans_go_past_files_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kvtune(["report", "last", "--console"]) == 0
    label = read_label(folder / "good.kvrun")
    monkeypatch.setattr(durations, "this_host", lambda: label.host)
    assert known_durations(folder, label.model, label.workload.hash).run_s == label.startup_s + label.wall_s


def test_a_listing_reads_no_more_than_the_header_and_its_figures(tmp_path: Path) -> None:
    """Damage elsewhere shows when the run is opened."""
    path = tmp_path / "a.kvrun"
    path.write_bytes(BAD_TABLES["shape huge"](parts_of(GOLDEN)))
    assert read_label(path).model == "tiny-gemma3"
    assert len(read_columns(path, "requests", ("sent_s",))["sent_s"]) == rows("requests/sent_s")


def test_a_list_does_not_wait_for_columns_of_a_huge_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "MOST_LISTED_BYTES", 100)
    assert len(read_columns(GOLDEN, "requests", ("sent_s",))["sent_s"]) == 0


class TestStoring:
    """`explain --save` changes one field of a run file that someone else may have written."""

    @pytest.fixture
    def newer(self, tmp_path: Path) -> Path:
        """A run as a later kvtune may write it: fields, a part and a column that this one does not know."""
        parts = parts_of(GOLDEN)
        header = json.loads(parts["header.json"])
        header["later"] = {"a": 1}
        header["engine"]["later"] = "b"
        header["extra"]["later"] = [1.5]
        path = tmp_path / "a.kvrun"
        path.write_bytes(
            packed(
                {
                    **parts,
                    "header.json": json.dumps(header).encode(),
                    "later.bin": b"c",
                    "tables/later/x.npy": npy([1]),
                    "tables/steps/later.npy": npy([2]),
                }
            )
        )
        return path

    def test_what_a_later_kvtune_wrote_stays(self, newer: Path) -> None:
        before = parts_of(newer)
        store_extra(newer, misses={"cold": 3})
        after = parts_of(newer)
        header, expected = json.loads(after.pop("header.json")), json.loads(before.pop("header.json"))
        expected["extra"]["misses"] = {"cold": 3}
        assert after == before and header == expected
        assert read_run(newer).header.extra.misses == {"cold": 3}

    def test_permissions_stay(self, newer: Path) -> None:
        newer.chmod(0o640)
        store_extra(newer, misses={"cold": 3})
        assert newer.stat().st_mode & 0o777 == 0o640

    def test_a_link_stays_a_link_and_its_file_is_written(self, newer: Path, tmp_path: Path) -> None:
        (tmp_path / "links").mkdir()
        link = tmp_path / "links" / "l.kvrun"
        link.symlink_to(newer)
        store_extra(link, misses={"cold": 3})
        assert link.is_symlink() and read_run(newer).header.extra.misses == {"cold": 3}
        assert [path.name for path in link.parent.iterdir()] == ["l.kvrun"]

    def test_a_file_that_cannot_be_read_is_left_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "a.kvrun"
        path.write_bytes(DAMAGED["header list"](parts_of(GOLDEN)))
        before = path.read_bytes()
        with pytest.raises(UsageError):
            store_extra(path, misses={})
        assert path.read_bytes() == before


def test_data_that_looks_like_the_end_of_a_larger_archive_is_data(tmp_path: Path) -> None:
    """Seen once in a replay's file: four of its compressed bytes."""
    path = tmp_path / "a.kvrun"
    with zipfile.ZipFile(path, "w") as out:
        for name, content in parts_of(GOLDEN).items():
            out.writestr(name, content)
        out.writestr("tables/later/column.npy", b"PK\x06\x07" * 9)
    assert read_label(path) == read_label(GOLDEN)


def test_a_file_of_more_than_two_gib_is_read_and_its_second_end_record_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.kvrun"
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1_000)  # from here on, any file counts as large
    path.write_bytes(GOLDEN.read_bytes())
    store_extra(path, later=1)
    content = path.read_bytes()
    at = content.rindex(b"PK\x06\x06")
    assert content[at + 56 :].startswith(b"PK\x06\x07"), "it has a second end record and a locator"
    assert read_label(path) == read_label(GOLDEN)

    for size in (9, 2 << 30, 2 << 60):
        path.write_bytes(content[: at + 40] + size.to_bytes(8, "little") + content[at + 48 :])
        with pytest.raises(UsageError, match="not a readable run file"):
            read_label(path)
