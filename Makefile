# Everything a developer types. A machine needs python3.11, make, Java 17 (for Spark) and PyPI.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
PY := $(VENV)/bin/python
DEV := $(VENV)/.stamp-dev
BENCH := $(VENV)/.stamp-bench
BENCHES := core kernel kernel_load console cost crowd codec history copies model regions tables stores maintenance parts sight sight_metrics service spark speed attributes consolidation walls streams
PACKAGES := persist,blob,consensus,rpc,compactor,pyspark_persist
ARGS ?=
# More processes than two cores: tests wait for servers, pauses and each other.
PARALLEL := -n 4 --dist loadscope
# Spark waits 10 s for a Python worker to begin, and no setting changes that: its tests have a run of their own.
SPARK := tests/integration/spark
BUT_SPARK := --ignore=$(SPARK)
SPARK_TOLD := .cache/spark-tests.txt
OTHERS_TOLD := .cache/other-tests.txt
SLOWEST := --durations=30 --durations-min=10
TOLD_AGAIN := 200 # lines of tests that failed, at the end, where one looks first
SECONDS ?= 600

MAKEFLAGS += --no-print-directory
export PYSPARK_PYTHON := $(abspath $(PY))
export PYSPARK_DRIVER_PYTHON := $(abspath $(PY))
# Hundreds of processes are started by the tests, and Spark starts more: each would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv lock demo test gate proof figures check format format-check lint spelling types imports docs wheel soak fuzz clean $(BENCHES:%=bench-%)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '  %-14s %s\n' 'bench-<name>' 'run one benchmark (ARGS=...): $(BENCHES)'

# --- the environment. Two jobs may start at once: whoever holds the lock installs, the other finds the stamp fresh.
define LOCKED_INSTALL
import fcntl, os, subprocess, sys, venv
stamp, extra = sys.argv[1:]
sources = ["pyproject.toml", "requirements/build.lock", f"requirements/{extra}.lock"]
os.makedirs(".cache", exist_ok=True)
with open(".cache/venv.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.path.exists(stamp) and os.path.getmtime(stamp) >= max(map(os.path.getmtime, sources)):
        sys.exit(0)
    if not os.path.exists("$(PY)") or subprocess.call(["$(PY)", "-c", "import pip"], stderr=subprocess.DEVNULL):
        print("making $(VENV)", flush=True)
        venv.create("$(VENV)", clear=True, with_pip=True, symlinks=True)
    print(f"installing requirements/{extra}.lock into $(VENV)", flush=True)
    pip = ["$(PY)", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    # What builds comes first, so that nothing that is built downloads what no hash was told of.
    for step in (
        ["--require-hashes", "-r", "requirements/build.lock"],
        ["--require-hashes", "--no-build-isolation", "-r", f"requirements/{extra}.lock"],
        ["--no-deps", "--no-build-isolation", "-e", "."],
    ):
        code = subprocess.call([*pip, *step])
        if code != 0:
            sys.exit(code)
    open(stamp, "w").close()
endef
export LOCKED_INSTALL

define install
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$LOCKED_INSTALL" $@ $(1)
endef

$(DEV): pyproject.toml requirements/build.lock requirements/dev.lock
	$(call install,dev)

$(BENCH): pyproject.toml requirements/build.lock requirements/bench.lock | $(DEV)
	$(call install,bench)

venv: $(DEV) ## make .venv and install the project with its development tools, by hashes

LOCK := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links --no-config
lock: $(DEV) ## write requirements/*.lock anew (ARGS=--upgrade takes newer versions)
	@$(LOCK) $(ARGS) requirements/build.in -o requirements/build.lock
	@$(LOCK) $(ARGS) --extra dev -c requirements/build.lock pyproject.toml -o requirements/dev.lock
	@$(LOCK) $(ARGS) --extra s3 --extra postgres --extra etcd -c requirements/dev.lock pyproject.toml -o requirements/server.lock
	@$(LOCK) $(ARGS) --extra bench -c requirements/dev.lock pyproject.toml -o requirements/bench.lock
	@touch $(DEV)

# --- running
demo: $(DEV) ## run the demo program (ARGS=...)
	@$(PY) -m examples.flights $(ARGS)

# $(call run,SELECTION): Spark waits much, so its tests run at the same time as the others; they have the processor
# whenever they want it, and the other tests what is left. Both runs end with pytest's closing line.
define run
	@mkdir -p $(dir $(SPARK_TOLD)); \
	$(PY) -m pytest $(1) $(SPARK) >$(SPARK_TOLD) 2>&1 & spark=$$!; \
	nice -n 10 $(PY) -m pytest $(PARALLEL) $(SLOWEST) $(1) $(BUT_SPARK) | tee $(OTHERS_TOLD); \
	others=$${PIPESTATUS[0]}; wait $$spark; spark=$$?; cat $(SPARK_TOLD); \
	if [ $$others -ne 0 ]; then tail -n $(TOLD_AGAIN) $(OTHERS_TOLD); fi; exit $$((others + spark))
endef
run_some = @$(PY) -m pytest $(PARALLEL) $(1) $(ARGS)
run_tests = $(if $(ARGS),$(run_some),$(run))

test gate proof: SHELL := /bin/bash
test: $(DEV) ## run the tests, in minutes (ARGS=...); the output ends with pytest's closing lines
	$(call run_tests,-m "not proof")

gate: $(DEV) ## run the tests and a smoke of each proof, as CI does (ARGS=...); ends like `make test`
	$(call run_tests,-m "not proof or smoke")

proof: $(DEV) ## run the whole proofs, and the laws with more examples (ARGS=...); ends like `make test`
	$(call run_tests,--proof -m "proof or hypothesis")

$(BENCHES:%=bench-%): bench-%: $(BENCH)
	@$(PY) -m bench.$* $(ARGS)

figures: $(BENCH) ## measure what README and bench/results/README.md publish, and write them (ARGS=...)
	@$(PY) -m bench.figures $(ARGS)

soak: $(DEV) ## run the long simulation for SECONDS=600 (ARGS=...)
	@$(PY) -m bench.soak --seconds $(SECONDS) $(ARGS)

fuzz: $(DEV) ## send bytes to every door of a server for SECONDS=600, and go on where the last run ended (ARGS=...)
	@$(PY) -m tests.fuzz --seconds $(SECONDS) $(ARGS)

# --- checks
check: format-check lint spelling types imports wheel ## everything CI checks before the tests

format: $(DEV) ## format the sources
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix --quiet .

format-check: $(DEV) ## are the sources formatted?
	@$(VENV)/bin/ruff format --check .

lint: $(DEV) ## ruff's rules
	@$(VENV)/bin/ruff check .

PAGES := docs README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md
SPELLED := $(PAGES) persist blob consensus rpc compactor pyspark_persist examples deploy
spelling: $(DEV) ## the spelling of pages and sources, and words that pages avoid (docs/style-words.txt)
	@$(VENV)/bin/codespell $(SPELLED)
	@$(VENV)/bin/codespell --dictionary docs/style-words.txt $(PAGES)

types: $(DEV) ## mypy, strict
	@$(VENV)/bin/mypy

imports: $(DEV) ## who may import whom
	@$(VENV)/bin/lint-imports

docs: $(DEV) ## write what is generated from the code: pages of docs, schema.json of check and inspect, and persist/aio/__init__.pyi
	@$(PY) -m tests.support.api_page
	@$(PY) -m tests.support.cli_page
	@$(PY) -m tests.support.settings_page
	@$(PY) -m tests.support.aio_stub
	@$(PY) -m tests.support.json_schemas

wheel: $(DEV) ## build the wheel; its top level holds our six packages, each marked as typed, and nothing else
	@rm -rf dist && $(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@$(VENV)/bin/check-wheel-contents --toplevel $(PACKAGES) dist/persist_shards-*.whl
	@test "$$($(PY) -m zipfile -l dist/persist_shards-*.whl | grep -c '^[a-z_]*/py.typed ')" = 6 || \
		{ echo "the wheel lacks the marker py.typed of a package" >&2; exit 1; }

clean: ## remove what the other targets made, but not .venv
	@rm -rf dist build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -rf soak-out spark-warehouse metastore_db derby.log
	@find . -name '.?*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
