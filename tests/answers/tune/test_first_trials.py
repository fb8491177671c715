"""A search begins with each order of eviction alone, at the defaults of all other knobs."""

from __future__ import annotations

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.search import _default_first, tuned_space
from kvtune.answers.tune.storage import OptunaStudy
from kvtune.data.knobs import ModelFacts
from kvtune.lab.setup.setup import Load, Setup

BENCH = Setup(model="m", load=Load(spec="rounds", seed=0, hash="h"), vllm="0.32.0", core="kvtune")


def test_each_order_is_tried_alone_first() -> None:
    space = tuned_space(ModelFacts(window=512), {})
    space = {name: _default_first(name, values) for name, values in space.items()}
    study = OptunaStudy(BENCH, OBJECTIVES["hit-rate"], 0)
    for order in space["policy"]:
        study.propose_first(space, {"policy": str(order)})
    asked = [study.ask(space)[1] for _ in space["policy"]]
    assert [settings["policy"] for settings in asked] == ["first", "two_class", "chat"]
    for settings in asked:
        assert settings["slack"] == 512 and settings["pin_window"] == 0 and settings["min_drop"] == 16
        assert settings["prefix_cache_retention_interval"] == 0


def test_a_plain_models_search_is_over_bonus_and_ghost() -> None:
    space = tuned_space(ModelFacts(), {"block_size": "16"})
    assert list(space) == ["reuse_bonus_s", "ghost_factor"]
