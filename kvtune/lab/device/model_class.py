"""Why vLLM cannot import the class of a model, which it logs and does not raise. In processes that import vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def missing_package(error: Exception, models: Mapping[str, Any] | None = None) -> ImportError | None:
    """Return the import behind vLLM's "failed to be inspected"; None if it says something else."""
    named = re.search(r"architectures \[(.*?)\] failed to be inspected", str(error))
    if named is None:
        return None
    if models is None:
        from vllm.model_executor.models import ModelRegistry

        models = ModelRegistry.models
    for name in re.findall(r"'([^']+)'", named[1]):
        try:
            models[name].load_model_cls()
        except KeyError:
            continue
        except ImportError as missing:
            return _first(missing)
    return None


def or_install(error: BaseException) -> str:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"; or install {name}, built for this torch" if name else ""


def _first(error: ImportError) -> ImportError:
    """Return the import that failed first: transformers raises another error over it."""
    below = error.__cause__ or error.__context__
    return _first(below) if isinstance(below, ImportError) else error
