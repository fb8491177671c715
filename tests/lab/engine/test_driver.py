"""What waits for an engine ends when the engine dies: also what vLLM would never answer."""

from __future__ import annotations

import asyncio

import pytest

from kvtune.lab.engine.driver import unless_dead


class Dead(Exception):
    pass


class Engine:
    errored = False
    dead_error = Dead()


async def within(engine: Engine, seconds: float, ended: list[str]) -> str:
    try:
        await asyncio.sleep(seconds)
        return "done"
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise


def waited(engine: Engine, seconds: float, grace_s: float = 0.05) -> tuple[str | Dead, list[str]]:
    ended: list[str] = []

    async def wait() -> str:
        return await unless_dead(engine, within(engine, seconds, ended), look_s=0.01, grace_s=grace_s)

    try:
        return asyncio.run(asyncio.wait_for(wait(), 30)), ended
    except Dead as error:
        return error, ended


def test_a_live_engine_has_all_the_time_it_takes() -> None:
    assert waited(Engine(), 0.1) == ("done", [])


def test_a_call_that_a_dead_engine_never_answers_ends_with_the_engines_error() -> None:
    engine = Engine()
    engine.errored = True
    outcome, ended = waited(engine, 1000)
    assert outcome is engine.dead_error and ended == ["cancelled"]


def test_what_fails_by_itself_says_why() -> None:
    engine = Engine()
    engine.errored = True

    async def failing() -> None:
        await asyncio.sleep(0.03)
        raise ValueError("the reason")

    async def wait() -> None:
        await unless_dead(engine, failing(), look_s=0.01, grace_s=10.0)

    with pytest.raises(ValueError, match="the reason"):
        asyncio.run(wait())


def test_what_ends_within_the_grace_counts() -> None:
    engine = Engine()
    engine.errored = True
    assert waited(engine, 0.1, grace_s=20.0) == ("done", [])
