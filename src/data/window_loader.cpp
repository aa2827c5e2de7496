// WindowLoader: cursor arithmetic, micro-batches of a window, and when to read ahead.
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "data/read_ahead.h"
#include "poise/data.h"

namespace poise::data {
namespace {

WindowOptions checked(const WindowOptions& options, std::int64_t ranks) {
  const auto at_least = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least) fail("data", name, " is ", value, "; give ", least, " or more");
  };
  at_least("micro_batch_size", options.micro_batch_size, 1);
  at_least("accumulation", options.accumulation, 1);
  at_least("prefetch", options.prefetch, 0);
  at_least("epochs", options.epochs, 0);
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  if (options.accumulation > kMost / options.micro_batch_size / ranks) {
    fail("data", "a window of ", options.micro_batch_size, " x ", options.accumulation, " x ",
         ranks, " samples is past 2^63; give a smaller one");
  }
  return options;
}

}  // namespace

struct WindowLoader::Impl {
  Impl(std::shared_ptr<const Source> from, const SamplerOptions& sampling,
       const WindowOptions& wanted)
      : source(std::move(from)),
        sampler(source ? source->size() : 0, sampling),
        options(checked(wanted, sampling.ranks)),
        samples(options.micro_batch_size * options.accumulation * sampling.ranks),
        ahead([this](std::int64_t at) { return read(at); }) {
    constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
    end = options.epochs == 0 || options.epochs > kMost / sampler.size()
              ? kMost
              : options.epochs * sampler.size();
  }

  // Samples asked for at a cursor: a window that runs on into the next epoch still stops at the
  // end.
  std::int64_t count(std::int64_t at) const { return std::min(samples.load(), end - at); }
  std::int64_t after(std::int64_t at) const { return sampler.advance(at, count(at)); }

  std::vector<Batch> read(std::int64_t at) const;
  void request_ahead();

  std::shared_ptr<const Source> source;
  Sampler sampler;
  WindowOptions options;
  std::atomic<std::int64_t> samples;  // of a full window, all ranks; the reading thread reads it
  std::int64_t end;                   // cursor after the last epoch
  std::int64_t cursor = 0;            // of the next window handed out
  std::int64_t requested = 0;         // cursor of the next window requested
  ReadAhead ahead;                    // last: its thread uses the members above
};

std::vector<Batch> WindowLoader::Impl::read(std::int64_t at) const {
  const std::vector<std::int64_t> indices = sampler.indices(at, count(at));
  const auto step = options.micro_batch_size;
  std::vector<Batch> window;
  for (auto from = indices.begin(); from != indices.end();) {
    const auto to = from + std::min<std::int64_t>(step, indices.end() - from);
    Batch batch = source->batch({from, to});
    if (options.memory == Memory::pinned) batch = {pinned(batch.inputs), pinned(batch.targets)};
    window.push_back(std::move(batch));
    from = to;
  }
  return window;
}

void WindowLoader::Impl::request_ahead() {
  if (ahead.requested() == 0) requested = cursor;
  while (requested < end && ahead.requested() < static_cast<std::size_t>(options.prefetch)) {
    ahead.request(requested);
    requested = after(requested);
  }
}

WindowLoader::WindowLoader(std::shared_ptr<const Source> source, const SamplerOptions& sampler,
                           const WindowOptions& options)
    : impl_(std::make_unique<Impl>(std::move(source), sampler, options)) {}

WindowLoader::~WindowLoader() = default;

std::optional<std::vector<Batch>> WindowLoader::next() {
  RECORD_USER_SCOPE("poise::data");
  Impl& in = *impl_;
  if (in.cursor >= in.end) return std::nullopt;
  std::vector<Batch> window;
  if (in.options.prefetch == 0) {
    window = in.read(in.cursor);
  } else {
    in.request_ahead();
    try {
      window = in.ahead.take();
    } catch (...) {
      in.ahead.drop();  // the cursor stays: the next call reads the same window again
      throw;
    }
  }
  in.cursor = in.after(in.cursor);
  if (in.options.prefetch > 0 && in.cursor < in.end) in.request_ahead();
  return window;
}

std::int64_t WindowLoader::cursor() const { return impl_->cursor; }

void WindowLoader::seek(std::int64_t cursor) {
  if (cursor < 0) fail("data", "cursor is ", cursor, "; a global sample index is 0 or more");
  if (cursor == impl_->cursor) return;
  impl_->ahead.drop();
  impl_->cursor = cursor;
}

void WindowLoader::set_accumulation(std::int64_t micro_batches) {
  Impl& in = *impl_;
  if (micro_batches == in.options.accumulation) return;
  auto options = in.options;
  options.accumulation = micro_batches;
  options = checked(options, in.sampler.options().ranks);
  in.ahead.drop();  // of what its thread still reads nobody takes anything
  in.options.accumulation = micro_batches;
  in.samples = options.micro_batch_size * micro_batches * in.sampler.options().ranks;
}

std::int64_t WindowLoader::window_samples() const { return impl_->samples; }
const Sampler& WindowLoader::sampler() const { return impl_->sampler; }

}  // namespace poise::data
