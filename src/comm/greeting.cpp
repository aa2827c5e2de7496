// Greetings wait apart: as long as the last rank takes.
#include "comm/greeting.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <utility>

#include "comm/apart.h"
#include "comm/flat.h"

namespace poise::comm {
namespace {

constexpr std::chrono::hours kNoLimit{24 * 365};

}  // namespace

Greeting::Greeting(c10d_calls::BackendPtr gloo, int rank, int size, int tag)
    : messages_(std::make_shared<Messages>(std::move(gloo), kNoLimit)),
      all_(apart([messages = messages_, bytes = at::zeros({size}, at::kByte), rank, size, tag] {
        const auto own = piece_of(bytes, rank, size);
        messages->exchange(pieces_of(bytes, rank, size), copies_of(own, rank, size), tag);
      })) {}

std::optional<PeerFailure> Greeting::lost() {
  if (!all_.valid() || !is_over(all_)) return std::nullopt;
  try {
    all_.get();
  } catch (const PeerFailure& failure) {
    return failure;
  } catch (const Stopped&) {  // by the end of the group, which has a reason of its own
  }
  return std::nullopt;
}

}  // namespace poise::comm
