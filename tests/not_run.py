"""Reads what pytest printed; says which groups of tests did not run here, and the one command that brings each.

Usage: python -m tests.not_run < OUTPUT. `.ci/test` ends with it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

BRINGS: dict[str, tuple[str, str]] = {
    "Chromium": ("tests in a real browser", "apt-get install chromium chromium-driver"),
    "selenium": ("tests in a real browser", "make setup-test"),
    "PostgreSQL is not installed": ("studies in a real PostgreSQL", "apt-get install postgresql"),
    "`prometheus`": ("alerts and board in a real Prometheus", "apt-get install prometheus"),
    "`promtool`": ("alerts and board in a real Prometheus", "apt-get install prometheus"),
    "docker-compose": ("the compose file in docker-compose", "apt-get install docker-compose"),
    "kubernetes-validate": ("manifests against Kubernetes' schemas", "make setup-test"),
    "tmux": ("the live view in a real terminal", "apt-get install tmux"),
    "PostgreSQL's driver": ("studies in a real PostgreSQL", "make setup-test"),
    "uv is not installed": ("installing the wheel", "make setup-test"),
    "torchvision": ("models with images", "a torchvision that was built for this torch"),
    "hashes never look ahead": ("block hashes that look ahead", ".ci/versions 0.33.0"),
    "hashes cover their blocks only": ("block hashes that look ahead", ".ci/versions 0.33.0"),
    "has no class for this model": ("models that this vLLM dropped", "none: only an older vLLM has them"),
    "no CPU for": ("planted stalls", "the same command on a machine that is not busy"),
    "the engine stood still since": ("planted stalls", "the same command on a machine that is not busy"),
    "vllm": ("tests with vLLM", "make setup-test"),
    "torch": ("tests with vLLM", "make setup-test"),
    "transformers": ("tests with vLLM", "make setup-test"),
    "huggingface_hub": ("tests with vLLM", "make setup-test"),
    "prometheus_client": ("tests with vLLM", "make setup-test"),
    "another user can run": ("the image's steps as another user", "apt-get install python3-venv"),
    "root": ("files and folders of another user", "the same command as root"),
}
"""By words of a reason to skip: the group of tests, and what brings it. The first that fits counts."""
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?): (.*)$")


def group_of(reason: str) -> tuple[str, str]:
    """Return the group of a reason and the command that brings it; the reason itself for one that nobody listed."""
    for words, group in BRINGS.items():
        if words.lower() in reason.lower():
            return group
    return reason, ""


def lines(output: Iterable[str]) -> Iterator[str]:
    groups: Counter[tuple[str, str]] = Counter()
    for line in output:
        if found := SKIPPED.match(line.rstrip()):
            groups[group_of(found[3])] += int(found[1])
    for (group, command), count in sorted(groups.items()):
        yield f"  not run: {group} ({count} tests)" + (f": {command}" if command else "")


def main() -> None:
    for line in lines(sys.stdin):
        print(line)


if __name__ == "__main__":
    main()
