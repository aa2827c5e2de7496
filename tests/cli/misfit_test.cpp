// What is said of levers where nothing fits, word for word.
#include <gtest/gtest.h>

#include "poise/cli.h"

namespace poise::cli {
namespace {

plan::Lever lever(const char* name, const char* setting, std::int64_t bytes, bool changes_numbers,
                  bool fits) {
  plan::Lever made{name, setting, changes_numbers, fits, {}};
  made.plan.memory.peak = bytes;
  return made;
}

plan::Lever host(bool fits) {
  return lever("optimizer states on the host", "offload.optimizer: host", 3 << 20, false, fits);
}
plan::Lever ranks(bool fits) { return lever("twice the ranks", "4 ranks", 2 << 20, false, fits); }
plan::Lever adapters(bool fits) {
  return lever("LoRA adapters alone are trained", "rank 16 on every matrix", 1 << 20, true, fits);
}

TEST(Misfit, SaysWhichLeversWouldFit) {
  EXPECT_EQ(what_helps({host(true), ranks(true), adapters(true)}),
            "the same training would fit: optimizer states on the host (offload.optimizer: host, "
            "3.00 MiB), or twice the ranks (4 ranks, 2.00 MiB); another training would fit: LoRA "
            "adapters "
            "alone are trained (rank 16 on every matrix, 1.00 MiB)");
  EXPECT_EQ(what_helps({host(false), ranks(true), adapters(false)}),
            "the same training would fit: twice the ranks (4 ranks, 2.00 MiB)");
  EXPECT_EQ(what_helps({host(false), adapters(true)}),
            "another training would fit: LoRA adapters alone are trained (rank 16 on every matrix, "
            "1.00 MiB)");
}

TEST(Misfit, SaysTheBestLeverWhereNoneWouldFit) {
  EXPECT_EQ(what_helps({host(false), ranks(false)}),
            "no lever alone is enough; the one that needs least: twice the ranks (4 ranks, 2.00 "
            "MiB)");
}

TEST(Misfit, GivesBudgetsThatAreNoLessThanTheBytes) {
  EXPECT_EQ(budget_text(1024), "1.00KiB");
  EXPECT_EQ(budget_text(1025), "1.01KiB");
  EXPECT_EQ(budget_text((5ll << 30) / 4 + 1), "1.26GiB");
  EXPECT_EQ(budget_text(3ll << 50), "3072.00TiB");
}

}  // namespace
}  // namespace poise::cli
