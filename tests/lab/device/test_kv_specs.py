"""Between a workload and vLLM: equal answers of equal prompts, KV specs as JSON, digests, the virtual clock."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.lab.device.kv_specs import apply, restore, with_drafter
from kvtune.lab.sim.clock import VirtualClock, policies_see
from kvtune.plugin.probe.kv_specs import capture, encode
from kvtune.plugin.probe.work import digest
from kvtune.requests.loads.tokens import with_answers
from kvtune.requests.types import STREAM_ANSWER, Request, Span


def test_equal_prompts_have_equal_answers() -> None:
    """The engine is greedy: the second request's answer is the first one's, and so is the next turn's history."""
    prompt = (Span(1, 0, 100),)
    requests = [
        Request("a", prompt, 8),
        Request("b", prompt, 8),
        Request("c", (*prompt, Span(STREAM_ANSWER + 0, 0, 8), Span(2, 0, 9)), 8, after=(0,)),
        Request("d", (*prompt, Span(STREAM_ANSWER + 1, 0, 8), Span(2, 0, 9)), 8, after=(1,)),
        Request("e", (Span(5, 0, 100),), 8),
    ]
    a, b, c, d, e = (r.prompt for r in with_answers(requests))
    assert a == b and c == d and e[-1].stream == STREAM_ANSWER + 4
    assert c[-1].stream == STREAM_ANSWER + 2


def output(tokens: dict[str, int], new: list[tuple[list[int], int]], cached: list[Any]) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(block_ids=(ids,), num_computed_tokens=n) for ids, n in new],
        scheduled_cached_reqs=SimpleNamespace(
            new_block_ids=[None if ids is None else (ids,) for ids in cached],
            num_computed_tokens=[7] * len(cached),
        ),
    )


def test_a_digest_covers_decisions_but_no_request_ids() -> None:
    step = output({"x": 3, "y": 1}, [([4, 5], 0)], [None])
    assert digest(step) == digest(output({"x-17": 3, "y-18": 1}, [([4, 5], 0)], [None]))
    others = [
        output({"x": 1, "y": 3}, [([4, 5], 0)], [None]),
        output({"x": 3, "y": 1}, [([5, 4], 0)], [None]),
        output({"x": 3, "y": 1}, [([4, 5], 16)], [None]),
        output({"x": 3, "y": 1}, [([4], 0)], [[5]]),
    ]
    assert len({digest(step), *(digest(other) for other in others)}) == 5


@pytest.mark.parametrize(
    ("captured", "says"),
    [
        ({}, "version"),
        ({"version": 99}, "version 99"),
        ({"version": 1, "specs": [], "layers": {"a": 0}}, "cannot be used"),
    ],
)
def test_kv_specs_of_another_version_are_refused(captured: dict[str, Any], says: str) -> None:
    with pytest.raises(KvtuneError, match=says):
        restore(json.loads(json.dumps(captured)))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_only_vllms_spec_classes_are_instantiated() -> None:
    pytest.importorskip("vllm")
    for name in ("os.system", "Path", "KVCacheConfig"):
        captured = {"version": 1, "specs": [{"$spec": name, "fields": {}}], "layers": {"a": 0}}
        with pytest.raises(KvtuneError, match="no KV spec"):
            restore(captured)


def interface() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1 import kv_cache_interface
    return kv_cache_interface


def spec_classes() -> list[str]:
    """The names of all spec classes that a layer of the installed vLLM may have."""
    if importlib.util.find_spec("vllm") is None:
        return []
    vllm = interface()

    def below(one: type) -> set[type]:
        return {one}.union(*(below(heir) for heir in one.__subclasses__()))

    abstract = {vllm.KVCacheSpec, vllm.AttentionSpec, vllm.UniformTypeKVCacheSpecs}
    return sorted(one.__name__ for one in below(vllm.KVCacheSpec) - abstract if hasattr(vllm, one.__name__))


def odd_values() -> dict[str, Any]:
    """Values that JSON lacks, and that specs have in the wild, by field."""
    import torch
    from vllm.v1.attention.backend import MultipleOf

    vllm = interface()
    return {
        "block_size": 64,
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": torch.float8_e4m3fn,
        "block_stride_alignment": MultipleOf(64),
        "tokens_per_state": Fraction(1, 4),
        "kv_quant_mode": vllm.KVQuantMode.NVFP4,
        "cache_role": vllm.SparseCacheRole.INDEXER,
        "sliding_window": 128,
        "attention_chunk_size": 256,
        "rswa_window": 128,
        "sink_len": 64,
        "page_size": 4096,
        "blocks_per_request": 3,
        "alignment": 576,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "bounded_replay": True,
        "shapes": ((2, 3), (4,)),
        "dtypes": (torch.bfloat16, torch.float32),
    }


def one_of_each() -> dict[str, Any]:
    vllm, values, made = interface(), odd_values(), {}
    for name in spec_classes():
        spec_class = getattr(vllm, name)
        takes = {field.name for field in dataclasses.fields(spec_class) if field.init}
        if name == "MambaSpec":
            takes.discard("tokens_per_state")  # -1: a state is of all tokens
        made[name] = spec_class(**{field: value for field, value in values.items() if field in takes})
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("name", spec_classes())
def test_each_class_of_spec_comes_back_from_a_file(name: str) -> None:
    spec = one_of_each()[name]
    captured = {"version": 1, "specs": [encode(spec)], "layers": {"a": 0}}
    assert restore(json.loads(json.dumps(captured))) == {"a": spec}


@pytest.mark.vllm
def test_layers_of_one_uniform_group_come_back_with_their_own_specs() -> None:
    """As in sparse MLA: the layers of a group have pages of several sizes."""
    pytest.importorskip("vllm")
    vllm, layers = interface(), one_of_each()
    for name in ("MLAAttentionSpec", "SlidingWindowMLASpec"):
        small, large = layers[name], dataclasses.replace(layers[name], head_size=1024)
        group = vllm.KVCacheGroupSpec(
            ["a", "b"], vllm.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": small, "b": large})
        )
        captured = capture(SimpleNamespace(), vllm.KVCacheConfig(8, [], [group]))  # type: ignore[arg-type]
        assert restore(json.loads(json.dumps(captured))) == {"a": small, "b": large}


@pytest.mark.vllm
def test_specs_of_a_later_vllm_are_read() -> None:
    spec = one_of_each()["MLAAttentionSpec"]
    written: Any = encode(spec)
    written["fields"] |= {"is_draft": False, "topk_buffer_width": None}
    assert restore({"version": 1, "specs": [written], "layers": {"a": 0}}) == {"a": spec}
    written["fields"]["keeps_every_third"] = True
    with pytest.raises(KvtuneError, match="keeps_every_third"):
        restore({"version": 1, "specs": [written], "layers": {"a": 0}})


def test_a_drafter_that_an_earlier_vllm_knew_by_its_place_is_marked() -> None:
    spec = dataclasses.make_dataclass("Spec", [("block_size", int), ("is_draft", bool)])

    def marked(method: str, *marks: bool) -> list[bool]:
        config: Any = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        specs: Any = {f"layer {number}": spec(16, mark) for number, mark in enumerate(marks)}
        found: Any = with_drafter(specs, config)
        return [each.is_draft for each in found.values()]

    assert marked("mtp", False, False, False) == [False, False, True]
    assert marked("mtp", True, False) == [True, False]
    assert marked("eagle3", False, False) == [False, False]
    assert marked("mtp") == []
    plain: Any = {"a": dataclasses.make_dataclass("Plain", [("block_size", int)])(16)}
    for speculative in (None, SimpleNamespace(method="mtp")):
        assert with_drafter(plain, SimpleNamespace(speculative_config=speculative)) is plain  # type: ignore[arg-type]


def test_the_clock_queues_steps_and_never_goes_back() -> None:
    clock = VirtualClock()
    assert clock.run(2.0) == 2.0 and clock.run(1.0) == 3.0
    assert clock() == 0.0
    clock.advance_to(3.0)
    clock.advance_to(1.0)
    assert clock() == 3.0 and clock.run(0.5) == 3.5


def test_policies_see_the_virtual_clock_during_the_replay_only() -> None:
    from kvtune.plugin.core import state

    before, clock = state.books().clock, VirtualClock()
    clock.advance_to(42.0)
    with pytest.raises(RuntimeError), policies_see(clock):
        assert state.clock() == 42.0
        raise RuntimeError
    assert state.books().clock is before


def test_a_drafters_group_is_captured_last() -> None:
    """In a replay vLLM finds it again by the layer that was registered last."""
    layers = dataclasses.make_dataclass("Layers", [("block_size", int)])

    def group(name: str, block: int, eagle: bool) -> SimpleNamespace:
        return SimpleNamespace(kv_cache_spec=layers(block), layer_names=[name], is_eagle_group=eagle)

    groups = [group("attention", 16, True), group("states", 32, False)]
    config = SimpleNamespace(num_blocks=8, kv_cache_groups=groups)
    captured = capture(SimpleNamespace(), config)  # type: ignore[arg-type]
    assert list(captured["layers"]) == ["states", "attention"]  # type: ignore[call-overload]
    assert captured["groups"] == [["attention"], ["states"]]


def config(**scheduler: object) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler), parallel_config=SimpleNamespace(worker_cls="auto")
    )


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("scheduler_config", "scheduler_cls", "evil_module"),
        ("parallel_config", "worker_cls", "evil_module"),
        ("scheduler_config", "policy", "evil_module.Policy"),
        ("scheduler_config", "policy", "/evil"),
        ("scheduler_config", "policy", ["fcfs"]),
    ],
)
def test_kv_specs_set_only_what_is_captured_to_numbers_and_words(
    section: str, name: str, value: object
) -> None:
    with pytest.raises(KvtuneError, match=rf"{section}\.{name} to .* not taken from a file"):
        apply({"config": {section: {name: value}}}, config(scheduler_cls=None, policy="fcfs"), frozenset())


def test_captured_values_are_set_except_those_of_the_users_flags() -> None:
    changed = config(max_num_seqs=1, policy="fcfs", watermark=0.5)
    captured = {"max_num_seqs": 7, "policy": "priority", "watermark": 0.1}
    apply({"config": {"scheduler_config": captured}}, changed, frozenset(("watermark",)))
    assert vars(changed.scheduler_config) == {"max_num_seqs": 7, "policy": "priority", "watermark": 0.5}
