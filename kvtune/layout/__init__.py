"""What a model's KV blocks come to: sizes, groups, waste. Arithmetic only.

In: a config.json, or a `ModelShape`. Out: layouts with what each costs. `plan.py` and `config.py` import `errors` only,
so that the tuner may use them anywhere; the tests run vLLM's own code over the same configs.
Imported by: bounds, doctor, evidence, explain, report, tune.

    config.py   config.json -> ModelShape, one reader per family of recurrent layers
    plan.py     ModelShape -> block sizes, by the two rules below
    choice.py   stock's layout and the packed ones beside each other, Pareto front, a recommendation

    rule: per layer (vLLM 0.32)
      a state fits     one attention layer's page
      block            A * ceil(state / (A * bytes of a token in a layer))
      groups           of the smallest kind's layers
    rule: aggregate (core.packed)
      k states fit     all attention layers' pages together
      block            A * ceil(k * state / (A * bytes of a token in all attention layers))
      groups           1 + ceil(state layers / k)

A is what the attention backend takes (GPU 16, CPU 32), or `--block-size` where that is larger.
"""
