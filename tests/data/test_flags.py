"""vLLM's flags as typed on a command line: every spelling of a flag means the same."""

from __future__ import annotations

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.flags import (
    SHORT,
    flag_texts,
    flag_value,
    parse_flags,
    settings_given,
    with_flag,
    without_overridden,
)

WORDS = ["--block-size", "64", "--max_model_len=512", "--no-enable-prefix-caching", "--a", "1", "-2"]


def test_names_and_values() -> None:
    result = {flag.name: flag.values for flag in parse_flags(WORDS)}
    assert result == {
        "block-size": ("64",),
        "max-model-len": ("512",),
        "no-enable-prefix-caching": (),
        "a": ("1", "-2"),
    }
    assert flag_texts(WORDS) == {
        "block-size": "64",
        "max-model-len": "512",
        "no-enable-prefix-caching": "",
        "a": "1 -2",
    }
    assert settings_given(WORDS) == {"block-size", "max-model-len", "enable-prefix-caching", "a"}


@pytest.mark.parametrize("words", [WORDS, [], ["stray", "--x"], ["--x=", "", "--x"]])
def test_no_word_is_lost(words: list[str]) -> None:
    assert [word for flag in parse_flags(words) for word in flag.words] == words


def test_words_before_the_first_flag_are_no_flag() -> None:
    assert parse_flags(["stray", "word", "--x"])[0].name == ""
    assert flag_texts(["stray", "--x"]) == {"x": ""}
    assert settings_given(["stray"]) == frozenset()


def test_the_last_value_counts_however_it_is_written() -> None:
    assert flag_value(["--block_size=64"], "block-size") == "64"
    assert flag_value(["--block-size", "16", "--block-size=64", "--seed", "1"], "block-size") == "64"
    assert flag_value(["--seed", "1"], "block-size") is None


@pytest.mark.parametrize("words", [["--block-size"], ["--block-size", "--seed", "1"]])
def test_a_flag_without_its_value_is_named(words: list[str]) -> None:
    with pytest.raises(UsageError, match="--block-size has no value"):
        flag_value(words, "block-size")


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (["--a", "1"], 2, ["--a", "1", "--x", "2"]),
        (["--x", "1", "--a", "1"], 2, ["--a", "1", "--x", "2"]),
        (["--x=1", "--a", "1"], 2, ["--a", "1", "--x", "2"]),
        (["--a", "1", "--x"], "", ["--a", "1", "--x"]),
        (["--x", "1", "2", "--a"], None, ["--a"]),
    ],
)
def test_a_flag_is_replaced_or_removed(
    words: list[str], value: int | str | None, expected: list[str]
) -> None:
    assert with_flag(words, "x", value) == expected


def test_a_later_flag_overrides_an_earlier_one() -> None:
    assert without_overridden(["--a", "1", "--b", "--a_=2", "--a", "3"]) == ["--b", "--a_=2", "--a", "3"]
    assert without_overridden(["--max_len=1", "--b", "--max-len", "2"]) == ["--b", "--max-len", "2"]


def test_short_forms_are_the_flags_that_they_stand_for() -> None:
    words = ["-tp", "2", "-dp=2", "--seed", "-1"]
    assert flag_value(words, "tensor-parallel-size") == "2"
    assert flag_value(words, "data-parallel-size") == "2"
    assert flag_value(words, "seed") == "-1"
    assert with_flag(words, "data-parallel-size", None) == ["-tp", "2", "--seed", "-1"]


@pytest.mark.filterwarnings("ignore")
def test_every_short_form_of_vllms_parser_is_known() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    theirs = {
        short: long.removeprefix("--")
        for action in parser._actions
        for short in action.option_strings
        if not short.startswith("--") and short != "-h"
        for long in action.option_strings[:1]
    }
    assert {short: SHORT.get(short) for short in theirs} == theirs
