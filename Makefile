# `make demo` and `make test` work on a bare machine with Python 3.11+ and pip: they make .venv first.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.set-up

.PHONY: help setup demo test test-all times zoo lint clean
help:            ## what can be made here
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[data,tensorboard,rl,mpi,hf,dev]'
	@touch $@

setup: $(STAMP)  ## make .venv with everything in it

demo: $(STAMP)   ## train a digits classifier on two processes
	@$(VENV)/bin/paceline train digits --workers 2 --strategy ddp

test: $(STAMP)   ## every quick test and a share of the slow ones, another share with each commit
	@$(VENV)/bin/python -m pytest --numprocesses 2 --share commit

test-all: $(STAMP)  ## every test: 45 minutes
	@$(VENV)/bin/python -m pytest --numprocesses 2

times: $(STAMP)  ## every test, and write down how long each takes: tests/times.json
	@$(VENV)/bin/python -m pytest --numprocesses 2 --write-times

zoo: $(STAMP)    ## every task of the zoo on every strategy: 20 minutes; writes docs/support.md
	@$(VENV)/bin/python -m tests.zoo --write --jobs 2

lint: $(STAMP)   ## ruff, mypy --strict and the order of imports
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

clean:           ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
