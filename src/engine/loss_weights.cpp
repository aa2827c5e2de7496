// The forms a loss may have, its weight, and the sums of a window.
#include "engine/loss_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <cmath>
#include <utility>

#include "poise/log.h"

namespace poise {

namespace {
at::Tensor host_scalar(double value) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(at::kDouble));
}

Loss make_loss(at::Tensor value, Loss::Kind kind, at::Tensor count) {
  Loss loss(std::move(value));
  loss.kind = kind;
  loss.count = std::move(count);
  return loss;
}
}  // namespace

Loss Loss::mean(at::Tensor value, double count) {
  return mean(std::move(value), host_scalar(count));
}
Loss Loss::mean(at::Tensor value, at::Tensor count) {
  return make_loss(std::move(value), Kind::mean, std::move(count));
}
Loss Loss::sum(at::Tensor value, double count) { return sum(std::move(value), host_scalar(count)); }
Loss Loss::sum(at::Tensor value, at::Tensor count) {
  return make_loss(std::move(value), Kind::sum, std::move(count));
}
Loss Loss::per_token(at::Tensor values) {
  return make_loss(std::move(values), Kind::per_token, {});
}

namespace engine {
namespace {

constexpr std::size_t kLossSlot = 0;
constexpr std::size_t kTokenSlot = 1;  // the terms follow

void check_value(const at::Tensor& value, bool scalar) {
  if (!value.defined())
    fail("engine", "the loss is an undefined tensor; return the loss of the micro-batch");
  if (!at::isFloatingType(value.scalar_type())) {
    fail("engine", "the loss is of type ", value.scalar_type(), "; return a floating point tensor");
  }
  if (scalar && value.numel() != 1) {
    fail("engine", "the loss has ", value.numel(), " elements (shape ", value.sizes(),
         "); return a scalar, or per-token losses as Loss::per_token");
  }
}

// 0, and its gradient is 0, whatever the value.
at::Tensor masked_out(const at::Tensor& value) {
  const auto zero = at::zeros({}, value.options());
  return at::where(zero > 0, value, zero);
}

void check_graph(const at::Tensor& total) {
  if (total.requires_grad()) return;
  fail("engine",
       "the loss does not depend on any trainable parameter (it has no gradient); return it "
       "with its graph: no detach(), no no_grad, no .item()");
}

}  // namespace

LossWeights::LossWeights(config::LossWeighting weighting, bool fp16, at::Device device,
                         comm::Group& group, Wait wait)
    : weighting_(weighting), fp16_(fp16), group_(group), wait_(std::move(wait)) {
  sums_ = at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device));
}

void LossWeights::begin_window(std::vector<double> counts) {
  for (const double count : counts) {
    if (!std::isfinite(count) || count < 0) {
      fail("engine", "a count of the window is ", count,
           "; counts are numbers of tokens, 0 or more");
    }
  }
  if (!counts.empty() && counts.front() == 0) {
    fail("engine",
         "the window counts 0 tokens for its main loss; terms cannot be weighed against it");
  }
  agreed_in_window_ = false;
  counts_ = std::move(counts);
  const auto slots = static_cast<std::int64_t>(std::max<std::size_t>(2, 1 + counts_.size()));
  if (sums_.numel() == slots) {
    sums_.zero_();
  } else {
    sums_ = at::zeros({slots}, sums_.options());
  }
}

LossWeights::Part LossWeights::part_of(const at::Tensor& value, Loss::Kind kind,
                                       const at::Tensor& count, bool is_term) {
  check_value(value, kind != Loss::Kind::per_token);
  const auto type = value.scalar_type();
  // Widened before it is weighted: n times a 16-bit loss overflows.
  auto wide = type == at::kHalf || type == at::kBFloat16 ? value.to(at::kFloat) : value;
  Part part;
  part.is_mean = kind == Loss::Kind::mean;
  part.value = kind == Loss::Kind::per_token ? wide.sum() : wide.reshape({});
  part.count = count;
  if (!count.defined()) {
    if (kind == Loss::Kind::sum) {
      fail(
          "engine",
          "a loss that is a sum came without its number of tokens; return Loss::sum(value, count)");
    }
    part.count =
        host_scalar(kind == Loss::Kind::per_token ? static_cast<double>(value.numel()) : 1.0);
    if (part.is_mean && !is_term && weighting_ == config::LossWeighting::tokens &&
        !uncounted_noted_) {
      log::info(
          "a mean loss came without its number of tokens: micro-batches weigh the same (said once; "
          "return the count too, or set engine.loss_weighting to micro_batch_mean)");
      uncounted_noted_ = true;
    }
  } else if (count.numel() != 1) {
    fail("engine", "the loss's count has ", count.numel(),
         " elements; return one number of tokens");
  } else {
    part.count = count.detach().reshape({});
  }
  const auto read_on_host = [&] {
    if (!part.count.device().is_cpu()) return;
    part.host_count = part.count.item<double>();
    if (!std::isfinite(*part.host_count) || *part.host_count < 0) {
      fail("engine", "the loss's count is ", *part.host_count,
           "; it is a number of tokens, 0 or more");
    }
  };
  read_on_host();
  if (part.is_mean && !is_term && weighting_ == config::LossWeighting::micro_batch_mean) {
    // A masked-out micro-batch still counts nothing: its mean is NaN.
    part.count = count.defined() ? part.count.gt(0).to(at::kDouble) : host_scalar(1.0);
    read_on_host();
  }
  return part;
}

at::Tensor LossWeights::weigh_part(const Part& part, double share, double scale, std::size_t slot) {
  const double exact = std::ldexp(share * scale, -q());
  const bool empty = part.host_count == 0.0;
  {
    at::NoGradGuard no_grad;
    const auto sum = [&](std::size_t i) { return sums_.select(0, static_cast<std::int64_t>(i)); };
    sum(slot).add_(part.count);
    if (!empty) {
      auto loss = part.value.detach().to(at::kDouble);
      if (part.is_mean && part.host_count) {
        loss =
            loss * *part.host_count;  // a condition on the host would make it wait for the device
      } else if (part.is_mean) {
        loss = at::where(part.count > 0, loss * part.count, at::zeros({}, loss.options()));
      }
      sum(kLossSlot).add_(loss, share);
    }
  }
  if (empty) return {};  // a mean over nothing is NaN, and so may be its gradient
  if (!part.is_mean) return part.value * exact;
  if (part.host_count) return part.value * (*part.host_count * exact);
  // The count is on the device: no read, so an empty mean is masked instead of left out.
  const auto weighted = part.value * part.count.to(part.value.scalar_type()) * exact;
  return at::where(part.count > 0, weighted, at::zeros({}, weighted.options()));
}

void LossWeights::agree_on_q(double count) {
  if (fp16_ && group_.size() > 1) {
    const auto on_device = at::full({1}, count, sums_.options());
    wait_(group_.broadcast(on_device, 0, "tokens of the first micro-batch"));
    count = on_device.item<double>();
    group_.check();
  }
  agreed_in_window_ = true;
  only_for_window_ = fp16_ && count == 0;
  q_ = count > 1 ? static_cast<int>(std::ceil(std::log2(count))) : 0;
}

void LossWeights::agree_without_micro_batch() {
  if (!q_) agree_on_q(0);
}

at::Tensor LossWeights::weigh(const Loss& loss, double scale, Empty empty) {
  if (!loss.terms.empty() && counts_.size() != 1 + loss.terms.size()) {
    fail("engine", "a loss with ", loss.terms.size(),
         " further terms needs the window's counts before its "
         "first forward (",
         1 + loss.terms.size(), " of them, got ", counts_.size(),
         "); pass counts to step() or begin_window()");
  }
  const auto main = part_of(loss.value, loss.kind, loss.count, false);
  if (!q_) {
    const double count = fp16_ ? main.count.item<double>() : 1.0;  // one read per run
    // One that counts nothing at all has no weight: the next one says.
    const bool says_nothing = count == 0 && loss.terms.empty() && group_.size() == 1;
    if (!says_nothing) agree_on_q(count);
  }
  auto total = weigh_part(main, 1.0, scale, kTokenSlot);
  std::vector<at::Tensor> uncounted;
  if (!total.defined()) uncounted.push_back(main.value);
  for (std::size_t t = 0; t < loss.terms.size(); ++t) {
    const auto& term = loss.terms[t];
    if (counts_[t + 1] <= 0) continue;
    const auto part = part_of(term.value, term.kind, term.count, true);
    const double share = term.weight * counts_[0] / counts_[t + 1];
    const auto weighted = weigh_part(part, share, scale, kTokenSlot + 1 + t);
    if (!weighted.defined()) {
      uncounted.push_back(part.value);
    } else {
      total = total.defined() ? total + weighted : weighted;
    }
  }
  if (total.defined() && empty == Empty::kept) {
    for (const auto& value : uncounted) total = total + masked_out(value);
  }
  if (total.defined()) check_graph(total);
  return total;
}

at::Tensor everything(const Loss& loss) {
  auto total = loss.value.sum();
  for (const auto& term : loss.terms) total = total + term.value.sum();
  check_graph(total);
  return total;
}

std::vector<double> LossWeights::sums() const {
  const auto host = sums_.cpu();
  const auto* first = host.const_data_ptr<double>();
  return {first, first + host.numel()};
}

LossWeights::Totals LossWeights::totals(const std::vector<double>& sums) const {
  Totals totals;
  totals.tokens = sums[kTokenSlot];
  totals.loss = totals.tokens > 0 ? sums[kLossSlot] / totals.tokens : 0.0;
  if (!std::isfinite(sums[kLossSlot])) totals.loss = sums[kLossSlot];
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    // Weights of tokens need not be whole, and then two orders of adding them differ in last bits.
    constexpr double kRounding = 1e-10;
    if (std::abs(sums[kTokenSlot + i] - counts_[i]) > kRounding * counts_[i]) {
      fail("engine", "the window was announced with ", counts_[i], " tokens for ",
           i == 0 ? std::string("its main loss") : join("term ", i),
           ", but its micro-batches counted ", sums[kTokenSlot + i],
           "; pass the totals over all micro-batches of the window, of all ranks");
    }
  }
  return totals;
}

double LossWeights::mean_factor(double tokens) const { return std::ldexp(1.0 / tokens, q()); }

}  // namespace engine
}  // namespace poise
