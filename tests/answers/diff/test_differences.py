"""What `kvtune diff` says of two answers: figures, defaults, names, the sentence, limits. No vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtune.answers.diff.answers import Answers, Figures, ModelReply, OfVersion
from kvtune.answers.diff.differences import broken, compare
from kvtune.answers.diff.document import document, headline
from kvtune.answers.diff.replays import partings
from kvtune.answers.diff.result import Diff, Load, Replayed
from kvtune.base.errors import EXIT_UNKNOWN, KvtuneError, UsageError
from kvtune.data.run.types import Run
from kvtune.data.show.markdown import markdown
from kvtune.reading.analysis.comparison.fail_on import parse_fail_on
from tests.reading.analysis.made import header_of, table

OLD = OfVersion(
    version="0.32.0",
    names={
        "flags": {"--same": "1", "--moved": "auto", "--rope-scaling-type": "None", "--dropped": "False"},
        "metrics": dict.fromkeys(["vllm:gpu_cache_usage_perc", "vllm:num_requests_running"], ""),
        "KV events": dict.fromkeys(["BlockStored", "BlockStored.block_hashes", "BlockStored.medium"], ""),
    },
)
NEW = OfVersion(
    version="0.33.0",
    names={
        "flags": {"--same": "1", "--moved": "None", "--rope-scaling-types": "None", "--drops": "8"},
        "metrics": dict.fromkeys(
            ["vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:watermark_requests"], ""
        ),
        "KV events": dict.fromkeys([*OLD.names["KV events"], "BlockStored.lookahead_token_ids"], ""),
    },
)


def model(name: str, block: int, hits: list[int], pool: int = 100_000, **settings: str) -> ModelReply:
    """A hybrid with this block."""
    figures = Figures(
        gpus=1,
        groups=["1 x 12 full attention"],
        block=block,
        hit_unit=block,
        hits=[round(100 * hit / 6200, 2) for hit in hits],
        pool_tokens=pool,
        idle_tokens=pool,
        concurrency=pool / 10_000,
        prefix_caching=True,
        retention="0",
        chunk=8192,
        seats=1024,
    )
    return ModelReply(model=name, figures=figures, settings=settings)


def compared(old: list[ModelReply], new: list[ModelReply], load: Load | None = None) -> Diff:
    before, after = (
        Answers(version=version, models={one.model: one for one in models})
        for version, models in ((OLD, old), (NEW, new))
    )
    return compare(before, after, "an H100", load)


def hybrid() -> Diff:
    return compared(
        [model("a", 544, [5984, 5984], policy="fcfs"), model("b", 16, [6000, 6000], policy="fcfs")],
        [model("a", 576, [5760, 5760], 90_000, policy="lpm"), model("b", 16, [6000, 6000], policy="fcfs")],
    )


def test_the_sentence_names_the_model_whose_hits_move_and_why() -> None:
    assert headline(hybrid()) == (
        "a hits 93/93 % of a prefix that comes back instead of 97/97 %: blocks of 576 tokens instead of 544 "
        "from vLLM 0.32.0 to 0.33.0; 1 of 2 models differ"
    )


def test_a_model_differs_in_the_figures_that_differ() -> None:
    first, second = hybrid().models
    assert list(first.differs) == ["block", "hit_unit", "hits", "pool_tokens", "idle_tokens", "concurrency"]
    assert first.differs["block"] == (544, 576)
    assert second.differs == {}


def test_defaults_are_named_with_the_models_for_which_they_moved() -> None:
    moved = [(one.setting, one.old, one.new, one.models) for one in hybrid().defaults]
    assert moved == [("--moved", "auto", "None", []), ("policy", "fcfs", "lpm", ["a"])]


def test_names_are_gone_new_or_renamed() -> None:
    found = {one.of: one for one in hybrid().names}
    flags = found["flags"]
    assert (flags.gone, flags.new, flags.renamed) == (
        ["--dropped"],
        ["--drops"],  # with another default: not the same thing
        {"--rope-scaling-type": "--rope-scaling-types"},
    )
    assert found["metrics"].renamed == {"vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc"}
    assert found["metrics"].new == ["vllm:watermark_requests"]
    assert found["KV events"].new == ["BlockStored.lookahead_token_ids"]


def test_a_side_that_could_not_be_asked_makes_nothing_gone() -> None:
    nothing = replace(OLD, names={}, missed=["flags: ImportError: no flags"])
    for sides in ((nothing, OLD), (OLD, nothing)):
        old, new = (Answers(version=side, models={}) for side in sides)
        assert compare(old, new, "an H100").names == []


def test_a_version_compared_with_itself_differs_in_nothing() -> None:
    answers = Answers(version=OLD, models={"a": model("a", 544, [5984, 5984], policy="fcfs")})
    same = compare(answers, answers, "an H100")
    assert not same.defaults and not same.names and not same.models[0].differs
    assert headline(same).startswith("no figure differs from vLLM 0.32.0 to 0.32.0 for 1 model")


def test_what_a_version_does_not_know_is_one_line_and_the_rest_is_compared() -> None:
    unknown = ModelReply(model="a", missed=["vLLM refuses a: no such architecture"])
    found = compared(
        [unknown, model("b", 16, [6000, 6000])],
        [model("a", 576, [5760, 5760]), model("b", 32, [5984, 5984])],
    )
    assert found.models[0].failed == ["old: vLLM refuses a: no such architecture"]
    assert found.models[0].new is not None and found.models[1].differs
    assert "a: old: vLLM refuses a: no such architecture" in markdown(document(found))


def test_a_model_that_nobody_could_be_asked_about_is_no_equal_one() -> None:
    found = compared([ModelReply(model="a", missed=["refused"])], [model("a", 576, [5760, 5760])])
    assert headline(found) == "a cannot be compared: old: refused"


def played(hits: int) -> Replayed:
    return Replayed(
        query_tokens=1000,
        hit_tokens=hits,
        misses={"evicted": 900 - hits, "cold": 100},
        preemptions=0,
        tokens_computed_twice=0,
        steps=10,
        requests_in_a_step=1.0,
        prefill_tokens=1000 - hits,
        decode_tokens=10,
        first_token_ms=20.0,
        token_gap_ms=8.06,
    )


def test_a_loads_hits_lead_the_sentence() -> None:
    load = Load(workload="rounds", old=played(900), new=played(700))
    found = compared([model("a", 544, [5984, 5984])], [model("a", 576, [5760, 5760])], load)
    assert headline(found) == (
        "your hits fall from 90.0 to 70.0 % from vLLM 0.32.0 to 0.33.0: blocks of 576 tokens instead of 544"
    )
    assert "kept, then evicted" in markdown(document(found))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hits < -2", ["a: hits < -2: 96.52 -> 92.9 is -3.62"]),
        ("hits < -5", []),
        ("pool_tokens < -5 %", ["a: pool_tokens < -5 %: 100000 -> 90000 is -10 %"]),
        ("pool_tokens < -10%", []),
        ("block > +0", ["a: block > +0: 544 -> 576 is +32"]),
        ("hits < -2 and block > 600", []),
        ("defaults > 2 or unknown > 0", []),
    ],
)
def test_limits(text: str, said: list[str]) -> None:
    assert broken(hybrid(), parse_fail_on(text)) == said


def test_a_limit_of_names_is_of_all_of_them() -> None:
    assert broken(hybrid(), parse_fail_on("gone > 2"))[0] == "a: gone > 2: it is 3"


def test_a_limit_of_hits_is_the_loads_where_there_is_one() -> None:
    load = Load(workload="rounds", old=played(900), new=played(880))
    found = compared([model("a", 544, [5984, 5984])], [model("a", 576, [0, 0])], load)
    assert broken(found, parse_fail_on("hits < -1")) == ["a: hits < -1: 90 -> 88 is -2"]
    assert broken(found, parse_fail_on("hits < -3")) == []


def test_a_limit_of_what_is_not_known_is_no_success() -> None:
    found = compared([ModelReply(model="a", missed=["refused"])], [model("a", 576, [5760, 5760])])
    with pytest.raises(KvtuneError) as error:
        broken(found, parse_fail_on("hits < -2"))
    assert error.value.exit_code == EXIT_UNKNOWN


@pytest.mark.parametrize("text", ["hits", "hits <", "hit < -2", "rm -rf < 1"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        broken(hybrid(), parse_fail_on(text))


def run_of(hits: list[int], scheduled: list[int], block: int = 16) -> Run:
    rows = len(scheduled)
    steps = table(
        "steps",
        requests=[1] * rows,
        scheduled_tokens=scheduled,
        prefill_tokens=scheduled,
        preempted=[0] * rows,
    )
    header = header_of()
    header = replace(header, engine=replace(header.engine, block_size=block))
    return Run(header, {"requests": table("requests", hit_tokens=hits), "steps": steps})


def sites(tmp_path: Path) -> tuple[Path, Path]:
    """Two vLLMs: another scheduler, another pool, other blocks."""
    bodies = {
        "v1/core/block_pool.py": "class BlockPool:\n    def touch(self): return {}",
        "v1/core/sched/scheduler.py": "class Scheduler:\n    def schedule(self): return {}",
        "platforms/interface.py": "class Platform:\n    def _align_hybrid_block_size(self): return {}",
    }
    for number in (0, 1):
        for name, body in bodies.items():
            path = tmp_path / str(number) / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body.format(number))
    return tmp_path / "0", tmp_path / "1"


def test_the_first_request_and_the_first_step_that_differ(tmp_path: Path) -> None:
    """Each has the symbols that decide it: the pool's of hits, the scheduler's of steps."""
    old, new = run_of([0, 64, 64], [64, 16, 1, 1]), run_of([0, 64, 32], [64, 16, 33])
    differing = list(partings(old, new, *sites(tmp_path)))
    assert [one.symbols for one in differing] == [
        ["vllm.v1.core.block_pool.BlockPool.touch"],
        ["vllm.v1.core.sched.scheduler.Scheduler.schedule"],
    ]
    found = [(one.what, one.number, one.old, one.new) for one in differing]
    assert found[0] == ("request", 3, "hit tokens 64", "hit tokens 32")
    assert found[1][:2] == ("step", 3) and "scheduled tokens 33" in found[1][3]
    assert list(partings(old, old, *sites(tmp_path))) == []


def test_other_blocks_are_behind_all_that_differs(tmp_path: Path) -> None:
    old, new = run_of([0, 64], [64, 16], block=544), run_of([0, 32], [64, 48], block=576)
    symbol = "vllm.platforms.interface.Platform._align_hybrid_block_size"
    assert [one.symbols for one in partings(old, new, *sites(tmp_path))] == [[symbol], [symbol]]


def test_more_steps_are_a_parting_too(tmp_path: Path) -> None:
    (found,) = partings(run_of([0], [64, 1]), run_of([0], [64, 1, 1]), tmp_path, tmp_path)
    assert (found.what, found.number, found.old) == ("step", 3, "none") and "requests 1" in found.new
