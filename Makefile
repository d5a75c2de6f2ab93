# `make demo` and `make test` set everything up by themselves; pass options on with ARGS="…".
PY := .venv/bin/python
ARGS ?=

.PHONY: setup demo chaos test test-long lint clean

setup: .venv/.ready

.venv/.ready: requirements/cpu.txt pyproject.toml setup.sh
	bash setup.sh

demo: setup
	.venv/bin/bucket-grpo demo $(ARGS)

# Random kills of every part while a run goes on; see benchmarks/chaos.py.
chaos: setup
	$(PY) benchmarks/chaos.py $(ARGS)

test: setup lint
	$(PY) -m pytest -m "not e2e and not long" -n 2 --dist loadfile $(ARGS)
	$(PY) -m pytest -m "e2e and not long" $(ARGS)

test-long: setup
	$(PY) -m pytest $(ARGS)

# Type checkers follow imports through folders, not through the editable install: give them the package's real shape.
.typecheck/bucket_grpo:
	mkdir -p $@ && for d in bucket_sync cli emulator inference jobs proxy report runtime trainer; do ln -sfn ../../$$d $@/$$d; done

lint: .typecheck/bucket_grpo
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	MYPYPATH=.typecheck .venv/bin/mypy -p bucket_grpo

clean:
	rm -rf .venv .typecheck build *.egg-info
