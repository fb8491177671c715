"""Commands that are printed can be copied: a shell takes each word as it is."""

from __future__ import annotations

import shlex

from kvtune.commands import command, core_words


def test_a_shell_takes_each_word_as_it_is() -> None:
    words = ["profile", "my model", "-w", "rounds:prefixes=2"]
    flags = ["--hf-overrides", '{"a": 1}', "$(reboot)"]
    assert shlex.split(command(*words, flags=flags)) == ["kvtune", *words, "--", *flags]
    assert command("doctor", flags=[]) == "kvtune doctor"


def test_settings_of_the_core_keep_every_digit() -> None:
    settings = {"slack": 4_194_304, "reuse_bonus_s": 0.123456789, "packed": True}
    assert core_words(settings) == [
        *("--set", "core.slack=4194304", "--set", "core.reuse_bonus_s=0.123456789"),
        *("--set", "core.packed=true"),
    ]
