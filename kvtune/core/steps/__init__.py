"""The steady-decode path: `schedule` and `update_from_output` for steps that only decode. Runs in EngineCore.

In: schedulers and KV cache managers as vLLM built them. Out: the same decisions and outputs for less host time, with
almost nothing for the collector to count. Loaded by `core.plugin`; nobody else imports it.

    schedule():
      lockstep? -- no --------------------------> stock
        | yes: same running requests, all plain decodes, nothing can be admitted
      rows due now (a block ends, a window moves, a last token is in flight): KV manager, in order
        | blocks short, or anything odd --------> stock (which also reports blocks already placed)
      count all rows one token on

    update_from_output():
      one token a row, nothing else in the output? -- no --> stock
      rows that may stop, or owe statistics --> stock's update_from_output, with those rows alone
      all others: append, hash a block when one is full, put out

    empty.py       `Quiet`: until when `allocate_slots` is a no-op for a request, in closed form
    steady.py      `Rows` (a set of requests, by column, never changed), `Cohort` (current rows, their next events)
    schedule.py    when a step is a plain decode; `schedule`
    update.py      `update_from_output`
    scheduler.py   which schedulers get the path: of exactly vLLM's type, in an engine whose steps can be plain

vLLM's Request attributes are written at each step and stay the truth; a Cohort only knows when to look. It is dropped
whenever stock schedules and made anew at the next plain decode. A step in flight keeps the Rows it was scheduled with,
so finishes and aborts in between (async scheduling) need no special case.
Stock schedules: speculative decoding, LoRA, connectors, KV events, pipeline parallelism, encoders, pooling, MFU
metrics, groups other than full attention and sliding windows, blocks hashed in finer units than allocated; steps with
logprobs, structured output, streaming input or throttled prefills; a waiting request that might be admitted.
"""
