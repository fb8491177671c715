"""Plans a model's KV blocks: sizes, groups, waste. Arithmetic only.

In: a config.json, or a `ModelShape`. Out: block layouts and what each costs. `plan.py` and `config.py` import no vLLM,
so that the tuner may use them anywhere; the tests compare them with vLLM's own code on the same configs.

    rule: per layer (vLLM 0.32)
      a state fits     into one attention layer's page
      block            A * ceil(state / (A * bytes of a token in a layer))
      groups           each of as many layers as the rarest kind of layer has
    rule: aggregate (core.packed)
      k states fit     into all attention layers' pages together
      block            A * ceil(k * state / (A * bytes of a token in all attention layers))
      groups           1 + ceil(state layers / k)

A: the attention backend's alignment (GPU 16, CPU 32), or `--block-size` where that is larger.
"""
