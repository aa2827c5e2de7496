// Tells errors of memory from others.
#include "poise/out_of_memory.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace poise {
namespace {

std::atomic<OutOfMemoryCheck> installed{nullptr};

}  // namespace

bool is_out_of_memory(const std::exception_ptr& error) {
  if (!error) return false;
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const c10::AcceleratorError& failed) {  // of an allocation beside torch's allocator
    constexpr int kCudaErrorMemoryAllocation = 2;
    return failed.get_error_code() == kCudaErrorMemoryAllocation;
  } catch (const c10::Error& failed) {  // cuBLAS finds no room for a handle or its workspace
    return std::strstr(failed.what_without_backtrace(), "CUBLAS_STATUS_ALLOC_FAILED") != nullptr;
  } catch (...) {
    const auto check = installed.load();
    return check != nullptr && check(error);
  }
}

OutOfMemoryCheck set_out_of_memory_check(OutOfMemoryCheck check) {
  return installed.exchange(check);
}

void throw_out_of_memory(const std::string& message) {
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message);
}

}  // namespace poise
