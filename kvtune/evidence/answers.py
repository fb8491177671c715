"""Asks a model with real weights questions on shared texts, with either core.

`answers` (the CLI's process) runs this module as `python -m kvtune.evidence.answers PLAN OUT`: vLLM's LLM, greedy, in
float32, one round of questions (one on each text) after the other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from kvtune.engine.faults import cause
from kvtune.engine.sockets import sockets_in
from kvtune.errors import KvtuneError
from kvtune.evidence.reading import Question
from kvtune.run.scratch import scratch

LIMIT_S = 1200
OUTPUT_TOKENS = 8
BLOCKS = 430
"""Just more than four texts and a running request need; with fewer, neither core hits anything."""
ENGINE: dict[str, str | int | bool] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "disable_log_stats": False,
}


class AnswerPlan(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompts: list[str]
    at_once: int
    """Prompts that are sent together: one per text."""
    blocks: int


class Answered(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[list[int]]
    texts: list[str]
    prompt_tokens: int
    hit_tokens: int
    preemptions: int


def answers(
    folder: Path, core: Literal["kvtune", "stock"], questions: list[Question], blocks: int
) -> Answered:
    """Start an engine and ask it everything. KvtuneError with the cause if the engine fails."""
    texts = len({q.text for q in questions})
    plan = AnswerPlan(model=str(folder), prompts=[q.prompt for q in questions], at_once=texts, blocks=blocks)
    environment = {**os.environ, "KVTUNE_CORE": core, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name in ("KVTUNE_SET", "KVTUNE_RECIPE"):
        environment.pop(name, None)
    with scratch("answers") as work:
        # KVTUNE_RUN_DIR makes vLLM's processes end with the one that started them, even if it was killed.
        environment |= {"KVTUNE_RUN_DIR": str(work), "KVTUNE_PROBE": "off", **sockets_in(work)}
        (work / "plan.json").write_bytes(msgspec.json.encode(plan))
        out, log = work / "answers.json", work / "log"
        command = [sys.executable, "-m", "kvtune.evidence.answers", str(work / "plan.json"), str(out)]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # EngineCore outlives a front end that is killed, so kill the whole session.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0 or not out.exists():
            why = f"did not end in {LIMIT_S} s" if code is None else cause(log.read_text(errors="replace"))
            raise KvtuneError(
                f"asking {folder.name} with core {core} failed: {why or f'exit {code}'}",
                f"run it alone to see why: kvtune profile {folder} -- --kv-cache-memory-bytes 1G",
            )
        return msgspec.json.decode(out.read_bytes(), type=Answered)


def right(answered: Answered, questions: list[Question]) -> int:
    """Number of answers that begin with the right word."""
    return sum(
        text.strip().startswith(question.answer)
        for text, question in zip(answered.texts, questions, strict=True)
    )


def same(a: Answered, b: Answered) -> int:
    """Number of answers that are equal token by token."""
    return sum(x == y for x, y in zip(a.tokens, b.tokens, strict=True))


def main() -> None:
    from kvtune.probe.lifetime import die_with_parent

    die_with_parent(signal.SIGKILL)
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=AnswerPlan)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model=plan.model, num_gpu_blocks_override=plan.blocks, **ENGINE)
    tokenizer = engine.get_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    answered = Answered(tokens=[], texts=[], prompt_tokens=0, hit_tokens=0, preemptions=0)
    for start in range(0, len(plan.prompts), plan.at_once):
        prompts = [
            TokensPrompt(
                prompt_token_ids=[tokenizer.bos_token_id, *tokenizer.encode(p, add_special_tokens=False)]
            )
            for p in plan.prompts[start : start + plan.at_once]
        ]
        for answer in engine.generate(prompts, greedy, use_tqdm=False):
            answered.tokens.append(list(answer.outputs[0].token_ids))
            answered.texts.append(answer.outputs[0].text)
            answered.prompt_tokens += len(answer.prompt_token_ids)
            answered.hit_tokens += answer.num_cached_tokens or 0
    answered.preemptions = sum(
        int(metric.value) for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answered))


if __name__ == "__main__":
    main()
