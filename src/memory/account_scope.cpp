// Scopes: which ledger and account this thread's allocations go to.
#include "memory/account_scope.h"

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
  AccountScope::Position position;
};
OfAutograd& of_autograd() {
  static auto* one = new OfAutograd;
  return *one;
}

void set_autograd_position(AccountScope::Position wanted) {
  const std::lock_guard guard(of_autograd().mutex);
  std::swap(of_autograd().position, wanted);
}

}  // namespace

AccountScope::Position autograd_position() {
  const std::lock_guard guard(of_autograd().mutex);
  return of_autograd().position;
}

AutogradScope::AutogradScope(const Ledger& ledger, Account account)
    : on_gpu_(!ledger.state()->device().is_cpu()) {
  if (on_gpu_) set_autograd_position({ledger.state(), account});
}

AutogradScope::~AutogradScope() {
  if (on_gpu_) set_autograd_position({});
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
