"""The steady-decode path: `schedule` and `update_from_output` for steps that only decode. Runs in EngineCore.

In: schedulers and KV cache managers as vLLM built them. Out: the same decisions and outputs for less host time, with
almost no objects for the garbage collector. Loaded by `core.plugin`;
lab/sim/fast/scheduler.py says what the simulator uses of it.

    schedule():
      lockstep? -- no --------------------------> stock
        | yes: same running requests, all plain decodes, nothing can be admitted
      rows due now (a block ends, a window moves, a last token is in flight): KV manager, in order
        | too few blocks, or anything else -----> stock (which also reports blocks already placed)
      add one computed token to every row

    update_from_output():
      one token a row, nothing else in the output? -- no --> stock
      rows that may stop, or carry statistics --> stock's update_from_output, with those rows alone
      all others: append the token, hash a full block, build the output

All state is in vLLM's requests, which are updated in each step; a Cohort only knows when each next needs more than a
token. A Cohort is dropped whenever stock schedules a step, and built again at the next plain decode. A step in flight
keeps the Rows it was scheduled with, so requests may finish or be aborted meanwhile (async scheduling).
Stock schedules in these cases: speculative decoding, LoRA, connectors, KV events, pipeline parallelism, encoders,
pooling, MFU metrics, groups other than full attention, sliding windows and aligned states, blocks hashed in finer units
than allocated; steps with logprobs, structured output, streaming input or throttled prefills; steps in which a waiting
request might be admitted.
"""
