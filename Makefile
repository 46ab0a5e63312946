# make demo   from nothing to the whole pipeline on the embedded model
# make test   lint, types and tests
# make freeze   before a change: record hashes of logits, texts and decisions of every family and format in $(FROZEN)
# make frozen   after it: compare with them; fails if any has changed
# make oldest, make newest   units, contracts and a server with transformers' oldest supported and newest release
# make cluster  three servers: what they answer, and what happens when one dies
# make fuzz   ten minutes of made-up requests and files (MOETOOL_FUZZ_MINUTES=1 for less; MOETOOL_FUZZ_SEED=N again)
# make audit  known advisories of the pinned packages; by hand before a release, needs the network
# make gpu    on a machine with a GPU: its tests, then 'bench gpu'; GPU_PYTHON=python3 has torch and transformers, missing
#             wheels lie in .whl/, a trace for each shape in .gpu/SHAPE, results in .gpu/results (GPU_DEVICE=cpu: a dry run)
# make soak   twice ten minutes: clients that come and go, then kills, full disks, clock steps and memory pressure
#             (MOETOOL_SOAK_MINUTES=1 for less)
PYTHON ?= python3
GPU_PYTHON ?= python3
GPU_DEVICE ?= cuda
GPU_FLAGS ?=
FROZEN ?= build/frozen.json
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint oldest newest freeze frozen cluster bench gpu fuzz audit soak clean

# torch goes first and by its exact version, so that no other package's range picks another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,cluster,grammar]'
	touch $@

demo: $(VENV)/.installed
	@$(BIN)/moetool demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# One thread each; three at a time keep two cores busy, since tests wait for servers a third of their time.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

oldest: RELEASE := ==5.21.0
oldest: TESTS := tests/unit/runtime/kv tests/unit/runtime/loop
newest: RELEASE :=
newest: TESTS := tests/unit/runtime tests/contract/test_families.py tests/contract/test_inferred_families.py \
	tests/e2e/test_serve.py
oldest newest: $(VENV)/.installed
	rm -rf build/transformers-$@
	$(BIN)/python -m pip install --quiet --no-deps --target build/transformers-$@ 'transformers$(RELEASE)'
	PYTHONPATH=build/transformers-$@ $(BIN)/python -c 'import transformers; print("transformers", transformers.__version__)'
	PYTHONPATH=build/transformers-$@ OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

freeze: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python -m tests.frozen make $(FROZEN)

frozen: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python -m tests.frozen compare $(FROZEN)

cluster: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m ray

bench: $(VENV)/.installed
	$(BIN)/python -m pytest tests/bench -m '' -s

# No environment is made and nothing is fetched. The tests may take seven minutes, the bench as long as its limit_s says.
gpu:
	test ! -d .whl || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps .whl/*.whl
	-PYTHONPATH=. timeout 420 $(GPU_PYTHON) -m pytest -m '' tests/e2e/test_cuda.py tests/e2e/test_parallel_cuda.py \
		tests/contract/test_packed_parts.py
	PYTHONPATH=. $(GPU_PYTHON) -m moetool bench gpu --device $(GPU_DEVICE) --routes .gpu --out .gpu/results --overwrite \
		--set limit_s=240 $(GPU_FLAGS)

fuzz: $(VENV)/.installed
	$(BIN)/python -m pytest tests/fuzz -m slow -s

# In an environment of its own, whose packages are none of moetool's; --strict: a package without an answer is a failure.
audit:
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet pip-audit; }
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

soak: $(VENV)/.installed
	$(BIN)/python -m pytest tests/soak -m '' -s

clean:
	rm -rf $(VENV) moetool-demo dist build
