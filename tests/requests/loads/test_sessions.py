from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.base.errors import UsageError
from kvtune.requests.loads.prefix_tree import PrefixTree
from kvtune.requests.loads.sessions import Load, Node, Rules, Session, Slots, as_recorded, closed_loops, load
from kvtune.requests.loads.spec import build
from kvtune.requests.loads.tokens import with_answers
from kvtune.requests.types import STREAM_ANSWER, Request, Span

CHAT = Session(
    "chat",
    (
        Node(100, 10, head=(Span(1, 0, 40),)),
        Node(130, 20, (0,), 3.0, 0, 110),
        Node(60, 5, (0,), 1.0, sub=True),
        Node(80, 5, (2,), 1.0, 2, 65, sub=True),
        Node(170, 10, (1, 3), 700.0, 1, 150),
    ),
)
ONE = Session("one", (Node(50, 4, head=(Span(1, 0, 40),)),))


def of(*sessions: Session, **rules: object) -> Load:
    return load(sessions, Rules(**rules), "here")  # type: ignore[arg-type]


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    nodes: list[Node] = []
    for at in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, at - 1))
        common = 0
        if parent >= 0:
            common = draw(st.integers(1, nodes[parent].tokens + nodes[parent].output))
        after = tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=2)))) if at else ()
        tokens = common + draw(st.integers(1, 50))
        sub = bool(at) and draw(st.booleans())
        pause = draw(st.sampled_from([0.0, 1.0, 900.0]))
        nodes.append(Node(tokens, draw(st.integers(1, 30)), after, pause, parent, common, sub))
    return Session("drawn", tuple(nodes))


@settings(max_examples=60)
@given(st.lists(sessions(), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 9))
def test_requests_come_after_those_that_they_wait_for_with_prompts_of_their_length(
    drawn: list[Session], count: int, seed: int
) -> None:
    draft = closed_loops(of(*drawn), count, 2.0, seed)
    for at, request in enumerate(draft.requests):
        assert all(before < at for before in request.after)
        assert (request.arrival_s is None) == bool(request.after)
        assert request.think_s <= 600.0
        assert all(
            span.stream - STREAM_ANSWER < at for span in request.prompt if span.stream >= STREAM_ANSWER
        )


@settings(max_examples=60)
@given(sessions())
def test_a_session_played_once_shares_what_its_file_says(session: Session) -> None:
    """At least that, to the token: the tree also finds what two branches have in common."""
    draft = as_recorded(of(session))
    by_node = {int(request.id.rpartition(".")[2]): request for request in draft.requests}
    for at, node in enumerate(session.nodes):
        assert by_node[at].prompt_tokens == node.tokens
        if node.parent >= 0:
            tree = PrefixTree()
            parent = by_node[node.parent]
            place = draft.requests.index(parent)
            answer = Span(STREAM_ANSWER + place, 0, parent.output_tokens)
            tree.insert((*parent.prompt, answer))
            assert tree.match(by_node[at].prompt) == node.common


def names(requests: list[Request] | tuple[Request, ...]) -> dict[str, tuple[int, float, int]]:
    return {one.id: (one.prompt_tokens, one.think_s, one.output_tokens) for one in requests}


def test_one_slot_more_adds_requests_and_changes_none(recorded: Path) -> None:
    few, more = (build(f"trace:path={recorded},sessions={n},hours=0.3", seed=4) for n in (3, 4))
    one, other = names(list(few.requests)), names(list(more.requests))
    assert other.items() > one.items()
    prompts = {
        request.id: [s for s in request.prompt if s.stream < STREAM_ANSWER] for request in more.requests
    }
    for request in few.requests:
        assert [s for s in request.prompt if s.stream < STREAM_ANSWER] == prompts[request.id]


def test_another_seed_draws_other_sessions_and_the_same_seed_the_same(recorded: Path) -> None:
    spec = f"trace:path={recorded},sessions=3,hours=0.3"
    assert build(spec, seed=1).hash == build(spec, seed=1).hash != build(spec, seed=2).hash


def test_slots_draw_without_end_and_enter_long_sessions_more_often() -> None:
    slots = Slots(of(CHAT, ONE), 0)
    firsts = [next(slots.plays(slot)) for slot in range(400)]
    assert sum(play.session is CHAT for play in firsts) > 380, "it takes a hundred times as long"
    assert {play.begin for play in firsts if play.session is CHAT} >= {4}
    assert all(not play.session.nodes[play.begin].sub for play in firsts)
    later = list(islice(slots.plays(0), 1, 200))
    assert {play.begin for play in later} == {0}
    assert 60 < sum(play.session is ONE for play in later) < 140


def test_a_slot_begins_its_next_session_when_the_one_before_has_ended() -> None:
    draft = closed_loops(of(ONE), 1, 6.0, 0)
    count = len(draft.requests)
    assert 250 < count <= 1501, "four tokens take a slot at least 4 ms, and its beginning at most 5 s"
    assert [request.after for request in draft.requests] == [(), *((at,) for at in range(count - 1))]
    assert len({request.session for request in draft.requests}) == count


def test_a_turn_after_sub_agents_waits_for_all_of_them() -> None:
    draft = as_recorded(of(CHAT))
    place = {request.id.rpartition(".")[2]: at for at, request in enumerate(draft.requests)}
    assert draft.requests[place["4"]].after == tuple(sorted((place["1"], place["3"])))
    assert [draft.requests[place[n]].kind for n in "0123"] == ["turn", "turn", "agent", "agent"]


def test_without_sub_agents_a_turn_waits_for_the_turn_before() -> None:
    (session,) = of(CHAT, subagents=False).sessions
    assert [(node.after, node.parent, node.common) for node in session.nodes] == [
        ((), -1, 0),
        ((0,), 0, 110),
        ((0, 1), 1, 150),
    ]


def test_long_pauses_are_cut_divided_and_said() -> None:
    cut = as_recorded(of(CHAT, max_think=60.0, speed=10.0))
    assert max(request.think_s for request in cut.requests) == 6.0
    assert "25.0 % of the pauses are cut to 60 s" in cut.note
    assert not as_recorded(of(CHAT, max_think=700.0)).note


def test_answers_as_new_text_share_the_prompt_only() -> None:
    kept, new = (as_recorded(of(CHAT, answers=answers)) for answers in (True, False))
    assert any(span.stream >= STREAM_ANSWER for span in kept.requests[-1].prompt)
    assert not any(span.stream >= STREAM_ANSWER for one in new.requests for span in one.prompt)
    assert [one.prompt_tokens for one in kept.requests] == [one.prompt_tokens for one in new.requests]


def test_sessions_share_their_first_tokens_only_if_told_so() -> None:
    for share, common in ((True, 40), (False, 0)):
        one, other = as_recorded(of(ONE, ONE, share=share)).requests
        tree = PrefixTree()
        tree.insert(one.prompt)
        assert tree.match(other.prompt) == common


def test_a_session_ends_before_its_first_request_that_does_not_fit() -> None:
    fits = of(CHAT, ONE, longest=149)
    assert [len(session.nodes) for session in fits.sessions] == [1, 1]
    assert fits.left_out == (4, 0)
    with pytest.raises(UsageError, match="no session's first request fits in 20 tokens"):
        of(CHAT, ONE, longest=20)


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.requests.loads.sessions.MOST_REQUESTS", 10)
    with pytest.raises(UsageError, match="sessions at once are more than 10 requests"):
        closed_loops(of(ONE), 4, 100.0, 0)


def test_drawn_agents_have_the_medians_that_were_asked_for() -> None:
    work = build("agents:sessions=3,different=400,hours=0.1,subagents=0.1,turns=10,think=4")
    again = build("agents:sessions=3,different=400,hours=0.1,subagents=0.1,turns=10,think=4")
    assert work.hash == again.hash
    assert {request.kind for request in work.requests} == {"turn", "agent"}
    assert any(len(request.after) > 1 for request in work.requests)
    hits, tree = 0, PrefixTree()
    for request, answered in zip(work.requests, with_answers(work.requests), strict=True):
        hits += tree.match(request.prompt)
        tree.insert(answered.prompt)
    assert 0.8 < hits / work.prompt_tokens < 1.0


def test_a_conversation_over_the_window_is_compacted() -> None:
    work = build("agents:sessions=1,different=40,window=30k,hours=3,share=no")
    assert work.longest < 110_000
    turns = [request for request in work.requests if request.after]
    assert any(later.prompt_tokens < before.prompt_tokens for before, later in pairwise(turns))
