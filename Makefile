# The commands of the README. Everything is built under build/, everything written goes to out/.
#   YES=1 does not ask before installing; TORCH_INDEX= chooses another wheel source;
#   PRESET=cuda or asan builds that preset of CMakePresets.json; JOBS= limits parallel compilers.
PRESET ?= cpu
# A compiler on torch's headers takes up to 2 GB.
JOBS ?= $(shell awk -v cores="$$(nproc)" '/MemAvailable/ {jobs = int($$2 / 2000000); print jobs < 1 ? 1 : jobs < cores ? jobs : cores}' /proc/meminfo)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.PHONY: help setup setup-tests build build-tests test test-packaging demo bench stubs lint format clean

# The base folder makes ccache's paths relative: another build folder or clone finds the same objects.
export CCACHE_BASEDIR := $(CURDIR)
# Which python, and its folder first on the PATH: written by setup/prepare.sh.
environment := . build/setup/environment; export PYTHONPATH="$(CURDIR)/build/$(PRESET)/python"

help:
	echo "make demo   trains a small model several ways, prints a table, writes out/demo/report.html"
	echo "make test   builds everything and runs all C++ and Python tests"
	echo "make bench  measures what the README claims, writes out/bench/bench.jsonl"
	echo "make build | lint | format | clean"

setup:
	setup/prepare.sh

# Before `setup`, so that one list and one price are shown.
setup-tests:
	setup/prepare.sh tests

# What programs need: the library, the command, the Python package. The asan preset has no package.
programs := $(if $(filter asan,$(PRESET)),poise_cli,poise_cli poise_extension poise_python_stage)

# About 5 s of processor for a file. $(1): targets.
define compile
	$(environment)
	SECONDS=0
	cmake --preset $(PRESET) --log-level=WARNING
	files=$$(cmake --build --preset $(PRESET) --target $(1) -- -n | grep -c Building || true)
	[ "$$files" -lt 20 ] || echo "build: $$files files to compile, about $$((files * 5 / $(JOBS) / 60 + 1)) minutes on $(JOBS) free cores"
	cmake --build --preset $(PRESET) --parallel $(JOBS) --target $(1)
	echo "build: ready in $$SECONDS s (build/$(PRESET))"
endef

build: setup
	$(call compile,$(programs))

build-tests: setup-tests
	$(call compile,all)

test: build-tests
	$(environment)
	PRESET=$(PRESET) JOBS=$(JOBS) tests/run.sh

# FetchContent and pip install, which compile everything again.
test-packaging: build
	$(environment)
	python -m pytest -m rebuild tests/packaging

demo: build
	$(environment)
	python -m poise.demo

bench: build
	$(environment)
	python -m poise bench

# Writes the type stubs of the extension anew; a test compares them with the committed ones.
stubs: build
	$(environment)
	python python/stubs.py python

lint: setup
	$(environment)
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror
	ruff check .
	ruff format --check .
	echo "lint: clean"

format: setup
	$(environment)
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i
	ruff check --fix .
	ruff format .

clean:
	rm -rf build out
