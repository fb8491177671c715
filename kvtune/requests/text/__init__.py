"""Finds and names the text that keeps prompts from hitting the prefix cache. No vLLM, no engine, no I/O.

In: prompts of a log as token ids, in the order in which they were sent, and a function that returns their text; or two
bodies. Out: divergences (a prompt differs from an earlier one, and agrees with it again later), the edits between two
prompts, groups of these, mended prompts.
"""
