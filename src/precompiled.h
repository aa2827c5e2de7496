// Torch headers that most sources include, compiled once per build.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>
