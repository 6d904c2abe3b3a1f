# make help lists the targets. Each sets up what it needs; a second run finds it done.
PYTHON ?= python3
TORCH_PIP_ARGS ?=
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
export PYTHON TORCH_PIP_ARGS

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test test-engines test-vllm test-sglang engines lint unit bench format clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24
	@echo
	@echo '  PYTHON=python3.12        the interpreter to set up with (3.11 or newer)'
	@echo '  TORCH_PIP_ARGS="..."     arguments of pip for torch alone, to choose its build'
	@echo '  PYTEST_ARGS="..."        further arguments of pytest'

# The script compares what is installed with what is asked for, and mostly finds nothing to do.
.venv/.stamp: requirements/lock.txt requirements/torch.txt requirements/install.sh setup.cfg pyproject.toml
	@requirements/install.sh

demo: .venv/.stamp ## a prefill and a decode process share a KV cache through the daemon
	@.venv/bin/python -m demo.pd

demo-vllm: .venv/.stamp ## two vLLM servers share a KV cache behind a proxy: the classic deployment
	@.venv/bin/python -m demo.vllm

test: lint unit ## linters, type checkers, tests

lint: .venv/.stamp ## ruff, mypy and pyright
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/basedpyright

unit: .venv/.stamp ## the tests alone, without those marked stress, gpu, ucx, vllm or sglang
	.venv/bin/python -m pytest -q -n $(PYTEST_WORKERS) -m 'not stress and not gpu and not ucx and not vllm and not sglang' $(PYTEST_ARGS)

engines: ## make the environments with vLLM and SGLang, outside the checkout: 3.5 GB, 4 to 12 minutes, once
	@requirements/engines.sh vllm-0.32 >/dev/null
	@requirements/engines.sh vllm-0.28 >/dev/null
	@requirements/sglang.sh sglang-0.5.23 >/dev/null
	@requirements/sglang.sh sglang-0.5.9 >/dev/null

test-engines: test-vllm test-sglang ## the tests with vLLM and SGLang, not among those of make test

# One after the other: each has several engines, and what is late counts as missing to them.
test-vllm: .venv/.stamp engines
	VLLM_ENVIRONMENT=$$(requirements/engines.sh vllm-0.32) \
	OLDER_VLLM_ENVIRONMENT=$$(requirements/engines.sh vllm-0.28) \
	.venv/bin/python -m pytest -q -n 1 -m vllm tests/engines/vllm $(PYTEST_ARGS)

# In processes of their own: what they import has to be there before anything else imports transformers.
test-sglang: .venv/.stamp engines
	SGLANG_ENVIRONMENT=$$(requirements/sglang.sh sglang-0.5.23) \
	OLDER_SGLANG_ENVIRONMENT=$$(requirements/sglang.sh sglang-0.5.9) \
	.venv/bin/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile -m sglang tests/engines/sglang $(PYTEST_ARGS)

bench: .venv/.stamp ## how close to memcpy; one JSON line a bench
	@.venv/bin/python -m bench

format: .venv/.stamp ## format the code as the linters want it
	.venv/bin/ruff check --fix --select I .

clean: ## remove what make and the tools made, .venv too
	rm -rf .venv .venv.lock build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis kvstored.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
