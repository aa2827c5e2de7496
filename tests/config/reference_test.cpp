// docs/config.md is what the schema says.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "poise/config.h"

namespace poise::config {
namespace {

TEST(Reference, PageIsUpToDate) {
  std::ifstream file(POISE_CONFIG_PAGE);
  ASSERT_TRUE(file) << POISE_CONFIG_PAGE;
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), reference()) << "run: poise config --reference > docs/config.md";
}

}  // namespace
}  // namespace poise::config
