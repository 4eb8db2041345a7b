.DEFAULT_GOAL := help
.PHONY: help install test quick durations lint house format docs changelog bench

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):  *## */\1 /p' $(MAKEFILE_LIST) | while read -r name about; do printf '%-9s %s\n' "$$name" "$$about"; done

install:  ## Install the package and what all tests and documents need
	pip install -e '.[dev,full]'

test:  ## Run all tests in parallel, as CI does
	pytest

quick:  ## Run the quick tests: an answer in about two minutes on two cores
	pytest -m "not slow"

durations:  ## Run all tests, and list the 40 slowest
	pytest --durations 40

lint:  ## Check with ruff and mypy, as CI does
	.ci/lint

house:  ## Print the parts, what each costs, the arrows into them, and how dense and empty the words are
	cd tests && python -m support.house && python -m support.words

format:  ## Format, and fix what ruff can fix
	ruff format .
	ruff check --fix .

docs:  ## Make what the documentation shows, and the site in site/
	python -m backspot.render.json > docs/report.schema.json
	python docs/make_api.py
	python docs/make_findings.py
	python docs/make_cli.py
	python docs/make_output.py
	python docs/make_published.py
	python docs/make_report.py
	python docs/make_recording.py
	python notebooks/execute.py
	mkdocs build

changelog:  ## Join the files of news/ into CHANGELOG.md
	python docs/make_changelog.py

bench:  ## Run the benchmarks that need no GPU, ten minutes of them at a time
	python -m benchmarks all --device cpu
