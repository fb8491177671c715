"""A pytest plugin for vLLM's own tests of its front end: what plain outputs a test gives to an OutputProcessor, one or
many, reach it as columns, over the wire's encoding. Loaded by vllm_own.py beside the core's plugin.
"""

from __future__ import annotations

from typing import Any

import vllm.v1.engine.output_processor as module
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.outputs import install, outlet

assert state.state()["parts"]["front_end"] is True, "the core is not active"
outlet.FEWEST = 1
OUTLET = "kvtune_test_outlet"
_init = module.OutputProcessor.__init__
_process = module.OutputProcessor.process_outputs
_encoder, _decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
packed = 0
"""Messages with columns, in this process."""


def _built(self: Any, *args: Any, **options: Any) -> None:
    _init(self, *args, **options)
    install.adopt(self)
    own = outlet.Outlet(0, Breaker())
    own.ask(0)
    setattr(self, OUTLET, own)


def _processed(self: Any, engine_core_outputs: list[Any], *args: Any, **options: Any) -> Any:
    global packed
    sent = getattr(self, OUTLET).pack(0, engine_core_outputs, self.request_states)
    if sent is not engine_core_outputs:
        packed += 1
        parts = _encoder.encode(EngineCoreOutputs(outputs=sent))
        sent = _decoder.decode([bytes(part) for part in parts]).outputs
    return _process(self, sent, *args, **options)


module.OutputProcessor.__init__ = _built
module.OutputProcessor.process_outputs = _processed


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"messages with columns: {packed}")
