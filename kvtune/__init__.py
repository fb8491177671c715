"""kvtune: profile and tune the KV cache of a vLLM engine."""

__version__ = "0.1.0"
