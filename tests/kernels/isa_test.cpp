// Choosing the instruction set, and the clear errors around it.
#include "kernels/isa.h"

#include <gtest/gtest.h>

#include "kernels/norm.h"
#include "poise/error.h"

namespace poise::kernels {
namespace {

TEST(Isa, BestIsTheDefaultAndEachCanBeNamed) {
  const std::vector<Isa> available = available_isas();
  ASSERT_FALSE(available.empty());
  EXPECT_EQ(available.front(), Isa::baseline);
  EXPECT_EQ(choose_isa(""), available.back());
  for (const Isa isa : available) EXPECT_EQ(choose_isa(name_of(isa)), isa);
}

TEST(Isa, UnknownNameIsRefusedWithTheAllowedOnes) {
  try {
    choose_isa("avx3");
    FAIL() << "chose something";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("[kernels] POISE_CPU_ISA"), std::string::npos) << what;
    EXPECT_NE(what.find("'avx3'"), std::string::npos) << what;
    EXPECT_NE(what.find("baseline"), std::string::npos) << what;
  }
  EXPECT_THROW(choose_isa("AVX2"), Error);
}

TEST(Isa, OverridesNest) {
  const Isa before = active_isa();
  {
    const IsaOverride outer(Isa::baseline);
    EXPECT_EQ(active_isa(), Isa::baseline);
    {
      const IsaOverride inner(available_isas().back());
      EXPECT_EQ(active_isa(), available_isas().back());
    }
    EXPECT_EQ(active_isa(), Isa::baseline);
  }
  EXPECT_EQ(active_isa(), before);
}

}  // namespace
}  // namespace poise::kernels
