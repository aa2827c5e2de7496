// Counts forks with pthread_atfork.
#include "core/fork.h"

#include <pthread.h>

#include <atomic>

namespace poise {
namespace {

std::atomic<int> generation{0};  // process-wide: a fork copies the whole process

}  // namespace

int fork_generation() {
  [[maybe_unused]] static const int once =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return generation.load(std::memory_order_relaxed);
}

}  // namespace poise
