// Names of the accounts, as they stand in results, messages and reports.
#include "poise/error.h"
#include "poise/memory_accounts.h"

namespace poise::memory {

const char* name_of(Account account) {
  constexpr const char* kNames[kAccounts] = {"parameters", "gathered",    "gradients",
                                             "optimizer",  "activations", "communication",
                                             "staging",    "other"};
  const int index = static_cast<int>(account);
  POISE_CHECK(index < kAccounts, "account ", index);
  return kNames[index];
}

}  // namespace poise::memory
