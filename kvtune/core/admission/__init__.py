"""Admission by cached prefix (`admission=longest_prefix`, off by default): another waiting queue for a scheduler.

In: a scheduler that vLLM has built. Out: the same scheduler, which admits the waiting request with most cached tokens
first. Only the queue is replaced, so this holds in both of vLLM's schedulers and in the simulator's passes alike.
Imported by `core.plugin` only.

    peek_request(): did a request come back (preempted, skipped), or has the first rules of its own? -> stock's order
                    has the first not waited through a whole step yet?                              -> the first
                    was the first overtaken longer ago than admission_age_s?                        -> the first
                    else: most cached blocks on record, looked up again by vLLM's own lookup until it holds

`prefixes.py` who has most in the cache: a heap; requests filed under the hash that would lengthen them.
`waiting.py` the queue, stock's exceptions, what is counted; a look-up that raises leaves stock's order for good.
`passes.py` who was overtaken, since when, until when.
`install.py` which schedulers get it: none with priorities, without caching, or without a full-attention group.

A request with structured output or streaming input is a fence: nobody passes it. A block stored costs one look into a
dict more, an admission one lookup more of vLLM's kind (reports/tables/admission_cost.md).
Loads that it harms: reports/tables/admission.md.
"""
