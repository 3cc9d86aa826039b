# make demo: a real SGLang server with the plugin, checked against the stock backend; with
#   MODEL=smollm2 a real model answers chats and runs agent programs; it is downloaded once (93 MB,
#   Apache-2.0).
# make test: lint and tests of every kind, in about nine minutes where kernels were compiled
#   before; ARGS goes to pytest.
# make test-all: lint and the whole test suite.
# make test-releases: those of tests/sglang, and what its Triton makes of Hopper's kernel, on the
#   oldest release of SGLang; on each in between what SGLang makes of the arguments, two engines and
#   the names of drafts. make test-all SGLANG=0.5.17 runs all of them there.
# make check: lint and the tests that start no engine and compile no kernel, in about two minutes
#   where the planner was compiled before; hypothesis draws a quarter of make test's examples.
# All install what they need first, once: the newest release of SGLang that this Python runs into
# .venv, with SGLANG=0.5.17 that one into .venv-0.5.17.
VENV := .venv$(SGLANG:%=-%)
BIN := $(VENV)/bin
RELEASES := $(sort $(patsubst requirements/sglang-%.txt,%,$(wildcard requirements/sglang-*.txt)))
OLDEST := $(firstword $(RELEASES))
BETWEEN := $(filter-out $(OLDEST) $(lastword $(RELEASES)),$(RELEASES))

# A run of the tests begins with the bytecode of the one before, wherever it is.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-releases pytest check lint wheel install clean

demo: install
	@$(BIN)/python -m eval.demo $(MODEL:%=--model %)

test: CHOSEN := -m "not long"
test test-all: lint pytest

test-releases:
	@$(MAKE) --no-print-directory pytest SGLANG=$(OLDEST) \
		ARGS='tests/sglang tests/cpu/test_hopper_build.py -m "not long"'
	@for release in $(BETWEEN); do $(MAKE) --no-print-directory pytest VENV=.venv-between \
		SGLANG=$$release ARGS="$(addprefix tests/sglang/test_,outputs.py latent_models.py start.py \
		stock_alone.py) -k 'base or drafts_have_a_name or test_start or test_stock_alone'" || exit 1; done

pytest: install
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(CHOSEN) $(ARGS)

check: lint
	@$(BIN)/python -m pytest -n 2 --hypothesis-profile=check \
		tests/cpu tests/eval -m "not engine and not slow and not long" $(ARGS)

lint: install
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check --quiet .
	@$(BIN)/python -m mypy

wheel: install
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

install:
	@python=$(BIN)/python; [ -x $$python ] || python=$$(sh requirements/find_python.sh) && \
		"$$python" requirements/install.py $(VENV) $(SGLANG)

# Keeps the environments; remove them by hand to install from nothing.
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
