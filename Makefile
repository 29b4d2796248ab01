# A fresh clone needs only python3 (3.10 or later): `make demo`, `make test`.

PYTHON ?= python3
RAY_VERSION ?= 2.60.0
# Pinned, because pip may otherwise choose a build with gigabytes of CUDA. The tests need only a CPU.
TORCH_VERSION ?= 2.13.0
PYTEST_ARGS ?=
JOBS ?= 2

VENV := .venv
STAMP := $(VENV)/.stamp
EXAMPLES := $(VENV)/.examples

.DEFAULT_GOAL := help
# Number of faults in a campaign, and the seed of its first round
FAULTS ?= 100
SEED ?= 1

.PHONY: help demo test campaign lab lab-down lint docs recordings bench bench-smoke bench-slurm bench-ssh venv venv-examples packages clean FORCE

help:
	@echo "make demo    start two Ray nodes on this computer, run examples/hello_ray.py, stop them"
	@echo "make test    run the tests, two files in parallel (PYTEST_ARGS=\"tests/unit -q\" selects tests; JOBS=0 runs them serially)"
	@echo "make lab     start a real Slurm cluster of three hosts on this computer (root); make lab-down stops it"
	@echo "make campaign   inject FAULTS=100 random faults into clusters on that Slurm, starting at SEED=1 (root, half an hour)"
	@echo "make lint    run ruff and mypy"
	@echo "make docs    build the documentation into site/; fail on a broken link"
	@echo "make recordings   record the terminal pictures of the documentation again, from real runs (root)"
	@echo "make bench   run the benchmarks (root: make bench-slurm on a real Slurm, make bench-ssh over ssh)"
	@echo "make venv    create .venv (RAY_VERSION=$(RAY_VERSION)); make venv-examples adds the packages of the examples (TORCH_VERSION=$(TORCH_VERSION))"
	@echo "make clean   remove .venv and caches"

demo: $(STAMP)
	$(VENV)/bin/heliostat run --nodes 2 examples/hello_ray.py

test: $(EXAMPLES) packages
	$(VENV)/bin/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# See docs/reliability.md.
campaign: $(STAMP) packages
	$(VENV)/bin/python tests/campaign.py --faults $(FAULTS) --seed $(SEED)

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# `python -m docs.made` writes the program's output into the pages; the tests compare it.
# Without --quiet: it drops the warnings that --strict counts. The output is printed only on failure.
docs: $(STAMP)
	@output=$$(NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict 2>&1) \
		|| { printf '%s\n' "$$output" | grep -v '^INFO ' >&2; exit 1; }

# Terminal pictures, from real runs. Needs root.
recordings: $(STAMP) packages
	$(VENV)/bin/python docs/recordings/record.py

# LAB_SHARE: the hosts of the lab see this directory even if it is below /tmp.
lab: $(STAMP) packages
	@LAB_SHARE=$(CURDIR) LAB_OPEN=$$($(VENV)/bin/python -c 'import sys; print(sys.base_prefix)') tests/lab/lab up 3
	@echo "log in:      tests/lab/lab login"
	@echo "for example: heliostat run --on slurm --nodes 3 $(CURDIR)/examples/hello_ray.py"

lab-down:
	@tests/lab/lab down

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks

# One small round of each benchmark, to check that it runs. Ignore the figures.
bench-smoke: $(STAMP)
	$(VENV)/bin/python -m benchmarks --smoke

bench-slurm: $(STAMP) packages
	$(VENV)/bin/python -m benchmarks --only slurm

# rsync: for `ray up`, which is measured for comparison
bench-ssh: $(STAMP) packages
	@sh tests/apt.sh rsync
	$(VENV)/bin/python -m benchmarks --only ssh

venv: $(STAMP)

venv-examples: $(EXAMPLES)

# Reinstall when the requested version differs from the installed one.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(RAY_VERSION))
$(STAMP): FORCE
endif
ifneq ($(shell cat $(EXAMPLES) 2>/dev/null),$(TORCH_VERSION))
$(EXAMPLES): FORCE
endif

# Debian splits ensurepip from python3 into python3-venv.
# -qq: hide pip's warnings about package indexes; errors are still printed.
# --compile: Ray starts several Python processes per node, and without bytecode each would compile Ray again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: $(PYTHON) is older than Python 3.10; set PYTHON= to another one" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh tests/apt.sh python3-venv
	@rm -f $(STAMP)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing Ray $(RAY_VERSION) and the development tools into $(VENV) (about 500 MB, a minute or two) ..."
	@$(VENV)/bin/python -m pip install -qq --compile --disable-pip-version-check \
		-e '.[dev]' 'ray[default]==$(RAY_VERSION)'
	@echo $(RAY_VERSION) > $(STAMP)

# Separate from the first stamp, so that the demo does not wait for this installation.
$(EXAMPLES): $(STAMP)
	@echo "installing PyTorch $(TORCH_VERSION) and the other packages of the examples into $(VENV) (about 1.5 GB, a minute or two) ..."
	@$(VENV)/bin/python -m pip install -qq --compile --disable-pip-version-check \
		-e '.[examples]' 'ray[default]==$(RAY_VERSION)' 'torch==$(TORCH_VERSION)'
	@echo $(TORCH_VERSION) > $(EXAMPLES)

packages:
	@sh tests/apt.sh $$(grep -v '^#' tests/apt.txt)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

FORCE:
