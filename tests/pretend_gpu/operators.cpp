// Torch's operators on the pretend GPU: each one that has a kernel for CUDA runs that of the CPU
// over the same memory instead.
//
// An operator runs at once, after what its stream has queued, so that its results may be made on
// the way; copies between host and device keep torch's own code and are queued.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pretend_gpu.h"

namespace {

using c10::IValue;

// These work on the device's memory by torch's own code, without a kernel.
const std::set<std::string> kWithoutKernel = {
    "aten::_has_same_storage_numel",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::as_strided",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::set_.source_Tensor_storage_offset",
    "aten::unfold",
    "aten::view",
    "aten::view.dtype",
    "aten::view_as_complex",
    "aten::view_as_real",
};

// A tensor of the device, and a tensor of the CPU over the same memory.
struct Twin {
  at::Tensor on_gpu;
  at::Tensor on_cpu;
};

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().data() == b.storage().data() && a.storage().data() != nullptr;
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

class Twins {
 public:
  const at::Tensor& on_cpu(const at::Tensor& tensor) {
    for (const Twin& twin : made_) {
      if (twin.on_gpu.is_same(tensor)) return twin.on_cpu;
    }
    auto* data = tensor.unsafeGetTensorImpl()->unsafe_storage().mutable_data();
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         c10::DataPtr(data, c10::kCPU), c10::GetCPUAllocator(), true);
    auto twin = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
    if (tensor.is_conj()) twin._set_conj(true);
    if (tensor.is_neg()) twin._set_neg(true);
    made_.push_back({tensor, twin});
    return made_.back().on_cpu;
  }

  // What a kernel returned: an argument, a view of one, or new memory.
  at::Tensor on_gpu(const at::Tensor& tensor) const {
    for (const Twin& twin : made_) {
      if (twin.on_cpu.is_same(tensor)) return twin.on_gpu;
    }
    for (const Twin& twin : made_) {
      if (!same_memory(twin.on_cpu, tensor)) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(twin.on_gpu.storage()),
                                                           twin.on_gpu.key_set(), tensor.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                        tensor.storage_offset());
      return view;
    }
    auto moved =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCUDA));
    fill(moved, tensor);
    return moved;
  }

  // Arguments that the kernel gave other memory: out= of another size.
  void resize_arguments() const {
    for (const auto& [gpu, cpu] : made_) {
      if (cpu.sizes() == gpu.sizes() && cpu.storage().data() == gpu.storage().data()) continue;
      gpu.resize_(cpu.sizes());
      const pretend_gpu::Kernel kernel(gpu.device().index());
      fill(gpu, cpu.contiguous());
    }
  }

 private:
  static void fill(const at::Tensor& gpu, const at::Tensor& cpu) {
    const std::size_t bytes = bytes_of(cpu);
    if (bytes == 0) return;
    const pretend_gpu::Kernel kernel(gpu.device().index());
    std::memcpy(gpu.unsafeGetTensorImpl()->mutable_data(), cpu.const_data_ptr(), bytes);
  }

  std::vector<Twin> made_;
};

// change(tensor) in place of every tensor in `value`.
template <class Change>
void change_tensors(IValue& value, Change change) {
  const auto changed = [&](const at::Tensor& tensor) {
    return tensor.defined() ? change(tensor) : tensor;
  };
  if (value.isTensor()) {
    value = changed(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(changed(*tensor)) : std::nullopt);
    }
    value = list;
  }
}

// Where an operator runs, as torch's own wrappers find it: where its first tensor is, or where it
// was told to make one.
std::optional<c10::Device> device_of(const std::vector<IValue*>& arguments) {
  std::optional<c10::Device> found;
  const auto look = [&](const at::Tensor& tensor) {
    if (!found && tensor.is_cuda()) found = tensor.device();
    return tensor;
  };
  for (IValue* value : arguments) change_tensors(*value, look);
  for (const IValue* value : arguments) {
    if (!found && value->isDevice() && value->toDevice().is_cuda()) found = value->toDevice();
  }
  return found;
}

// Kernels of a GPU take numbers from the CPU, as tensors of no dimension, and indices.
void check_devices(const std::string& name, const std::vector<IValue*>& arguments,
                   c10::Device device) {
  static const std::set<std::string> takes_indices = {"aten::index", "aten::_index_put_impl_",
                                                      "aten::index_put_"};
  const auto look = [&](const at::Tensor& tensor) {
    const bool number = tensor.is_cpu() && tensor.dim() == 0;
    TORCH_CHECK(
        tensor.device() == device || number || (tensor.is_cpu() && takes_indices.count(name) > 0),
        "Expected all tensors to be on the same device, but ", name, " got one on ",
        tensor.device(), " and one on ", device, " (said by the pretend GPU)");
    return tensor;
  };
  for (IValue* value : arguments) change_tensors(*value, look);
}

// While it lives, the generator of the CPU draws what the next place of a GPU's generator gives.
class DrawFor {
 public:
  explicit DrawFor(at::Generator gpu)
      : cpu_(at::globalContext().defaultGenerator(c10::kCPU)), before_(cpu_.get_state()) {
    std::uint64_t place;
    {
      const std::lock_guard guard(gpu.mutex());
      place = gpu.current_seed() * 0x9E3779B97F4A7C15ULL + gpu.get_offset() * 0xD1B54A32D192ED03ULL;
      gpu.set_offset(gpu.get_offset() + 4);
    }
    cpu_.set_current_seed(place);
  }
  ~DrawFor() { cpu_.set_state(before_); }

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  std::vector<IValue*> arguments;
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    arguments.push_back(&(*stack)[i]);
  }
  const auto device = device_of(arguments);
  const c10::cuda::OptionalCUDAGuard guard(device);
  const int index = pretend_gpu::current_device();
  check_devices(op.schema().name(), arguments,
                c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
  pretend_gpu::reach(c10::cuda::getCurrentCUDAStream().stream());

  Twins twins;
  std::optional<at::Generator> generator;
  for (IValue* value : arguments) {
    change_tensors(*value, [&](const at::Tensor& tensor) {
      return tensor.is_cuda() ? twins.on_cpu(tensor) : tensor;
    });
    if (value->isDevice()) *value = c10::Device(c10::kCPU);
    if (value->isGenerator()) {
      generator = value->toGenerator();
      *value = IValue();
    }
  }
  std::optional<DrawFor> draws;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    draws.emplace(generator ? *generator
                            : at::globalContext().defaultGenerator(
                                  c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))));
  }
  {
    const pretend_gpu::Kernel kernel(index);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  draws.reset();
  twins.resize_arguments();
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    change_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return tensor.is_cpu() ? twins.on_gpu(tensor) : tensor;
    });
  }
}

// Torch's own copy, but where that launches a kernel: another type, or strides.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool plain = self.is_non_overlapping_and_dense() && self.strides() == source.strides() &&
                     self.sizes() == source.sizes() && self.dtype() == source.dtype() &&
                     self.is_neg() == source.is_neg() && self.is_conj() == source.is_conj();
  if (plain || self.device() != source.device()) {
    return at::native::copy_(self, source, non_blocking);
  }
  if (self.is_same(source)) return self;
  const c10::cuda::CUDAGuard guard(self.device());
  pretend_gpu::reach(c10::cuda::getCurrentCUDAStream().stream());
  Twins twins;
  at::Tensor to = twins.on_cpu(self);
  const at::Tensor from = twins.on_cpu(source);
  const pretend_gpu::Kernel kernel(self.device().index());
  at::native::copy_(to, from, false);
  return self;
}

// Torch warns of each operator that is given another kernel.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Registration {
  Registration() {
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& op : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
      const std::string name = op.name + (op.overload_name.empty() ? "" : "." + op.overload_name);
      if (name.rfind("aten::", 0) != 0 || kWithoutKernel.count(name) > 0) continue;
      if (name == "aten::copy_") continue;
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    library.impl("aten::copy_", copy);
    // Attention by plain operators: the CPU has none of the others for CUDA's arguments.
    auto& context = at::globalContext();
    context.setSDPUseFlash(false);
    context.setSDPUseMemEfficient(false);
    context.setSDPUseCuDNN(false);
  }
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};
const Registration registration;

}  // namespace
