"""Twin front ends for the columns' tests: one stock, one that reads columns, fed alike, compared after each event."""

from __future__ import annotations

import random
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# vLLM's imports warn, and here warnings are errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        FinishReason,
    )
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.metrics.stats import IterationStats, PrefillStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from kvtune.plugin.core.breaker import Breaker
    from kvtune.plugin.core.outputs import install
    from kvtune.plugin.core.outputs.message import MARK
    from kvtune.plugin.core.outputs.outlet import Outlet

PROSE = (
    "a front end gives every caller its own words; naïve café, 東京 and 🚀🚀 take several tokens each. " * 4
)
KINDS = (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE)


@cache
def tokenizer() -> Any:
    """Byte-level: characters that take several tokens are text only once all are there."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([PROSE], vocab_size=300, special_tokens=["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>")


@cache
def prose_tokens() -> list[int]:
    ids: list[int] = tokenizer()(PROSE)["input_ids"]
    return ids


@dataclass
class Side:
    """One front end, and what its callers wait on."""

    processor: OutputProcessor
    queues: dict[str, RequestOutputCollector] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)


@dataclass
class Live:
    """A request as EngineCore has it."""

    request: EngineCoreRequest
    tokens: list[int]
    """What it will generate."""
    sent: int = 0


def plain(value: Any) -> Any:
    """Values that compare: objects by their fields, arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "__dict__") and type(value).__module__.startswith(("vllm.outputs", "vllm.v1.metrics")):
        return type(value).__name__, {key: plain(each) for key, each in vars(value).items()}
    return value


NOT_COMPARED = {"queue", "parent_req", "detokenizer", "logprobs_processor"}


def state_of(processor: OutputProcessor) -> dict[str, Any]:
    """All that a front end knows of its requests."""
    states = {}
    for name, state in processor.request_states.items():
        fields = {key: plain(value) for key, value in vars(state).items() if key not in NOT_COMPARED}
        detokenizer = {k: v for k, v in vars(state.detokenizer).items() if k not in ("stream", "tokenizer")}
        # A caller that has not taken its text is not late: the text of its next chunk is compared.
        detokenizer.pop("_last_output_text_offset", None)
        states[name] = fields, plain(detokenizer), plain(state.logprobs_processor.logprobs)
    return {
        "states": states,
        "external": {key: list(ids) for key, ids in processor.external_req_ids.items()},
        "parents": sorted(processor.parent_requests),
        "lora": {
            key: (sorted(s.waiting), sorted(s.running)) for key, s in processor.lora_states.requests.items()
        },
    }


def stats_of(stats: IterationStats | None) -> Any:
    if stats is None:
        return None
    fields = {key: plain(value) for key, value in vars(stats).items()}
    return {key: sorted(v, key=repr) if isinstance(v, list) else v for key, v in fields.items()}


class Twins:
    """A stock front end and one with columns; one EngineCore's outputs for both."""

    def __init__(self, seed: int, *, log_stats: bool = True, interval: int = 1, text: bool = True) -> None:
        self.draw = random.Random(seed)
        self.text = text
        self.log_stats = log_stats
        sides = [
            Side(
                OutputProcessor(tokenizer() if text else None, log_stats=log_stats, stream_interval=interval)
            )
            for _ in range(2)
        ]
        self.stock, self.ours = sides
        install.adopt(self.ours.processor)
        self.outlet = Outlet(0, Breaker())
        self.outlet.ask(0)
        self.live: dict[str, Live] = {}
        self.clock = 100.0
        self.added = self.messages = self.by_column = 0
        self.version: str | None = "w0"
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def params(self) -> SamplingParams:
        draw = self.draw
        kind = draw.choices(KINDS, (6, 3, 1))[0]
        detokenize = self.text and draw.random() < 0.7
        return SamplingParams(
            max_tokens=draw.randint(2, 40),
            detokenize=detokenize,
            stop=["caller", "naï"] if detokenize and draw.random() < 0.15 else None,
            stream_interval=draw.choice((2, 3)) if draw.random() < 0.1 else None,
            output_kind=kind,
            n=2 if draw.random() < 0.08 else 1,
        )

    def add(self) -> None:
        number, draw = self.added, self.draw
        self.added += 1
        params = self.params()
        lora = LoRARequest(f"lora{number % 2}", 1 + number % 2, "/nowhere") if draw.random() < 0.1 else None
        prompt = [draw.randrange(300) for _ in range(draw.randint(1, 9))]
        request = EngineCoreRequest(
            f"r{number}",
            prompt,
            None,
            params,
            None,
            self.clock,
            lora,
            None,
            None,
            external_req_id=f"e{number}",
        )
        ids = [request.request_id]
        if params.n > 1:
            ids = [f"{i}_{request.request_id}" for i in range(params.n)]
        for side in (self.stock, self.ours):
            queue = RequestOutputCollector(params.output_kind, request.request_id)
            side.queues[request.request_id] = queue
            if params.n == 1:
                side.processor.add_request(deepcopy(request), None, None, 0, queue)
                continue
            parent = ParentRequest(deepcopy(request))
            for i in range(params.n):
                name, child = parent.get_child_info(i)
                one = deepcopy(request)
                one.request_id, one.sampling_params = name, child
                side.processor.add_request(one, None, parent, i, queue)
        for name in ids:
            start = draw.randrange(len(prose_tokens()) - 60)
            self.live[name] = Live(request, prose_tokens()[start : start + params.max_tokens])

    def abort(self, internal: bool) -> None:
        """A caller goes away; EngineCore hears of it later."""
        if not self.live:
            return
        request = self.draw.choice(list(self.live.values())).request
        name = request.request_id if internal else str(request.external_req_id)
        gone = [side.processor.abort_requests([name], internal) for side in (self.stock, self.ours)]
        assert gone[0] == gone[1]
        if self.draw.random() < 0.6:
            self.aborted_in_engine(gone[0])

    def aborted_in_engine(self, ids: list[str]) -> None:
        for name in ids:
            self.live.pop(name, None)

    def outputs(self, most: int) -> list[EngineCoreOutput]:
        """A step's: some requests wait, some stop, some have several tokens."""
        draw, made = self.draw, []
        for name, live in list(self.live.items()):
            if draw.random() < 0.1:
                continue
            count = min(draw.randint(1, most), len(live.tokens) - live.sent)
            output = EngineCoreOutput(name, live.tokens[live.sent : live.sent + count])
            if live.sent == 0:
                output.prefill_stats = PrefillStats(len(live.request.prompt_token_ids or ()), 1, 2, 2)
                output.events = [
                    EngineCoreEvent(EngineCoreEventType.QUEUED, self.clock - 2),
                    EngineCoreEvent(EngineCoreEventType.SCHEDULED, self.clock - 1),
                ]
            elif draw.random() < 0.03:
                output.events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, self.clock)]
            live.sent += count
            if live.sent == len(live.tokens):
                output.finish_reason = FinishReason.LENGTH
            elif draw.random() < 0.02:
                output.finish_reason, output.stop_reason = draw.choice(
                    ((FinishReason.STOP, None), (FinishReason.STOP, 7), (FinishReason.ERROR, None))
                )
            if output.finish_reason is not None:
                del self.live[name]
            made.append(output)
        return made

    def step(self, most: int = 1) -> None:
        self.clock += self.draw.random()
        if self.draw.random() < 0.02:
            self.version = self.draw.choice((None, "w1", "w2"))
        alive = set(self.live)
        outputs = self.outputs(most)
        packed = self.outlet.pack(0, deepcopy(outputs), alive)
        sent = self.encoder.encode(EngineCoreOutputs(outputs=packed, timestamp=self.clock))
        received = self.decoder.decode([bytes(part) for part in sent]).outputs
        self.messages += 1
        self.by_column += bool(received) and received[-1].request_id == MARK
        found = []
        for side, some in ((self.stock, outputs), (self.ours, received)):
            stats = IterationStats() if self.log_stats and some else None
            if stats is not None:
                stats.iteration_timestamp = self.clock + 0.5
            aborts = []
            for start in range(0, len(some), 128):
                done = side.processor.process_outputs(
                    some[start : start + 128], self.clock, stats, weight_version=self.version
                )
                assert not done.request_outputs
                aborts += done.reqs_to_abort
            side.aborted += aborts
            found.append((stats_of(stats), sorted(aborts)))
        assert found[0] == found[1]
        self.aborted_in_engine(found[0][1])

    def take(self, share: float) -> list[RequestOutput]:
        """Some callers take what is there."""
        taken = []
        for name in list(self.stock.queues):
            if self.draw.random() > share:
                continue
            theirs, ours = (side.queues[name].get_nowait() for side in (self.stock, self.ours))
            assert plain(theirs) == plain(ours), name
            if theirs is not None:
                taken.append(ours)
        return taken

    def compare(self) -> None:
        assert state_of(self.stock.processor) == state_of(self.ours.processor)
