// A span whose transfers take as long as a test wants.
#pragma once

#include <ATen/ops/zeros.h>

#include <future>
#include <utility>

#include "poise/offload.h"

namespace poise::testing {

// Its fetches wait until they may go.
class SlowSpan final : public offload::Span {
 public:
  SlowSpan(std::int64_t numel, Stream& stream, std::shared_future<void> go)
      : Span(numel, at::kFloat),
        stream_(stream),
        go_(std::move(go)),
        kept_(at::zeros({numel}, at::kFloat)) {}

 private:
  Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
    return stream_.submit([this, begin, to] {
      go_.wait();
      to.copy_(kept_.narrow(0, begin, to.numel()));
    });
  }
  Event do_put(std::int64_t begin, const at::Tensor& from) override {
    kept_.narrow(0, begin, from.numel()).copy_(from);
    return {};
  }

  Stream& stream_;
  std::shared_future<void> go_;
  at::Tensor kept_;
};

}  // namespace poise::testing
