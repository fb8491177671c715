"""The settings that sweeps and searches may try. Imports no vLLM."""
