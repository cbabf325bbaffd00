# The project's commands. Each one sets up .venv itself: Python and make are all it needs.
PYTHON ?= python3
WORKDIR ?= runs/digits
FLAGS ?=
ROWS ?=

VENV := .venv
TRAINS := $(VENV)/.trains
READY := $(VENV)/.ready
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
BIN := $(VENV)/bin

# Four files of tests at a time on two cores: the longest ones wait for other processes most of the time.
# A process that dies ends them all: xdist would wait for ever for the tests that it had. At its end pytest would collect
# garbage, to warn of errors in destructors, and wait half a minute for old iterators of TensorFlow.
SIDE_BY_SIDE := --numprocesses=4 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 -p no:unraisableexception

# TensorFlow reports every missing GPU library as an error; what goes wrong in Python is told all the same.
export TF_CPP_MIN_LOG_LEVEL ?= 3

# Python compiles a module once; without its files, each process of tests compiles all tests anew, in 4 CPU seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test wide check lint matrix docs dist bench

# Train the digits on two virtual CPUs: make train WORKDIR=/tmp/digits FLAGS="--steps=500".
train: $(TRAINS)
	$(BIN)/python -m experiments.digits --workdir=$(WORKDIR) --device=cpu --num_devices=2 $(FLAGS)

# Run the tests, a representative of each law and promise: make test FLAGS="-k overflow".
test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=25 $(FLAGS)

# Run every case of every law, and the campaigns, with graphs optimized as in a user's run; then, on virtual CPUs that add
# as GPUs do, what is added over replicas; and write docs/evidence.md. Before a release. It goes on with the parts that this
# commit lacks; a part once more: make wide FLAGS="--only=collectives".
wide: $(READY)
	$(BIN)/python -m tests.wide $(FLAGS) -- $(SIDE_BY_SIDE) --durations=25

# What to run before a commit: lint, types, and the tests that the change reaches, by the imports; the change of a branch:
# make check SINCE=main. One process for each core.
check: lint
	$(BIN)/python -m tests.reach $(if $(SINCE),--since=$(SINCE)) -- $(SIDE_BY_SIDE) --numprocesses=2 $(FLAGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Try other versions of Python, TensorFlow and Keras: make matrix ROWS=3.12.
matrix:
	.ci/matrix $(ROWS)

# Write settings.md and the signatures of the reference from the code, and build the site: docs/_build/html/index.html.
docs: $(READY)
	$(BIN)/python docs/generated.py
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/sphinx-build -qnW --keep-going -c docs . docs/_build/html

# Build dist/*.whl and dist/*.tar.gz, and try the wheel where nothing else is installed: its types, and the smoke test.
dist: $(READY)
	rm -rf dist build/empty
	$(PIP) build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && ../$(BIN)/mypy --config-file= --python-executable=empty/bin/python -c "import distloop; distloop.Config(steps=1)"
	cd build && empty/bin/python -m distloop.smoke --device=cpu --num_devices=2

# Measure it next to others: make bench FLAGS="--workloads=tiny --replicas=2 --only=training".
bench: $(READY)
	$(BIN)/python -m experiments.benchmarks $(FLAGS)

# What training needs, and what all else needs beside it. Written last, so a set-up that was cut short starts again.
$(TRAINS): pyproject.toml
	@echo "Setting up $(VENV) with TensorFlow and what training needs: once, in some minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[experiments]"
	@touch $@

$(READY): $(TRAINS)
	@echo "Adding to $(VENV) what tests and documentation need: once, in some minutes ..."
	$(PIP) --editable ".[docs,test,experiments]"
	@touch $@
