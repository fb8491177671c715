"""The edits between two prompts: each is named, and nothing else is."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest

from kvtune.requests.text.edits import LEAST, MOST, STEPS, Edit, Work, between, edits
from kvtune.requests.text.kinds import KINDS, atoms, masked
from kvtune.requests.text.parts import of_text
from tests.requests.text.dialogues import CHANGES, dialogue, judged, pair
from tests.requests.text.dialogues import anthropic as to_anthropic
from tests.requests.text.logs import rules

RULES = rules(1)
SHOTS = "Input: two\nOutput: 2\n\nInput: five\nOutput: 5\n"


def openai(system: str, asked: str = "And now?", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": asked}], **more}


def anthropic(system: str, asked: str = "And now?", **more: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": system}]
    return {"system": texts, "messages": [{"role": "user", "content": asked}], **more}


def responses(system: str, asked: str = "And now?", **more: Any) -> dict[str, Any]:
    return {"instructions": system, "input": [{"role": "user", "content": asked}], **more}


def completions(system: str, asked: str = "And now?", **more: Any) -> dict[str, Any]:
    return {"prompt": f"{system}\n{asked}", **more}


def chatml(body: Mapping[str, Any]) -> str:
    turns = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in body["messages"])
    return "".join(turns) + "<|im_start|>assistant\n"


def kinds(found: list[Edit]) -> list[str]:
    return [one.kind for one in found]


# kvlint's public rules (dynamic_time, dynamic_id, user_in_system, whitespace_drift, key_order, volatile_fewshot), each
# form of a value that its rules name, and what clients send beyond these.
VALUES = [
    ("time", "Current time: {}", "2026-09-11T08:00:00Z", "2026-09-11T08:01:00Z"),
    ("time", "Now: {} | be brief", "2026-09-11 08:00:00.123", "2026-09-11 08:00:07.456"),
    ("time", "It is {}. Be brief.", "9:05", "10:15"),
    ("time", "It is {}. Be brief.", "9:05 AM", "2:45 PM"),
    ("time", "ts={}", "1764100000", "1764100042"),
    ("time", "sent_at: {}", "1764100000123", "1764100042456"),
    ("date", "Today is {}.", "2026-11-25", "2026-11-26"),
    ("date", "Date: {}", "11/25/2026", "11/26/2026"),
    ("date", "Datum: {}", "25.11.2026", "26.11.2026"),
    ("date", "Today is {}. Be kind.", "Monday", "Tuesday"),
    ("date", "Today is {}. Be kind.", "Mon", "Tue"),
    ("date", "Today Date: {}", "26 Nov 2026", "3 Dec 2026"),
    ("date", "It is {}, and you know it.", "November 25", "November 26"),
    ("date", "Knowledge until {}.", "March 2026", "April 2026"),
    ("date", "Today is {}.", "Thursday, 26th of November 2026", "Friday, 27th of November 2026"),
    ("date", "The month is {}.", "November", "December"),
    ("uuid", "trace {} begins", "550e8400-e29b-41d4-a716-446655440000", "0d1f3a5c-11aa-4bcd-8e2f-99ab12cd34ef"),
    ("id", "Request id: {}", "req_56448162f3", "req_51706749f3"),
    ("id", "[{}] Rules follow.", "sess-a81bc81b", "sess-77f0e1d2"),
    ("id", "digest {} of the rules", "9f86d081884c7d65", "60303ae22b998861"),
    ("id", "ticket id {}", "123456", "654321"),
    ("id", "session_id: {}", "ab12cd", "ff00aa"),
    ("id", "You serve {}. Rules", "user-4711", "user-98"),
    ("counter", "You have {} messages left.", "39", "8"),
    ("counter", "Turn {}", "3", "4"),
    ("user", "user: {}", "customer0@example.com", "customer1@example.com"),
    ("user", "Write to {} if in doubt.", "ann@example.org", "bob@example.org"),
    ("user", "Call {} if in doubt.", "+49 30 1234567", "+49 30 7654321"),
    ("user", "Call {} if in doubt.", "(555) 123-4567", "(555) 987-6543"),
    ("user", "You are assisting {}.", "Alice", "Bob"),
    ("user", "User: {}", "Mary Ann", "Jo"),
    ("user", "username = {}", "mary", "joseph"),
    ("user", "locale: {}", "en-US", "de-DE"),
    ("user", "Answer in {} style.", "en_US", "de_DE"),
    ("user", "timezone: {}", "Europe/Paris", "America/Lima"),
    ("user", "tenant: {}", "acme", "globex"),
    ("flag", "Reasoning: {}", "low", "high"),
    ("flag", '{{"reasoning_effort": "{}", "n": 1}}', "low", "medium"),
    ("header", "x-anthropic-billing-header: cc_version=2.1.36; cch={};", "7f1a2", "00c3e"),
    ("header", "x-request-context: {}", "one two", "three four"),
    ("reminder", "<total_tokens>{} tokens left</total_tokens>", "181204", "176011"),
    ("workspace", "Working directory: {}", "/home/ann/shop", "/home/bob/till"),
    ("workspace", "Current branch: {}", "main", "fix/cart"),
    ("other", "You are {}'s assistant.", "Acme Corp", "Globex Retail"),
]  # fmt: skip


@pytest.mark.parametrize(
    "form", [openai, anthropic, responses, completions], ids=lambda form: str(form.__name__)
)
@pytest.mark.parametrize(("kind", "line", "old", "new"), VALUES)
def test_a_value_is_named_whole(form: Any, kind: str, line: str, old: str, new: str) -> None:
    """Whatever API the body is of, and on whatever line the value is."""
    bodies = [form(f"You are here to help.\n{line.format(value)}\n{RULES}") for value in (old, new)]
    (one,) = edits(*bodies)
    assert (one.kind, one.line) == (kind, 2)
    # At least what differs, and no more than the value.
    assert one.old in old
    assert one.new in new
    assert one.follows >= len(RULES)


CAFE = "Answer in the café of Zoë."
PROFILE = ('Profile: {"city": "Rome", "units": "metric"}', 'Profile: {"units": "metric", "city": "Rome"}')
NESTED = ('{"a": {"x": 1, "y": 2}, "b": 3}', '{"b": 3, "a": {"y": 2, "x": 1}}')
SHOT = "Input: one\nOutput: 1"
QA = ("Q: one\nA: 1", "Q: two\nA: 2")
TOOLED = (f"Document 1: the tools\n{rules(21, 3)}", f"Document 2: a function\n{rules(22, 3)}")
DOCUMENTS = [f"<document>\n{rules(n, 4)}\n</document>" for n in (31, 32, 33)]
ORDERS = ("Be kind to all.", "Be brief, always.", "Tell no lies.")
EXTRA = "Never mention the weather of yesterday."
TEXTS = [
    ("whitespace", "Be brief.\n", "Be brief.\r\n"),
    ("whitespace", "Be brief.\n", "Be brief.\n\n"),
    ("whitespace", "Be brief.\n", "Be brief. \n"),
    ("whitespace", "Be  brief, and kind.\n", "Be brief, and  kind.\n"),
    ("unicode", f"{CAFE}\n", unicodedata.normalize("NFD", f"{CAFE}\n")),
    ("keys", f"{PROFILE[0]}\n", f"{PROFILE[1]}\n"),
    ("keys", f"{NESTED[0]}\n", f"{NESTED[1]}\n"),
    (
        "examples",
        "Example 1: cats are animals\nExample 2: two\n",
        "Example 1: cats are animals\nExample 2: a prime\n",
    ),
    ("examples", f"{SHOTS}\n{SHOT}\n", f"{SHOT}\n\n{SHOTS}"),
    ("examples", "\n".join(("Examples:", *QA, "")), "\n".join(("Examples:", *QA[::-1], ""))),
    ("documents", "\n".join((*TOOLED, "")), "\n".join((*TOOLED[::-1], ""))),
    ("documents", "\n".join((*DOCUMENTS, "")), "\n".join((*DOCUMENTS[2:], *DOCUMENTS[:2], ""))),
    ("documents", "\n".join((*DOCUMENTS[:2], "")), "\n".join((*DOCUMENTS[1:], ""))),
    ("order", "\n".join((*ORDERS, "")), "\n".join((*ORDERS[2:], *ORDERS[:2], ""))),
    ("line_added", "You help.\n", f"You help.\n{EXTRA}\n"),
    ("line_removed", f"You help.\n{EXTRA}\n", "You help.\n"),
    ("reminder", "You help.\n", "You help.\n<system-reminder>The list is empty.</system-reminder>\n"),
]


@pytest.mark.parametrize(
    "form", [openai, anthropic, responses, completions], ids=lambda form: str(form.__name__)
)
@pytest.mark.parametrize(("kind", "old", "new"), TEXTS)
def test_lines_are_one_edit(form: Any, kind: str, old: str, new: str) -> None:
    assert kinds(edits(form(old + RULES), form(new + RULES))) == [kind]


CLEAN = [
    ("the same", openai(RULES), openai(RULES)),
    ("another question", openai(RULES, "What is the time?"), openai(RULES, "It is 9:05, and now?")),
    ("a question with an id", openai(RULES, "Where is order 100001?"), openai(RULES, "Cancel order 100077.")),
    ("another prompt", openai(rules(5)), openai(rules(6))),
    ("a time at the end", openai(f"{RULES}\nTime: 2026-09-11T08:00"), openai(f"{RULES}\nTime: 2026-09-11T08:10")),
    ("a time that stays", openai(f"Time: 08:00\n{RULES}", "a"), openai(f"Time: 08:00\n{RULES}", "b")),
    ("longer by a line", openai(RULES), openai(f"{RULES}\nMore of it.")),
    ("no text", {"messages": []}, openai(RULES)),
    ("nothing", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [case[1:] for case in CLEAN], ids=[case[0] for case in CLEAN])
def test_what_costs_nothing_is_no_edit(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert edits(old, new) == []


def said(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


TURNS = [
    ("user" if n % 2 == 0 else "assistant", f"{'Asked' if n % 2 == 0 else 'Told'} {n}: {rules(40 + n, 4)}")
    for n in range(8)
]
SYSTEM = ("system", RULES)


def test_a_summary_of_old_turns_is_a_compaction() -> None:
    """Also if no turn of the old prompt stays."""
    whole = said(SYSTEM, *TURNS)
    summary = ("user", "Summary of the conversation so far: they met, and talked.")
    kept = edits(whole, said(SYSTEM, summary, *TURNS[6:]))
    assert kinds(kept) == ["compaction"]
    assert kept[0].place == "messages[1]"
    assert kept[0].new.startswith("Summary of the")
    (none,) = edits(whole, said(SYSTEM, summary))
    assert (none.kind, none.follows) == ("compaction", 0)


def test_reasoning_inside_of_an_answers_text_is_a_part_of_its_own() -> None:
    def body(said: str, role: str = "assistant") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": RULES}, {"role": role, "content": said}]}

    answer = f"I looked.\nThe answer:\n{rules(53, 4)}"
    (one,) = edits(body(f"<think>\n{rules(54, 2)}\n</think>\n\n{answer}"), body(answer))
    assert (one.kind, one.place, one.new) == ("reasoning", "messages[1]", "")
    assert edits(body(f"<think>{answer}"), body(answer))[0].kind != "reasoning", "it never ends"
    assert edits(body(f"<think>a</think>{answer}", "user"), body(answer, "user"))[0].kind != "reasoning"


def test_a_flag_of_the_body_is_an_edit() -> None:
    (one,) = edits(openai(RULES, reasoning_effort="low"), openai(RULES, reasoning_effort="high"))
    assert (one.kind, one.place, one.old, one.new) == ("flag", "reasoning_effort", "low", "high")


def test_a_rendered_prompt_is_cut_at_its_roles() -> None:
    """Edits are the same as those of the bodies, and their positions are those of the texts."""
    old = said(("system", f"Time: 9:05\n{RULES}"), *TURNS)
    new = said(("system", f"Time: 9:06\n{RULES}"), *TURNS[:3], ("user", rules(60, 3)), *TURNS[3:])
    texts = chatml(old), chatml(new)
    found = between(of_text(texts[0]), of_text(texts[1]))
    assert [(one.kind, one.place, one.line) for one in found] == [
        ("time", "messages[0]", 1),
        ("turn_added", "messages[4]", 1),
    ]
    assert [(one.kind, one.place) for one in edits(old, new)] == [(one.kind, one.place) for one in found]
    for one in found:
        assert texts[0][slice(*one.old_span)][:200] == one.old
        assert texts[1][slice(*one.new_span)][:200] == one.new


def test_the_date_of_the_server_is_told_from_a_clients() -> None:
    def text(date: str) -> str:
        said = f"You are ChatGPT, a large language model.\nCurrent date: {date}\n\nReasoning: low\n\n# Valid channels"
        return f"<|start|>system<|message|>{said}<|end|><|start|>developer<|message|>{RULES}<|end|><|start|>assistant"

    assert kinds(between(of_text(text("2026-11-25")), of_text(text("2026-11-26")))) == ["server_date"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" ".join(f"word{n % 97} and" for n in range(9000)), " ".join(f"word{n % 89} or" for n in range(10_000))),
        ("x " * 57_000, "y " * 57_000),
        ("a b " * 29_000, "b a " * 29_000),
        ("\n".join("ab" * (n % 5) for n in range(30_000)), "\n".join("ab" * (n % 7) for n in range(30_000))),
        ('{"a": 1, ' * 12_000, '{"a": 2, ' * 12_000),
        ("2026-09-11 " * 10_000, "2026-09-12 " * 10_000),
        ("\n" * 115_000, "\n \n" * 38_000),
        ("a-1" * 38_000, "b-1" * 38_000),
    ],
    ids=["words", "two letters", "pairs", "short lines", "braces", "dates", "blank lines", "one word"],
)  # fmt: skip
def test_two_prompts_of_one_line_take_bounded_work(old: str, new: str) -> None:
    """115 kB each. Steps are comparisons; without the bounds difflib takes minutes for the first pair."""
    work = Work()
    found = edits({"prompt": old + RULES}, {"prompt": new + RULES}, work)
    assert found
    assert work.taken <= STEPS
    assert len(found) <= 2 * MOST


@pytest.mark.full
def test_many_messages_take_bounded_work() -> None:
    """6,000 messages each, which are all unlike."""
    bodies = [
        said(*[("user", f"{word} {n}") for n in range(6000)], ("user", RULES)) for word in ("one", "other")
    ]
    work = Work()
    assert len(edits(bodies[0], bodies[1], work)) <= 2 * MOST
    assert work.taken <= STEPS


def test_many_messages_of_other_roles_take_bounded_work() -> None:
    """3,000 messages each: none is a version of another, and nobody compares each with each."""
    bodies = [
        said(*[(role, f"{role} {n}") for n in range(3000)], ("user", RULES)) for role in ("user", "tool")
    ]
    work = Work()
    assert kinds(edits(bodies[0], bodies[1], work)) == ["turn_added", "turn_removed"]
    assert work.taken <= STEPS


@pytest.mark.parametrize("form", [dict, to_anthropic], ids=["openai", "anthropic"])
def test_what_two_applications_differ_in_is_one_edit(form: Any) -> None:
    """Prompts of two applications that end alike: their system texts, tools and turns are not told apart."""
    asked = {"role": "user", "content": rules(70, 4)}
    for seed in range(0, 40, 2):
        old, new = (dialogue(random.Random(one)) for one in (seed, seed + 1))
        for body in (old, new):
            body["messages"].append(asked)
        assert kinds(edits(form(old), form(new))) == ["other"]


def test_a_system_text_of_another_application_is_one_edit() -> None:
    """Also if a long question follows that both have."""
    lines = [rules(seed).replace(". ", ".\n") for seed in (71, 72)]
    bodies = [openai(f"You help.\n{some}", rules(73, 40)) for some in lines]
    assert kinds(edits(bodies[0], bodies[1])) == ["other"]


def test_without_steps_left_the_whole_text_is_one_edit() -> None:
    old, new = (openai(f"Time: 9:0{n}\nID: {n}{n}\n{RULES}") for n in (1, 2))
    assert kinds(edits(old, new, Work(0))) == []  # nothing is known to follow
    after = {"role": "user", "content": "x" * LEAST}
    old["messages"].append(after)
    new["messages"].append(after)
    assert kinds(edits(old, new, Work(0))) == ["other"]


def test_random_edits_of_dialogues_are_named() -> None:
    """Seeds that nothing was tuned on."""
    right, made, missed, wrong = judged(500_000, 60)
    assert set(made) == set(CHANGES)
    assert right >= 58, (missed, wrong)
    assert missed.total() + wrong.total() <= 0.03 * made.total()


def test_what_is_kept_of_lines_alike_changes_no_edit() -> None:
    """Two prompts are compared after others, with and without work left: the edits are those of a first time."""
    pairs = [pair(seed) for seed in range(40)]
    for n in range(40):
        lines = [
            f"Time: {9 + n % 2}:{m:02}\nID: {m}{n}\nFor {'ann' if m else 'bob'}@example.com\n"
            f"You help {('Acme Corp', 'Globex Retail', 'Acme and Sons')[m % 3]} in {('Oslo', 'Rome')[m % 2]}, team {m}."
            for m in (n, 59 - n)
        ]
        pairs.append((openai(f"{lines[0]}\n{RULES}"), openai(f"{lines[1]}\n{RULES}"), []))
    for old, new, _ in pairs:
        edits(old, new, Work(2000))  # with little work left, which must not show in what is kept
    assert all(kept.cache_info().currsize for kept in (atoms, masked))
    for old, new, _ in pairs:
        named = edits(old, new)
        for kept in (atoms, masked):
            kept.cache_clear()
        assert edits(old, new) == named


@pytest.mark.parametrize("form", [dict, to_anthropic], ids=["openai", "anthropic"])
def test_a_dialogue_that_grows_has_no_edit(form: Any) -> None:
    for seed in range(20):
        whole = dialogue(random.Random(seed))
        for end in range(2, len(whole["messages"])):
            shorter = {**whole, "messages": whole["messages"][:end]}
            assert edits(form(shorter), form(whole)) == []


def test_every_kind_says_what_to_do() -> None:
    assert all(kind.mend.endswith(".") and kind.title for kind in KINDS.values())
    assert len({kind.title for kind in KINDS.values()}) == len(KINDS)
