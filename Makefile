# From a bare clone, with python3 (3.10 or later): `make demo`, `make test`.

PYTHON ?= python3
RAY_VERSION ?= 2.60.0
# Named, since without a version pip may choose a build with gigabytes of CUDA; the tests need a CPU only.
TORCH_VERSION ?= 2.13.0
PYTEST_ARGS ?=
JOBS ?= 2

VENV := .venv
STAMP := $(VENV)/.stamp
EXAMPLES := $(VENV)/.examples

.DEFAULT_GOAL := help
# faults of a campaign, and the seed of its first round
FAULTS ?= 100
SEED ?= 1

.PHONY: help demo test campaign lab lab-down lint docs recordings bench bench-smoke bench-slurm bench-ssh venv venv-examples packages clean FORCE

help:
	@echo "make demo    start two Ray nodes on this computer, run examples/hello_ray.py, release them"
	@echo "make test    run the tests, two files at a time (PYTEST_ARGS=\"tests/unit -q\" for some of them, JOBS=0: one by one)"
	@echo "make lab     a real Slurm of three hosts on this computer, to play in (root); make lab-down ends it"
	@echo "make campaign   inject FAULTS=100 random faults into clusters on that Slurm, from SEED=1 on (root, half an hour)"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation into site/, and fail on a broken link"
	@echo "make recordings   make the pictures of terminals in it anew, from real runs (root)"
	@echo "make bench   run the benchmarks (as root: make bench-slurm on a real Slurm, make bench-ssh over ssh)"
	@echo "make venv    only make .venv (RAY_VERSION=$(RAY_VERSION)); make venv-examples: with what the examples import (TORCH_VERSION=$(TORCH_VERSION))"
	@echo "make clean   remove .venv and caches"

demo: $(STAMP)
	$(VENV)/bin/heliostat run --nodes 2 examples/hello_ray.py

test: $(EXAMPLES) packages
	$(VENV)/bin/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# docs/reliability.md
campaign: $(STAMP) packages
	$(VENV)/bin/python tests/campaign.py --faults $(FAULTS) --seed $(SEED)

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# What pages show of the program itself is written by `python -m docs.made`, and compared by the tests.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# As root: the pictures of terminals, from real runs.
recordings: $(STAMP) packages
	$(VENV)/bin/python docs/recordings/record.py

# The hosts of the lab share this folder with the computer, wherever it is.
lab: $(STAMP) packages
	@LAB_SHARE=$(CURDIR) LAB_OPEN=$$($(VENV)/bin/python -c 'import sys; print(sys.base_prefix)') tests/lab/lab up 3
	@echo "log in:      tests/lab/lab login"
	@echo "then, say:   heliostat run --on slurm --nodes 3 $(CURDIR)/examples/hello_ray.py"

lab-down:
	@tests/lab/lab down

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks

# One small round of each measure: they run. The figures mean nothing.
bench-smoke: $(STAMP)
	$(VENV)/bin/python -m benchmarks --smoke

bench-slurm: $(STAMP) packages
	$(VENV)/bin/python -m benchmarks --only slurm

# rsync: for `ray up`, which is measured beside ours
bench-ssh: $(STAMP) packages
	@sh tests/apt.sh rsync
	$(VENV)/bin/python -m benchmarks --only ssh

venv: $(STAMP)

venv-examples: $(EXAMPLES)

# Other versions than those that are installed are installed in their place.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(RAY_VERSION))
$(STAMP): FORCE
endif
ifneq ($(shell cat $(EXAMPLES) 2>/dev/null),$(TORCH_VERSION))
$(EXAMPLES): FORCE
endif

# Debian splits ensurepip from python3 into python3-venv.
# -qq: pip's warnings about package indexes are noise here; its errors still show.
# --compile: Ray starts several Python processes a node, and each would compile Ray anew without bytecode.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: $(PYTHON) is older than Python 3.10; name another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh tests/apt.sh python3-venv
	@rm -f $(STAMP)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing Ray $(RAY_VERSION) and the development tools into $(VENV) (about 500 MB, a minute or two) ..."
	@$(VENV)/bin/python -m pip install -qq --compile --disable-pip-version-check \
		-e '.[dev]' 'ray[default]==$(RAY_VERSION)'
	@echo $(RAY_VERSION) > $(STAMP)

# Apart, so that the demo does not wait for it.
$(EXAMPLES): $(STAMP)
	@echo "installing PyTorch $(TORCH_VERSION) and what else the examples import into $(VENV) (about 1.5 GB, a minute or two) ..."
	@$(VENV)/bin/python -m pip install -qq --compile --disable-pip-version-check \
		-e '.[examples]' 'ray[default]==$(RAY_VERSION)' 'torch==$(TORCH_VERSION)'
	@echo $(TORCH_VERSION) > $(EXAMPLES)

packages:
	@sh tests/apt.sh $$(grep -v '^#' tests/apt.txt)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

FORCE:
