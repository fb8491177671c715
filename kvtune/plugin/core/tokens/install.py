"""Installs the array form of sampled tokens (`core.rows`): how workers send them, how EngineCore outputs them."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.tokens import runners
from kvtune.plugin.core.tokens.rows import Packed, pack, unpack
from kvtune.plugin.vllm.plugin_state import STATE

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import ModelRunnerOutput

PART = "tokens.install"

Fields = dict[str, object]
"""A ModelRunnerOutput's attributes, without `sampled_token_ids` if these are packed."""


def reduce_output(
    output: ModelRunnerOutput,
) -> tuple[Callable[..., ModelRunnerOutput], tuple[Fields, Packed | None]]:
    fields = dict(output.__dict__)
    packed = None
    with suppress(Exception):  # the rows then go as they are
        packed = pack(fields["sampled_token_ids"])
    if packed is not None:
        del fields["sampled_token_ids"]
    return restore_output, (fields, packed)


def restore_output(fields: Fields, packed: Packed | None) -> ModelRunnerOutput:
    """Rebuild a ModelRunnerOutput in EngineCore, from what the worker pickled."""
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput.__new__(ModelRunnerOutput)
    output.__dict__.update(fields)
    if packed is not None:
        output.sampled_token_ids = unpack(packed)
    return output


def install(settings: CoreSettings) -> None:
    """Pack the tokens that workers send, and make lists of tokens only when they are read."""
    STATE.remove(PART)
    if not settings.rows:
        return
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import ModelRunnerOutput

    STATE.hand_back[PART] = hand_back
    copyreg.pickle(ModelRunnerOutput, reduce_output)

    def looping(_: EngineCoreProc) -> None:
        STATE.outputs_are_encoded = True

    # Plugins are loaded inside EngineCoreProc's constructor: its loop is the first method that can be wrapped.
    STATE.patches.before(PART, EngineCoreProc, "_process_input_queue", looping)
    runners.install()
    state.part("rows", True)


def hand_back() -> None:
    """Send what stock sends, from now on."""
    from vllm.v1.outputs import ModelRunnerOutput

    STATE.outputs_are_encoded = False
    copyreg.dispatch_table.pop(ModelRunnerOutput, None)
    STATE.patches.undo(runners.PART)
    STATE.patches.undo(PART)
