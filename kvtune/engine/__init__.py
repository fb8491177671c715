"""Starts a vLLM engine, runs a workload on it, and merges all measurements into one run.

In: a `Setup`, which names the load. Out: a `Run`.
Imported by: analysis, bounds, capacity, cli, doctor, explain, lab, report, sim, tune.
kvtune itself has two processes. The launcher (`launch.py`, in the CLI's process, imports no vLLM) starts the host
(`host.py`, in its own session). The host runs vLLM's front end, or is the client of vLLM's own server (`front_end/`).
If a process dies, the measured part is kept and marked partial.

    kvtune profile -- launch.py --plan.json--> host.py (front end) --> EngineCore --> workers
          ^              |  <--events pipe--       | requests.bin          | ring, status   | ring, status
          |              +-- psutil, py-spy        +-----------------------+----------------+
          +---- Run <-- record.py <-- all of them, from one work folder that is removed when the run file is written

    resolve.py       MODEL and flags -> vLLM's arguments; bad input is refused before anything starts
    flags.py         vLLM's flags as typed: the one parser that everything of ours uses
    setup.py         Setup: the one description of an engine and its load, of which plans make others
    profile.py       EngineBench, one profiled run from start to file: checks, work folder, environment, launch, record
    like.py          what a recorded run shows of its engine: model, flags, KV specs, step cost
    launch.py        starts the host, samples processes, kills what is left, unlinks its shared memory
    host.py          starts vLLM's front end, warms it up, runs the workload
    front_end/       AsyncLLM in the host process, or `vllm serve` and a client of HTTP
    driver.py        sends requests as `workload.feed` says, appends each finished request to a file
    messages.py      messages between launcher and host
    record.py        work folder -> Run, on one clock
    rings.py         ring files -> tables
    vllm_counts.py   vLLM's own counters, to compare with ours
    culprits.py      the probes' counts of objects -> header.extra
    shared_memory.py  whether /dev/shm has room for the engine's message queues, before it starts
    faults.py        an engine's log -> its cause
    experiment.py    sides measured in turns, with a journal and a budget: `--repeat`, `--ablate`, the runs of `tune`
    ablate.py        `--ablate`: the sides of its experiment
    models.py        the built-in models; `models/` holds their config.json
    weights.py       `--load-format kvtune-seeded`: random weights under which answers depend on the whole prompt
    gemma.py         Gemma-3 270M from the package index (`kvtune prepare`)
    entry_points.py  what vLLM calls in each of its processes: core, probe, recorder, weights, where they are asked for
    serve.py         `vllm serve` as `kvtune serve` starts it
    sockets.py       Where vLLM's processes make their sockets: a Unix socket's path holds 107 characters
    offload_flags.py Flags of a tier of host memory, checked before a process starts
    model_config.py  A model's config.json: of a built-in model, a folder, or a name on the hub
    nvidia.py        The GPUs of this machine by nvidia-smi
    ask.py           Asks vLLM about a model in a child process, also as on a GPU that is not here
    platform.py      The platform of the engines that kvtune starts or replays here
    recorded.py      An engine as a file describes it: vLLM's flags
    gpu_needs.py     What a GPU engine needs of its machine: a driver, a C compiler, Python's headers
"""
