# make report  - set up .venv, run the main job, say where the report is
# make test    - set up .venv, check the code and run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: report test check lab clean

report: $(VENV)/ready
	$(BIN)/gptoss-debug report

test: check
	$(BIN)/python -m pytest

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

lab: $(VENV)/ready
	$(BIN)/jupyter lab notebooks

$(VENV)/ready: pyproject.toml .ci/setup
	.ci/setup $(PYTHON) $(VENV)
	touch $@

clean:
	rm -rf $(VENV) reports
