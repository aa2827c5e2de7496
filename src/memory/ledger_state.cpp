// Adding to and taking from the books, and the message of a budget that ran out.
#include "memory/ledger_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace poise::memory {
namespace {

// "activations 40.00 MiB, parameters 10.00 MiB": the largest accounts first.
std::string largest(const std::array<std::int64_t, kAccounts>& accounts) {
  std::array<int, kAccounts> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return accounts[a] > accounts[b]; });
  std::string text;
  for (int account : order) {
    if (accounts[account] == 0) break;
    text += text.empty() ? "" : ", ";
    text += name_of(static_cast<Account>(account));
    text += ' ' + format_bytes(accounts[account]);
  }
  return text.empty() ? "nothing yet" : text;
}

// torch's own type and wording, so that code which catches a GPU's out-of-memory error works here.
[[noreturn]] void out_of_memory(std::int64_t bytes, Account account, const Snapshot& books,
                                std::int64_t budget) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "[memory] CPU out of memory. Tried to allocate ",
                   format_bytes(bytes), " for ", name_of(account), ". The budget is ",
                   format_bytes(budget), ", of which ", format_bytes(books.current_bytes),
                   " is held: ", largest(books.current),
                   "; use a smaller micro-batch with more accumulation, recompute activations, or "
                   "raise the budget");
}

}  // namespace

std::unique_lock<std::mutex> LedgerState::lock() const {
  return from_before_fork() ? std::unique_lock(mutex_, std::defer_lock) : std::unique_lock(mutex_);
}

void LedgerState::add(std::int64_t bytes, Account account) {
  if (from_before_fork()) return;
  std::unique_lock guard(mutex_);
  const std::int64_t total = books_.current_bytes + bytes;
  if (budget_ > 0 && total > budget_) {
    const Snapshot books = books_;
    const std::int64_t budget = budget_;
    guard.unlock();  // the message allocates
    out_of_memory(bytes, account, books, budget);
  }
  count(bytes, account);
}

void LedgerState::add_given(std::int64_t bytes, Account account) noexcept {
  if (from_before_fork()) return;
  const std::lock_guard guard(mutex_);
  count(bytes, account);
}

void LedgerState::count(std::int64_t bytes, Account account) noexcept {
  const auto index = static_cast<std::size_t>(account);
  const std::int64_t total = books_.current_bytes += bytes;
  books_.current[index] += bytes;
  books_.own_peak[index] = std::max(books_.own_peak[index], books_.current[index]);
  if (total > books_.peak_bytes) {
    books_.peak_bytes = total;
    books_.at_peak = books_.current;
  }
}

void LedgerState::remove(std::int64_t bytes, Account account) noexcept {
  if (from_before_fork()) return;
  const std::lock_guard guard(mutex_);
  books_.current_bytes -= bytes;
  books_.current[static_cast<std::size_t>(account)] -= bytes;
}

Snapshot LedgerState::snapshot() const {
  const auto guard = lock();
  return books_;
}

void LedgerState::reset_peak() {
  const auto guard = lock();
  books_.peak_bytes = books_.current_bytes;
  books_.at_peak = books_.current;
  books_.own_peak = books_.current;
}

void LedgerState::set_budget(std::int64_t bytes) {
  const auto guard = lock();
  budget_ = bytes;
}

std::int64_t LedgerState::budget() const {
  const auto guard = lock();
  return budget_;
}

}  // namespace poise::memory
