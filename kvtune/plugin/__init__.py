"""What vLLM's processes load: the core, the probe, and what they know of vLLM. Imports base and data's tables."""
