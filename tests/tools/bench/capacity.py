"""Writes reports/tables/capacity.md: how many recorded sessions fit a 70B model on 4 x 80 GiB, and how long that takes.

python -m tests.tools.bench.capacity
"""

from __future__ import annotations

import io
import json
import resource
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from kvtune.cli.app import run
from tests.recorded_sessions import unpacked

TABLE = Path(__file__).parents[3] / "reports" / "tables" / "capacity.md"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}
"""Llama 3.1 70B."""
ASKED: tuple[tuple[str, list[str]], ...] = (
    ("Step times not known", []),
    ("Step times of a 70B by arithmetic: 15 ms + 0.07 ms a prompt token", ["--cost", "token=0.07,step=15"]),
)


ABOUT = (
    "the 31 recorded sessions of tests/data on the shape of Llama 3.1 70B in bf16, as on one device of 320 GiB. "
    "Simulated: no GPU was used."
)


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parts = ["# How many sessions fit", "", f"`python -m tests.tools.bench.capacity`: {ABOUT}"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "llama-70b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE))
        sessions = unpacked(folder)
        for title, words in ASKED:
            out = io.StringIO()
            began_s, began_cpu_s = time.monotonic(), cpu_s()
            with redirect_stdout(out), redirect_stderr(io.StringIO()):
                code = run(
                    [
                        *(
                            "capacity",
                            str(model),
                            "-w",
                            f"trace:path={sessions}",
                            "--like-device",
                            "320GiB",
                            *words,
                        ),
                        *("--", "--load-format", "dummy", "--skip-tokenizer-init"),
                    ]
                )
            assert code == 0, out.getvalue()
            took = f"{cpu_s() - began_cpu_s:.0f} CPU seconds, {time.monotonic() - began_s:.0f} s on a shared machine"
            parts += ["", f"## {title}", "", f"{took}.", "", "```", out.getvalue().rstrip(), "```"]
    TABLE.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
