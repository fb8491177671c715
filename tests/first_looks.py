"""vLLM looks at a model's class in a process that imports all of vLLM again, the first time in a home folder.

Run before the tests, this looks at all built-in models' classes in one process; else several tests would at a time.
"""

from kvtune.data.layout.models import TINY, config
from kvtune.lab.sim.build import look_at_models_here


def main() -> None:
    from vllm.model_executor.models import ModelRegistry

    look_at_models_here()
    for name in TINY:
        (architecture,) = config(name)["architectures"]  # type: ignore[misc]
        ModelRegistry.models[architecture].inspect_model_cls()


if __name__ == "__main__":
    main()
