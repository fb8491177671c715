"""Whether a hit gives the answer that a recomputation gives: `kvtune check URL`.

In: a running server, and consent to send it load. Out: a `Check`, which is `--json`, and its Document. `paths`: the
ways to a hit; each has primers, which fill the cache under a cache_salt of their own, and ends with the same prompt;
what its answer says of the hit proves that it was taken. `asking` sends, `course` says what. `judge` compares each
answer with the cold one of its prompt, in the measure of what cold answers differ by; answers to prompts with a block
exchanged say what it would see. `verdict` puts it together, `common` says what the wrong hits share.
"""
