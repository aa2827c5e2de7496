// pybind11 and torch's casters, compiled once for all binding files.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
