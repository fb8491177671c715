"""Where prompts differ, what of them agrees again, and mended prompts: on logs of known patterns and on random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.answers.explain.log import TextLog, bounds_of, read, without_text, write_log
from kvtune.requests.loads.requests_file import selected
from kvtune.requests.log.rendering import Renderer, renderer
from kvtune.requests.log.token_ids import agreeing, packed
from kvtune.requests.text import divergence
from kvtune.requests.text.changes import changes_of
from kvtune.requests.text.divergence import LEAST, Divergence, Divergences
from kvtune.requests.text.mending import mended
from tests.requests.text.logs import BROKEN, CLEAN, Pattern, time_in_header, write
from tests.servers.watch.recordings import NAMES, recorded
from tests.tokenizers import OneChild, make_tokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    folder, child = tmp_path_factory.mktemp("tokenizers"), OneChild()

    def made(template: str) -> Renderer:
        path = folder / template
        return child.load(path if path.exists() else make_tokenizer(path, template))

    return made


def log_of(pattern: Pattern, known: Renderer, folder: Path) -> TextLog:
    path = write(pattern, folder / "log.jsonl")
    return read(selected(path, known.render), known.text)


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: str(make.__name__))
def test_a_text_that_breaks_the_prefix_is_found(
    make: Callable[[], Pattern], tokenizers: Callable[[str], Renderer], tmp_path: Path
) -> None:
    """One group of the right kind; its position is where two prompts differ first, to the token."""
    pattern = make()
    known = tokenizers(pattern.template)
    log = log_of(pattern, known, tmp_path)
    assert [group.kind for group in log.groups] == [pattern.kind]
    (group,) = log.groups
    assert len(group.requests) == pattern.requests
    one, change = group.example
    new, old = log.rows[one.request].prompt, log.rows[one.like].prompt
    assert group.at == agreeing(packed(new), packed(old))
    # What differs may begin with the same tokens.
    assert pattern.before.rstrip() in known.text(new[: change.at])[-len(pattern.before) - 80 :]
    # The prompts are the system prompt and a short question: nearly all after the difference was there before.
    for number in group.requests:
        one = log.divergences[number]
        apart = set(range(one.seen, len(log.rows[number].prompt)))
        for piece in one.pieces:
            old = log.rows[one.like].prompt[piece.old : piece.old + piece.length]
            assert list(log.rows[number].prompt[piece.new : piece.new + piece.length]) == list(old)
            apart -= set(range(piece.new, piece.new + piece.length))
        assert one.after == len(log.rows[number].prompt) - one.seen - len(apart)
        assert one.after > pattern.least


@pytest.mark.parametrize("make", CLEAN, ids=lambda make: str(make.__name__))
def test_a_clean_log_has_no_divergence(
    make: Callable[[], Pattern], tokenizers: Callable[[str], Renderer], tmp_path: Path
) -> None:
    log = log_of(make(), tokenizers(make().template), tmp_path)
    assert not log.groups
    assert not any(one.again for one in log.edges)
    assert bounds_of(log).misses["diverged"] == 0


@pytest.mark.parametrize("make", (*BROKEN, *CLEAN), ids=lambda make: str(make.__name__))
def test_bytes_show_the_same_kinds(make: Callable[[], Pattern], tmp_path: Path) -> None:
    """What a template does (a flag, dropped reasoning) is not in the plain form of the messages."""
    pattern = make()
    path = write(pattern, tmp_path / "log.jsonl")
    known = renderer("bytes")
    log = read(selected(path, known.render), known.text, bytes_=True)
    by_template = pattern.kind in ("flag", "reasoning")
    assert [group.kind for group in log.groups] == ([] if by_template or not pattern.kind else [pattern.kind])


def test_causes_add_up_and_texts_stay_in_the_log(
    tokenizers: Callable[[str], Renderer], tmp_path: Path
) -> None:
    log = log_of(time_in_header(), tokenizers("chatml"), tmp_path)
    account = bounds_of(log)
    assert (
        account.hit_tokens + sum(account.misses.values())
        == account.query_tokens
        == sum(len(row.prompt) for row in log.rows)
    )
    assert account.groups[0].old and account.with_text
    kept = without_text(account)
    assert not kept.with_text
    assert not any(
        text for group in kept.groups for text in (group.before, group.old, group.new, group.after)
    )


def found(prompts: Sequence[Sequence[int]]) -> dict[int, Divergence]:
    finder = Divergences()
    results = [finder.add(prompt)[1] for prompt in prompts]
    return {number: one for number, one in enumerate(results) if one is not None}


SHARED = list(range(1000, 1000 + 4 * LEAST))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=40),
    st.lists(st.integers(100, 199), min_size=0, max_size=40),
    st.integers(0, 60),
)
def test_a_stretch_is_found_wherever_it_moved(old: list[int], new: list[int], head: int) -> None:
    """LEAST tokens or more that stand after different texts are one piece, at both ends exact."""
    first = list(range(5000, 5000 + head))
    before, now = [*first, *old, *SHARED, 7], [*first, *new, *SHARED, 8]
    (one,) = found([before, now]).values()
    assert (one.at, one.seen) == (head, head)
    assert [tuple(piece) for piece in one.pieces] == [(head + len(new), head + len(old), len(SHARED))]
    assert one.after == len(SHARED)


def all_mended(
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]], divergences: dict[int, Divergence]
) -> list[list[int]]:
    """The prompts with all changes mended, without their text."""
    changes = {number: changes_of(one, None) for number, one in divergences.items()}
    chosen = {number: range(len(some)) for number, some in changes.items()}
    return [ids.tolist() for ids in mended(prompts, divergences, changes, chosen)]


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 3))
def test_mended_prompts_begin_alike(order: list[int], tail: int) -> None:
    """Parts in any order: the mended prompt starts with all that both have, and holds each of its tokens once."""
    parts = [list(range(1000 * n, 1000 * n + 2 * LEAST)) for n in range(1, 6)]
    before = [token for part in parts for token in part]
    now = [token for n in order for token in parts[n]] + [9] * tail
    divergences = found([before, now])
    (_, ids) = all_mended([(before, ()), (now, ())], divergences)
    assert sorted(ids) == sorted(now)
    if divergences:
        assert ids[: len(before)] == before
    assert not found([before, ids])


def test_the_earlier_prompt_is_mended_too() -> None:
    """As a client does it: what only one request has comes last in every request, the first one included."""
    body = list(range(1000, 1400))
    prompts = [[1, 2, 50 + n, *body[:200], *range(2000 + 100 * n, 2080 + 100 * n)] for n in range(4)]
    divergences = found(prompts)
    assert set(divergences) == {1, 2, 3}
    again = all_mended([(prompt, ()) for prompt in prompts], divergences)
    for prompt, raw in zip(again, prompts, strict=True):
        assert prompt[:202] == [1, 2, *body[:200]]
        assert sorted(prompt) == sorted(raw)


def test_a_turn_that_continues_a_mended_one_still_begins_with_it() -> None:
    """Of a conversation with a stamp on top, the second turn without one: it repeats the first turn as it was sent."""
    body, other = list(range(1000, 1200)), list(range(3000, 3100))
    earlier = [1, 2, 51, *body, 7]
    turn, answer = [1, 2, 52, *body, *other], [4000, 4001, 4002]
    following = [*turn, *answer[:2], 4100]
    prompts = [(earlier, ()), (turn, answer), (following, ())]
    divergences = found([earlier, turn])
    again = all_mended(prompts, divergences)
    assert again[1][:202] == [1, 2, *body]
    assert again[2] == [*again[1], *answer[:2], 4100]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(range(6)), min_size=1, max_size=6, unique=True), min_size=2, max_size=6)
)
def test_a_mended_prompt_has_the_tokens_of_the_original(documents: list[list[int]]) -> None:
    """Some of six documents in any order: no text of another prompt is added, and none is lost."""
    parts = [list(range(1000 * n, 1000 * n + 2 * LEAST)) for n in range(1, 7)]
    prompts = [
        [7, *(token for n in chosen for token in parts[n]), 8 + at] for at, chosen in enumerate(documents)
    ]
    divergences = found(prompts)
    again = all_mended([(prompt, ()) for prompt in prompts], divergences)
    assert [sorted(prompt) for prompt in again] == [sorted(prompt) for prompt in prompts]
    changes = {number: changes_of(one, None) for number, one in divergences.items()}
    as_they_are = mended([(prompt, ()) for prompt in prompts], divergences, changes, {})
    assert [prompt.tolist() for prompt in as_they_are] == prompts


@pytest.mark.parametrize("name", NAMES)
def test_the_logs_of_four_servers_diverge_in_three_requests(name: str) -> None:
    """The load changed one token of a prefix of 600 tokens at a known place, three times."""
    log = recorded(name).log
    divergences = found([one.prompt for one in log])
    told = {log[one.request].name: (one.at, one.after) for one in divergences.values()}
    assert told == {f"diverged {at}": (at, 599 - at) for at in (200, 207, 214)}


def test_an_answer_belongs_to_what_was_computed() -> None:
    """The next turn repeats an answer whose reasoning was dropped: it agrees with the answer after that."""
    draw = np.random.default_rng(0)
    prompt, thought, said = (draw.integers(0, 50_000, n).tolist() for n in (100, 60, 80))
    finder = Divergences()
    finder.add(prompt, [*thought, *said, 1])
    seen, one = finder.add([*prompt, *said, 2, 3])
    assert one is not None
    assert (seen, one.at, one.after) == (100, 100, 80)


def test_a_text_that_repeats_itself_takes_no_longer() -> None:
    """20,000 equal tokens have 20,000 equal anchors."""
    prompts = [[n, *[7] * 20_000, 100 + n] for n in range(4)]
    divergences = found(prompts)
    assert {one.after for one in divergences.values()} == {20_000}


def test_prompts_of_other_salts_share_nothing(tmp_path: Path) -> None:
    pattern = time_in_header()
    bodies = [{**body, "cache_salt": f"tenant {n % 2}"} for n, body in enumerate(pattern.bodies)]
    path = write(replace(pattern, bodies=bodies), tmp_path / "log.jsonl")
    known = renderer("bytes")
    log = read(selected(path, known.render), known.text, bytes_=True)
    assert list(log.divergences) == [2, 3, 4, 5]
    assert all(number % 2 == one.like % 2 for number, one in log.divergences.items())
    (group,) = log.groups
    assert group.example[0].request in (2, 3, 4, 5)
    write_log(tmp_path / "mended.jsonl", log.mended(log.groups))
    assert [row.salt for row in selected(tmp_path / "mended.jsonl", None)] == ["tenant 0", "tenant 1"] * 3


def test_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "MOST_TOKENS", 2000)
    finder = Divergences()
    for n in range(10):
        finder.add(range(10_000 * n, 10_000 * n + 500))
    assert finder.add(range(90_000, 90_500))[0] == 500
    assert finder.add(range(500))[0] == 0


def test_a_text_is_still_known_when_its_divergence_is_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(divergence, "MOST_TOKENS", 6000)
    pattern = time_in_header()
    path = write(replace(pattern, bodies=pattern.bodies * 4), tmp_path / "log.jsonl")
    known = renderer("bytes")
    log = read(selected(path, known.render), known.text, bytes_=True)
    assert log.groups[0].kind == "time"
    assert len(log.divergences) > 10
