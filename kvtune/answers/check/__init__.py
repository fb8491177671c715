"""Whether a hit gives the answer that a recomputation gives: `kvtune check URL`.

In: a running server, and consent to send it load. Out: a `Check`, which is `--json`, and its Document. `paths` are the
ways to a hit; `course` takes them; `judge` compares each answer with the cold one of its prompt, in the measure of what
cold answers differ by; `result` puts it together.
"""
