"""Starts a vLLM engine, runs a workload on it, and merges all measurements into one run.

In: a `Setup`, which names the load. Out: a `Run`.
kvtune itself has two processes. The launcher (`launch.py`, in the CLI's process, imports no vLLM) starts the host
(`host.py`, in its own session). The host runs vLLM's front end (`front_end.py`).
If a process dies, the measured part is kept and marked partial.

    kvtune profile -- launch.py --plan.json--> host.py (front end) --> EngineCore --> workers
          ^              |  <--events pipe--       | requests.bin          | ring, status   | ring, status
          |              +-- psutil, py-spy        +-----------------------+----------------+
          +---- Run <-- record.py <-- all of them, from one work folder that is removed when the run file is written
"""
