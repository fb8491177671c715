"""Asks vLLM about a set-up's model under its flags."""

from __future__ import annotations

import msgspec

from kvtune.doctor.facts import Facts
from kvtune.engine import ask
from kvtune.engine.setup import Setup


def ask_vllm(setup: Setup) -> Facts:
    """Return facts from vLLM's own configuration and KV specs. KvtuneError, with its reason, if it refuses flags."""
    return msgspec.convert(ask.facts(setup), Facts)
