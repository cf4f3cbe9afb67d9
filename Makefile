# Every target first makes .venv and installs requirements.txt into it, once.
PYTHON ?= python3
BIN = .venv/bin
LOADS = on Linux 5.6 GB, about ten minutes; README has the line for PyTorch's smaller CPU build

.PHONY: help run test lessons lint figures ladder site measure

run: .venv/installed  ## train milestone 01, tiny
	$(BIN)/python tools/run_milestone.py 01 --scale tiny

test: .venv/installed  ## check everything; takes several minutes
	@# Hundreds of processes import the tools: their bytecode is kept. A file's tests share its runs.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lessons: .venv/installed  ## open your own copies of the notebooks, without outputs
	$(BIN)/python tools/open_lessons.py

lint: .venv/installed  ## check the style of the Python code
	$(BIN)/ruff check .

figures: .venv/installed  ## rewrite the generated tables and pictures
	$(BIN)/python tools/make_figures.py

ladder: .venv/installed  ## repeat the tiny runs whose script or tiny values changed, then figures
	$(BIN)/python tools/make_figures.py --tiny

site: .venv/installed  ## build the pages in build/site; open build/site/index.html
	$(BIN)/python tools/make_site.py

# Any Python with torch and numpy measures; .venv is made only where there is none.
measure:  ## measure milestones on this machine's GPUs, for history/measured; MINUTES=13 ends it
	@for python in $(BIN)/python $(PYTHON); do \
	  $$python -c 'import torch, numpy' 2>/dev/null && break; python=; done; \
	test -n "$$python" || { make .venv/installed && python=$(BIN)/python; } && \
	exec $$python tools/compare_milestones.py --measure $(if $(MINUTES),--minutes $(MINUTES))

help:  ## list these targets; make alone is make run
	@sed -n 's/^\([a-z]*\):.*## /\1  /p' Makefile

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@echo "Installing requirements.txt into .venv: $(LOADS)"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@
