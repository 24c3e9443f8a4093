# jlora: `make demo` and `make test` set up everything they need.

PYTHON := .venv/bin/python
# One worker more than cores: many tests wait for a process or a clock. In the order of the rooms: by their
# number of tests, the files of the longest tests would come last.
WORKERS = $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
ALONE = JAX_PLATFORMS=cpu $(PYTHON) -m pytest
PYTEST = $(ALONE) -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 99
# Beside others, and on few cores, a test that waits for a process or a clock can be late. What failed (code 1: all
# have run: a worker that crashed is replaced) runs once more with nothing beside it, however late it is, and fails for
# good if it fails again. Three such failures end the run.
run = @$(PYTEST) $(1) || { [ $$? -eq 1 ] && echo "=== what failed, once more and alone" && \
	env -u JLORA_TESTS_UNTIL $(ALONE) $(1) --no-cov --maxfail=3 --last-failed --last-failed-no-failures none; }

.PHONY: demo demo-cluster test test-all fuzz setup lint bench soak train-demo proto supply lock sbom audit release clean

demo: setup  ## start a server on the embedded model and talk to it
	@$(PYTHON) -m jlora.demo

demo-cluster: setup  ## the embedded model on two replicas under a Ray of this machine, one of them killed
	@$(PYTHON) -m jlora.demo.cluster

test: setup  ## the tests that take less than 10 seconds each, all rooms; TEST_FLAGS goes to pytest
	$(call run,-m "not slow" $(TEST_FLAGS))

test-all: setup  ## every test
	$(call run,$(TEST_FLAGS))

fuzz: setup  ## every parser of something from outside, 100,000 inputs each; FUZZ names targets and gives flags
	@JAX_PLATFORMS=cpu $(PYTHON) -m tests.fuzz $(or $(FUZZ),all)

setup:  ## .venv from the newest usable Python; instant when nothing changed
	@sh scripts/setup.sh

lint: setup  ## style and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

bench: setup  ## a study; BENCH names it and gives its flags
	@$(PYTHON) -m jlora.cli bench $(BENCH)

soak: setup  ## an hour of all that users do to a server, for the night; SOAK adds flags
	@JAX_PLATFORMS=cpu $(PYTHON) -m jlora.cli bench soak --minutes 60 $(SOAK)

train-demo: setup  ## train the embedded model and its adapters from scratch
	@$(PYTHON) -m tools.train_demo.train --out jlora/demo/assets

proto: setup  ## the generated gRPC code, after a change of jlora.proto
	$(PYTHON) -m tools.proto

supply: setup
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable ".[supply]"

lock: supply  ## pin every package again, with hashes, for each Python
	$(PYTHON) -m tools.lock

sbom: supply  ## dist/: a bill of materials for each Python
	$(PYTHON) -m tools.sbom

audit: supply  ## known vulnerabilities of the pinned packages
	$(PYTHON) -m tools.audit

release: supply  ## dist/: the wheel, built twice with the same bytes, its sha256 and its bill of materials
	$(PYTHON) -m tools.release

clean:
	rm -rf .venv .venv-oracle build dist *.egg-info
