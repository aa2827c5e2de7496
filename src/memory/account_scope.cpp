// Scopes: which ledger and account this thread's allocations go to.
#include "memory/account_scope.h"

#include <map>
#include <mutex>
#include <utility>

#include "memory/ledger_state.h"

namespace poise::memory {
namespace {

// Thread-local: c10's allocator interface passes nothing but a size.
thread_local AccountScope::Position position;

// Process-wide: autograd's threads are, one for each GPU.
struct OfAutograd {
  std::mutex mutex;
  std::map<c10::DeviceIndex, AccountScope::Position> positions;
};
OfAutograd& of_autograd() {
  static auto* one = new OfAutograd;
  return *one;
}

}  // namespace

AccountScope::Position autograd_position(c10::DeviceIndex device) {
  const std::lock_guard guard(of_autograd().mutex);
  const auto found = of_autograd().positions.find(device);
  return found == of_autograd().positions.end() ? AccountScope::Position() : found->second;
}

AutogradScope::AutogradScope(const Ledger& ledger, Account account)
    : device_(ledger.state()->device()) {
  if (device_.is_cpu()) return;
  AccountScope::Position position{ledger.state(), account};
  const std::lock_guard guard(of_autograd().mutex);
  std::swap(of_autograd().positions[device_.index()], position);
  previous_ = std::move(position);
}

AutogradScope::~AutogradScope() {
  if (device_.is_cpu()) return;
  const std::lock_guard guard(of_autograd().mutex);
  std::swap(of_autograd().positions[device_.index()], previous_);
}

const AccountScope::Position& current_position() { return position; }

AccountScope::AccountScope(const Ledger& ledger, Account account)
    : AccountScope(Position{ledger.state(), account}) {}

AccountScope::AccountScope(Account account) : AccountScope(Position{position.ledger, account}) {}

AccountScope::AccountScope(const Position& wanted) : previous_(std::exchange(position, wanted)) {}

AccountScope::~AccountScope() { position = std::move(previous_); }

AccountScope::Position AccountScope::current() { return position; }

Stream::Capture scope_capture() {
  return [] {
    return [at_submit = position]() -> std::shared_ptr<void> {
      return std::make_shared<AccountScope>(at_submit);
    };
  };
}

}  // namespace poise::memory
