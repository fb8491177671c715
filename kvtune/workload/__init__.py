"""What is sent to an engine, and when: the same spec gives the same tokens on every machine.

In: a spec `name:key=value,..` or a trace file. Out: a `Workload`: requests whose prompts are spans of seeded token
streams (no tokens yet). Imports `children`, `errors`, `files` and `units` only.
Imported by: analysis, bounds, capacity, cli, doctor, engine, explain, layout, probe, report, sim, tap, text, tune,
vllm, watch.
docs/workloads.md lists the workloads for people.

    spec.py + registry.py --> synthetic.py | trace_file.py | sessions.py --> draft.py
        --> identity.py: hash --> types.py: Workload

    spec.py          build(spec, seed=): every name, key and value is checked here
    registry.py      WORKLOADS: names, keys, defaults, help, presets; DEFAULT_SPEC. Imports neither numpy nor msgspec
    synthetic.py     decode, prefill, rounds, zipf, mix, chat: keys -> Draft
    sessions.py      conversations and what they wait for; N slots that play them
    session_loads.py loads of sessions from a workload's keys
    weka.py          recorded agent sessions, a JSON file each
    log_sessions.py  finds the sessions of a log or a trace: prompts that go on where an earlier one ended
    agents.py        sessions drawn from published quantiles
    trace_file.py    a recorded trace: format, order, requested window
    requests_file.py a log of requests as a workload
    requests_log.py  a log of requests, one JSON object a line: token ids, or bodies of OpenAI's or Anthropic's APIs
    rendering.py     text as token ids: vLLM's renderer, a tokenizer's chat template, or bytes
    by_itself.py     what a server does to a prompt by itself, as notes
    render_child.py  the process that has a tokenizer and its chat template
    render_loop.py   what such a process does, with limits of time and memory
    render_pipe.py   its messages, and what a question may take
    templates.py     a tokenizer of transformers and its chat template
    bodies.py        the body of a request: its API, and its fields, each on a list
    anthropic.py     a body of /v1/messages as one of /v1/chat/completions
    conversation.py  the body of a request as what a chat template is given
    token_ids.py     prompts as token ids: finds the earlier prompt with the longest common prefix
    trace_rows.py    lines of Mooncake, BurstGPT and Azure traces; every error names file and line
    draft.py         what a builder returns: requests, and how they are released
    draws.py         seeded random numbers (splitmix64 of a counter), the same in every version
    identity.py      prompts in the fewest spans; the hash of a workload
    prefix_tree.py   which tokens were computed before: a radix tree over spans, exact to the token
    tokens.py        token ids (any part of any stream, in any order) and chained block hashes without tokens
    answers.py       requests with the answers of a greedy engine appended: equal prompts, equal answers
    feed.py          which requests may be sent at a time `now`; shared by engine and simulator
    recording.py     the trace that `kvtune serve --record` writes: Mooncake lines, salted hashes, bounded
    types.py         Workload, Request, Span
    sources.py       What workloads are read with: renderers of text, and recorded sessions
"""
