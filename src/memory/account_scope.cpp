// Scopes: which ledger and account this thread's allocations go to.
#include "memory/account_scope.h"

#include <utility>

namespace poise::memory {
namespace {

// Thread-local: c10's allocator interface passes nothing but a size.
thread_local AccountScope::Position position;

}  // namespace

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
