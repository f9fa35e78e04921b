# make demo             set up, build, and run the demo
# make test             set up, build, and run the tests
# make test-packaging   build sdist and wheel, install each into a fresh environment (the sdist without network), try them
# make test-upstream    build an unpatched tree, too, and run upstream's own tests on the patched one (long)
# make test-vulkan      build the Vulkan backend and run the gates on Mesa's software rasteriser (long; Debian, root)
# make lint             set up, and check style and types: ruff, mypy, clang-format; nothing is built
# make format           let ruff and clang-format change what they can
# make build            set up and build only
# make clean            remove what make made
#
# Everything lands in .venv and build/. A second run rebuilds only what changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell nproc)

# what the installed package is made of; a change of any of these installs again (ninja builds only what changed)
SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md vendor/lock.json vendor/*.py vendor/patches native python \
             -type f -not -name '*.pyc' -not -path '*/__pycache__/*')

CXX_FILES := $(shell find native tests/native -name '*.cpp' -o -name '*.h' -o -name '*.c')

.PHONY: demo test test-packaging test-upstream test-vulkan lint format build clean
.DELETE_ON_ERROR:

demo: build
	$(BIN)/hotmoe demo

test: build
	$(BIN)/cmake --build build --target test-sim test-slot-map test-store test-feed test-host-memory
	$(BIN)/python -m pytest tests

test-packaging: build
	$(BIN)/python -m pytest tests/packaging

test-upstream: build
	$(BIN)/python -m tests.upstream.run

test-vulkan: build
	$(BIN)/python -m tests.vulkan.run

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

build: $(VENV)/.installed

# a compiler, and ccache when we may install it
$(VENV)/.system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    missing=""; \
	    for tool in g++:g++ ccache:ccache git:git; do \
	        command -v $${tool%%:*} >/dev/null || missing="$$missing $${tool##*:}"; \
	    done; \
	    $(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	    $(PYTHON) -c 'import sysconfig, pathlib, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
	        || missing="$$missing python3-dev"; \
	    if [ -n "$$missing" ]; then \
	        echo "installing:$$missing"; \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	    fi; \
	elif ! command -v c++ >/dev/null; then \
	    echo "A C++17 compiler is missing. Install one (Debian: apt-get install g++), then run make again." >&2; exit 1; \
	fi
	@mkdir -p $(VENV) && touch $@

$(VENV)/.requirements: $(VENV)/.system pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.11' 'cffi>=2.1' 'patch-ng>=1.18' 'cmake>=3.21,<4.2' ninja
	@touch $@

$(VENV)/.lint: $(VENV)/.requirements pyproject.toml
	$(BIN)/python -m pip install --quiet --group lint
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --quiet --no-build-isolation '.[test]' \
	    -C build-dir=build -C cmake.define.GGML_NATIVE=ON -C install.strip=false
	@touch $@

clean:
	rm -rf build build-stock build-upstream build-vulkan $(VENV)
