// torch's profiler around a few updates.
#include "cli/trace.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>

namespace poise::cli {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

}  // namespace

Trace::Trace(std::vector<std::int64_t> updates, std::string path)
    : updates_(std::move(updates)), path_(std::move(path)) {}

Trace::~Trace() {
  if (running_) profiler::disableProfiler();
}

void Trace::before(std::int64_t update) {
  if (updates_.empty() || update != updates_[0]) return;
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (at::hasCUDA()) activities.insert(ActivityType::CUDA);
  const ProfilerConfig config(ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(
      config, activities,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
  running_ = true;
}

bool Trace::after(std::int64_t update) {
  if (!running_ || update < updates_[1]) return false;
  running_ = false;
  profiler::disableProfiler()->save(path_);
  return true;
}

}  // namespace poise::cli
