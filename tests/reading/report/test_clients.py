"""Result files of load generators beside run files: small ones by hand, in the real format of each tool."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.run.client_file import Times, read_client_file
from tests.simulator import run

GOLDEN = Path(__file__).parents[2] / "golden"

VLLM: dict[str, Any] = {
    "date": "20261128-060000",
    "endpoint_type": "openai-chat",
    "backend": "openai-chat",
    "label": None,
    "model_id": "shop",
    "tokenizer_id": "shop",
    "num_prompts": 12,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 2.5,
    "completed": 12,
    "failed": 0,
    "total_input_tokens": 2400,
    "total_output_tokens": 96,
    "request_throughput": 4.8,
    "output_throughput": 38.4,
    "mean_ttft_ms": 100.0,
    "median_ttft_ms": 90.0,
    "std_ttft_ms": 10.0,
    "p99_ttft_ms": 190.0,
    "mean_tpot_ms": 8.0,
    "median_tpot_ms": 7.5,
    "p99_tpot_ms": 12.0,
    "mean_itl_ms": 8.5,
    "median_itl_ms": 7.0,
    "p99_itl_ms": 30.0,
}


def metric(unit: str, avg: float, **more: float) -> dict[str, Any]:
    return {"unit": unit, "avg": avg, **more}


AIPERF: dict[str, Any] = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_throughput": metric("requests/sec", 4.8),
    "request_latency": metric("ms", 160.0, p50=150.0, p99=260.0, min=90.0, max=261.0, std=30.0, count=12),
    "request_count": metric("requests", 12.0),
    "time_to_first_token": metric("ms", 100.0, p50=90.0, p99=190.0, count=12),
    "inter_token_latency": metric("ms", 8.0, p50=7.5, p99=12.0, count=12),
    "output_token_throughput": metric("tokens/sec", 38.4),
    "total_osl": metric("tokens", 96.0),
    "input_sequence_length": metric("tokens", 200.0, p50=200.0, p99=200.0),
    "benchmark_duration": metric("sec", 2.5),
    "total_isl": metric("tokens", 2000.0),
    "total_usage_prompt_tokens": metric("tokens", 2400.0),
    "total_usage_prompt_cache_read_tokens": metric("tokens", 600.0),
    "theoretical_prefix_cache_hit": metric("%", 75.0),
    "input_config": {"models": {"items": [{"name": "shop"}]}, "endpoint": {"streaming": True}},
    "was_cancelled": False,
}


def spread(mean: float, median: float, p99: float, count: int = 12) -> dict[str, Any]:
    percentiles = {"p50": median, "p90": p99, "p99": p99}
    whole = {"mean": mean, "median": median, "mode": median, "variance": 1.0, "std_dev": 1.0, "min": 1.0}
    return {
        "successful": {
            **whole,
            "max": p99,
            "count": count,
            "total_sum": mean * count,
            "percentiles": percentiles,
        },
        "incomplete": None,
        "errored": None,
        "total": None,
    }


BENCHMARK: dict[str, Any] = {
    "type_": "generative_benchmark",
    "duration": 2.5,
    "metrics": {
        "request_latency": spread(0.16, 0.15, 0.26),
        "time_to_first_token_ms": spread(100.0, 90.0, 190.0),
        "inter_token_latency_ms": spread(8.0, 7.5, 12.0, count=84),
        "prompt_token_count": spread(200.0, 200.0, 200.0),
        "output_token_count": spread(8.0, 8.0, 8.0),
        "output_tokens_per_second": spread(38.4, 38.0, 40.0),
    },
    "requests": {"successful": [{"cached_tokens": 50}] * 12, "incomplete": [], "errored": [], "total": None},
}
GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1", "python_version": "3.11.7"},
    "config": {},
    "benchmarks": [BENCHMARK, BENCHMARK],
}
FILES = {"vllm": VLLM, "aiperf": AIPERF, "guidellm": GUIDELLM}


def written(folder: Path, name: str, value: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("name", FILES)
def test_each_tool_says_the_same_of_the_same_run(name: str, tmp_path: Path) -> None:
    results = read_client_file(written(tmp_path, name, FILES[name]))
    assert len(results) == (2 if name == "guidellm" else 1)
    for result in results:
        assert (result.requests, result.prompt_tokens, result.output_tokens) == (12, 2400, 96)
        assert result.duration_s == 2.5 and result.throughput_tok_s == 38.4
        assert result.ttft_ms == Times(mean=100.0, p50=90.0, p99=190.0)
        assert result.tpot_ms == Times(mean=8.0, p50=7.5, p99=12.0)
        assert result.itl_ms.p99 == (30.0 if name == "vllm" else None)
        assert result.model == ("" if name == "guidellm" else "shop")
        assert result.hit_rate == (None if name == "vllm" else 0.25)
        assert result.possible_rate == (0.75 if name == "aiperf" else None)
        assert result.e2e_ms.mean is None if name == "vllm" else math.isclose(result.e2e_ms.mean or 0, 160.0)


def test_a_file_of_an_earlier_aiperf_has_its_model_and_lengths_elsewhere(tmp_path: Path) -> None:
    earlier = {
        name: value for name, value in AIPERF.items() if not name.startswith(("total_", "theoretical"))
    }
    earlier |= {"input_config": {"endpoint": {"model_names": ["shop"]}}, "total_osl": metric("tokens", 96.0)}
    (result,) = read_client_file(written(tmp_path, "earlier", earlier))
    assert (result.model, result.prompt_tokens, result.output_tokens) == ("shop", 2400, 96)
    assert result.hit_rate is None


def test_their_files_stand_beside_a_run_and_what_an_infinite_cache_would_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "rounds:prefixes=4,prefix=256,suffix=32,output=4,rounds=2"
    words = [
        "profile",
        "tiny-llama",
        "--on",
        "sim",
        "-w",
        load,
        "--tries",
        "0",
        "-o",
        str(tmp_path / "runs"),
        "--json",
    ]
    assert run(words) == 0
    profile = json.loads(capsys.readouterr().out)
    (own,) = (tmp_path / "runs").rglob("*.kvrun")
    paths = [str(written(tmp_path, name, value)) for name, value in FILES.items()]
    assert run(["compare", str(own), *paths, "--json"]) == 0
    sides = json.loads(capsys.readouterr().out)["clients"]
    assert [side["name"] for side in sides] == [own.stem, "vllm", "aiperf", "guidellm #1", "guidellm #2"]
    assert sides[0]["figures"]["ttft_ms.mean"] == profile["ttft_ms"]["mean"]
    assert sides[0]["figures"]["prefix_cache.hit_rate"] == profile["prefix_cache"]["hit_rate"]
    assert 0 < sides[0]["figures"]["possible_hit_rate"] <= 256 / 288 / 2
    assert sides[1]["figures"]["ttft_ms.p99"] == 190.0
    assert run(["compare", str(own), *paths]) == 0
    text = capsys.readouterr().out
    assert "hit rate of an infinite cache" in text and "75.0 %" in text and "nothing is judged" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "it has neither the fields of vllm bench serve"),
        ('{"benchmarks": 3}', "benchmarks is no list"),
        ('{"benchmarks": []}', "has no benchmark that ended"),
        ('{"benchmarks": [{"metrics": {"request_latency": {"successful": {"count": -1}}}}]}', "count"),
        ('{"mean_ttft_ms": 3}', "completed"),
        (json.dumps({**VLLM, "mean_ttft_ms": "\x1b[31m"}), "mean_ttft_ms"),
        (json.dumps({**VLLM, "mean_ttft_ms": -1}), "mean_ttft_ms"),
        (json.dumps({**VLLM, "completed": 1 << 60}), "completed"),
        (
            json.dumps({**AIPERF, "time_to_first_token": {"unit": "\n\x1b[2Jfathoms", "avg": 1}}),
            "no unit of time",
        ),
        (json.dumps({**AIPERF, "request_count": None}), "request_count is missing"),
        ('{"a":' + "[" * 5000 + "]" * 5000 + "}", "is not JSON"),
        ('{"mean_ttft_ms": NaN, "completed": 1}', "duration"),
    ],
)
def test_a_hostile_file_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, "bad", text)
    with pytest.raises(UsageError, match=said) as caught:
        read_client_file(path)
    assert "\n" not in caught.value.message and "\x1b" not in caught.value.message
    assert str(path) in caught.value.message and caught.value.hint


def test_a_result_file_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "vllm", VLLM))
    assert run(["compare", path, path, "--fail-on", "ttft_ms.mean > +5%"]) == 2
    assert "is not judged" in capsys.readouterr().err
