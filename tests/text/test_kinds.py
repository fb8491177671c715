"""What kind of text differs, on texts as clients and chat templates write them."""

from __future__ import annotations

import pytest

from kvtune.text.kinds import KINDS, Difference, kind_of, place_of


@pytest.mark.parametrize(
    ("kind", "before", "old", "new", "after"),
    [
        ("time", "Current time: 2026-11-26T08:0", "0:00", "1:30", "Z\nBe brief."),
        ("time", "now=17641", "00000", "00042", " | rules"),
        ("time", "It is ", "9:05", "10:15", ". Be brief."),
        ("date", "Today is 2026-11-2", "5", "6", ".\nBe brief."),
        ("date", "Today Date:", " 26 Nov 2026", " 3 Dec 2026", "\n\nBe brief."),
        ("date", "Today is ", "Monday", "Tuesday", ". Be brief."),
        ("uuid", "trace 550e8400-e29b-41d4-a716-44665544", "0000", "1234", " begin"),
        ("id", "session_id: ", "ab12cd", "ff00aa", "\nRules"),
        ("id", "You serve user-4", "711", "98", ". Rules"),
        ("id", "[", "9f86d081884c", "60303ae22b99", "] Rules"),
        ("counter", "You have 3", "9", "8", " messages left."),
        ("user", "You are assisting ", "Alice", "Bob", ".\nRules"),
        ("user", "User: ", "Mary Ann", "Jo", "\nRules"),
        ("flag", "Reasoning: ", "low", "high", "\n\n# Valid channels"),
        ("flag", "system\n/", "", "no_", "think\nRules"),
        ("flag", '{"reasoning_effort": "', "low", "medium", '", "n": 1}'),
        ("whitespace", "assistant.", "\n", "\r\n\n", "Rules"),
        ("reasoning", "assistant\n", "<think>\nLet me see.\n</think>\n\n", "", "It is 4."),
        ("reasoning", "assistant\n", "<think>\n\n</think>\n\n", "", "It is 4."),
        ("keys", 'Profile: {"', 'a": 1, "b": 2', 'b": 2, "a": 1', "}"),
        ("turn_removed", "<|im_start|>user\n", "Hello there, friend<|im_end|>\n<|im_start|>user\n", "", "And now?"),
        ("turn_added", "<|im_start|>user\n", "", "Hello there, friend<|im_end|>\n<|im_start|>user\n", "And now?"),
        ("examples", "Solve it.\nExample ", "2: cats are animals", "7: seven is a prime", ".\nExample 3: x"),
        ("other", "Summary: ", "they met in spring", "nobody was there", ". Rules"),
    ],
)  # fmt: skip
def test_the_rule_that_fits_first(kind: str, before: str, old: str, new: str, after: str) -> None:
    assert kind_of(Difference(before, old, new, after, old, new)).key == kind


def test_an_order_is_known_by_what_stands_around() -> None:
    tools = Difference('<tools>{"type": "function", "function": {"name": "', "", "", "x", reordered=True)
    assert kind_of(tools).key == "tools"
    assert kind_of(Difference("Example 1: Input:", "", "", "x", reordered=True)).key == "examples"
    assert kind_of(Difference("Document ", "", "", "x", reordered=True)).key == "order"


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [
        ("Document:\n", "The build tools come first. Their input: a path.", "Other tools follow, for example make."),
        ("Document 3: ", "A tool has parameters, and a function calls it.", "For example, a shot of the moon."),
        ("user\nContext: ", "Use the tool at hand; see the examples below.", "The tools are in the box, an example."),
    ],
)  # fmt: skip
def test_documents_about_tools_and_examples_are_parts_in_another_order(
    before: str, old: str, new: str
) -> None:
    assert (
        kind_of(Difference(before, old, new, "\nQuestion", old, new, reordered=True, places=2)).key == "order"
    )
    assert kind_of(Difference(before, old, new, "\nQuestion", old, new, places=2)).key == "other"


def test_a_number_in_a_long_text_that_differs_is_no_counter() -> None:
    long = "a text that goes on for quite a while, and so it does, and more of it comes."
    assert kind_of(Difference("Section ", f"2: {long}", f"7: {long[::-1]}", ".")).key == "other"


def test_values_at_one_place_are_one_group() -> None:
    """Where the first digit that differs falls changes nothing."""
    one = Difference("Rules.\nYou have 3", "9", "8", " left")
    other = Difference("Rules.\nYou have ", "40", "39", " left")
    assert place_of(one) == place_of(other) == "es.\nYou have"


def test_every_kind_says_what_to_do() -> None:
    assert len({kind.key for kind in KINDS}) == len(KINDS)
    assert all(kind.mend.endswith(".") and kind.title for kind in KINDS)
