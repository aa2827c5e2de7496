// A save as people see it: what it holds, and what tells two of them apart.
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/ne.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

#include "poise/error.h"
#include "poise/memory.h"
#include "poise/state.h"
#include "state/saved.h"

namespace poise::state {
namespace {

std::int64_t bytes_of(const Manifest& manifest) {
  std::int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += static_cast<std::int64_t>(file.bytes);
  return bytes;
}

template <class T>
void compare(std::vector<std::string>& lines, const std::string& what, const T& a, const T& b) {
  if (a != b) lines.push_back(join(what, ": ", a, " and ", b));
}

// In the first one's memory order.
at::Tensor values_of(const Saved& saved, const std::string& kind, const SavedParameter& parameter,
                     const std::vector<std::int64_t>& order, std::int64_t numel,
                     at::ScalarType type) {
  auto values = at::empty({numel}, type);
  saved.read(kind, parameter, 0, order, values);
  return values;
}

// Torch neither compares nor joins those of one byte.
at::ScalarType comparable(at::ScalarType type) {
  return c10::isFloat8Type(type) ? at::kFloat : type;
}

// One that has all values of both.
at::ScalarType common_type(at::ScalarType a, at::ScalarType b) {
  a = comparable(a), b = comparable(b);
  if (a == b) return a;
  const bool exact = at::isIntegralType(a, true) != at::isIntegralType(b, true);
  return c10::promoteTypes(exact ? c10::promoteTypes(a, at::kDouble) : a, b);
}

// Where values are not the same; a NaN is the same as a NaN.
at::Tensor differing(const at::Tensor& one, const at::Tensor& other) {
  const auto x = one.to(comparable(one.scalar_type()));
  const auto y = other.to(comparable(other.scalar_type()));
  return at::logical_and(at::ne(x, y), at::logical_or(at::eq(x, x), at::eq(y, y)));
}

// The largest of some magnitudes; a NaN among them is the last to be told.
double largest(const at::Tensor& values) {
  const auto wide = at::isComplexType(values.scalar_type()) ? values.abs() : values;
  const auto magnitudes = at::abs(wide.to(at::kDouble));
  const auto numbers = at::masked_select(magnitudes, at::eq(magnitudes, magnitudes));
  if (numbers.numel() == 0) return std::numeric_limits<double>::quiet_NaN();
  return numbers.max().item<double>();
}

// Integers count exactly up to where they no longer fit in 64 bits.
at::Tensor distance(const at::Tensor& x, const at::Tensor& y) {
  const auto type = x.scalar_type();
  const auto exact = at::isIntegralType(type, /*includeBool=*/true) ? at::kLong : at::kDouble;
  const auto wide = at::isComplexType(type) ? at::kComplexDouble : exact;
  return x.to(wide) - y.to(wide);
}

void compare_parameter(std::vector<std::string>& lines, const Saved& a, const Saved& b,
                       const SavedParameter& p, const SavedParameter& q) {
  if (p.shape != q.shape || p.trainable != q.trainable) {
    lines.push_back(join("parameter ", p.name, ": another shape, or frozen in one"));
    return;
  }
  std::vector<std::pair<std::string, std::int64_t>> kinds{
      {p.trainable ? kMaster : kValue, p.numel()}};
  const auto &moments = a.manifest().moments, &others = b.manifest().moments;
  for (std::size_t i = 0; p.trainable && i < std::min(moments.size(), others.size()); ++i) {
    if (moments[i] != others[i]) continue;  // the optimizers differ, which is said
    if (moments[i] != SavedMoment() && !same_order(p.shape, p.order, q.order)) continue;
    kinds.emplace_back(moment(static_cast<std::int64_t>(i)), moments[i].numel(p));
  }
  for (const auto& [kind, numel] : kinds) {
    const auto type = common_type(a.type_of(kind, p), b.type_of(kind, q));
    const auto x = values_of(a, kind, p, p.order, numel, type);
    const auto y = values_of(b, kind, q, p.order, numel, type);
    const auto apart = differing(x, y);
    if (!apart.any().item<bool>()) continue;
    const auto most = largest(distance(x.masked_select(apart), y.masked_select(apart)));
    lines.push_back(
        join(kind, " of ", p.name, ": up to ", most, " apart, largest value ", largest(x)));
  }
}

}  // namespace

void verify(const std::string& save) { Saved(save).verify(); }

std::vector<std::string> describe(const std::string& save) {
  const Saved saved(save);
  const auto& m = saved.manifest();
  std::int64_t numel = 0, trained = 0;
  for (const auto& parameter : m.parameters) {
    numel += parameter.numel();
    if (parameter.trainable) trained += parameter.numel();
  }
  std::vector<std::string> lines{
      save,
      join("  after ", m.progress.updates, " updates, ", m.progress.skipped,
           " skipped; written by poise ", m.written_by),
      join("  ", m.ranks, m.ranks == 1 ? " rank" : " ranks", ", stage ", m.stage, "; ",
           m.files.size(), " files, ", memory::format_bytes(bytes_of(m))),
      join("  ", m.parameters.size(), " parameters, ", numel, " elements, ", trained, " trained; ",
           m.buffers.size(), " buffers"),
      join("  ", m.optimizer, ", ", m.moments.size(), " moments; next learning rate ",
           m.learning_rate, ", loss scale ", m.progress.loss_scale),
  };
  if (m.cursor) lines.push_back(join("  data goes on at sample ", *m.cursor));
  for (const auto& [key, value] : m.user) {
    constexpr std::size_t kMost = 60;
    const bool is_long = value.size() > kMost;
    lines.push_back(join("  ", key, ": ", value.substr(0, kMost), is_long ? "..." : ""));
  }
  return lines;
}

std::vector<std::string> differences(const std::string& save, const std::string& other) {
  const Saved a(save), b(other);
  const auto &m = a.manifest(), &n = b.manifest();
  std::vector<std::string> lines;
  compare(lines, "updates", m.progress.updates, n.progress.updates);
  compare(lines, "skipped", m.progress.skipped, n.progress.skipped);
  compare(lines, "optimizer", m.optimizer, n.optimizer);
  compare(lines, "loss scale", m.progress.loss_scale, n.progress.loss_scale);
  compare(lines, "cursor", m.cursor.value_or(-1), n.cursor.value_or(-1));
  for (const auto& parameter : m.parameters) {
    const auto* match = b.parameter(parameter.name);
    if (match) {
      compare_parameter(lines, a, b, parameter, *match);
    } else {
      lines.push_back(join("parameter ", parameter.name, ": only in ", save));
    }
  }
  for (const auto& parameter : n.parameters) {
    if (!a.parameter(parameter.name)) {
      lines.push_back(join("parameter ", parameter.name, ": only in ", other));
    }
  }
  for (const auto& buffer : m.buffers) {
    const auto x = a.whole(kBuffer, buffer.name, 0), y = b.whole(kBuffer, buffer.name, 0);
    if (!y.defined() || x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type() ||
        differing(x, y).any().item<bool>()) {
      lines.push_back(join("buffer ", buffer.name, " differs"));
    }
  }
  for (const auto& buffer : n.buffers) {
    if (!a.whole(kBuffer, buffer.name, 0).defined()) {
      lines.push_back(join("buffer ", buffer.name, ": only in ", other));
    }
  }
  return lines;
}

}  // namespace poise::state
