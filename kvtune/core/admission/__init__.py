"""Which waiting request is admitted next (`admission=longest_prefix`, off by default). Runs in EngineCore.

Another queue in the place of `scheduler.waiting`, so it holds for both of vLLM's schedulers and for the simulator;
jumps over steps in which a request waits stand aside for it.

    peek_request():
      a preempted or skipped request, or one with rules of its own, is first? -- yes --> stock's order
        | no: has the first one waited through a whole step? -- no --> the first one
      was it first overtaken longer ago than admission_age_s? -- yes --> the first one
        | no
      most cached blocks on record, looked up again by vLLM's own lookup until it holds --> that one

    install.py     which schedulers get it: not with priorities, without caching, or without a full-attention group
    waiting.py     the queue, stock's exceptions, counters; falls back to stock's order when a lookup raises
    prefixes.py    the request with most blocks in the cache: a heap, with a bounded cost a look
    passes.py      which requests were overtaken, since when and until when

A request with structured output or streaming input is a fence: those behind it are not ranked before it is gone.
Models with windows or states: a hit that appears while a request waits, behind what its full-attention group holds, is
seen when its turn for another look comes, one such request a call.
Which loads it gains on and which it harms: reports/tables/admission.md; its cost: reports/tables/admission_cost.md.
"""
