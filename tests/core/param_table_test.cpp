#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "core/nearest_name.h"
#include "poise/core.h"

namespace poise {
namespace {

ModelView two_units() {
  const auto make = [](at::IntArrayRef sizes) { return at::zeros(sizes).requires_grad_(); };
  return {{{"head", make({3})}, {"a.w", make({16, 17})}, {"a.b", make({17})}, {"b.w", make({256})}},
          {},
          {{"a", {"a.w", "a.b"}}, {"b", {"b.w"}}}};
}

TEST(ParamTable, PlacesStartAtMultiplesOf256AndUnitsComeFirst) {
  const ParamTable table(two_units());
  ASSERT_EQ(table.entries().size(), 4u);
  EXPECT_EQ(table.entries()[0].name, "a.w");
  EXPECT_EQ(table.entries()[0].offset, 0);
  EXPECT_EQ(table.entries()[1].offset, 512) << "272 elements take two places of 256";
  EXPECT_EQ(table.flats()[0].numel, 768);
  EXPECT_EQ(table.entries()[2].name, "b.w");
  EXPECT_EQ(table.flats()[1].numel, 256);
  EXPECT_EQ(table.entries()[3].name, "head");
  EXPECT_EQ(table.units(), (std::vector<std::string>{"a", "b", "rest"}));
}

TEST(ParamTable, WhatIsUsedOutsideOfItsUnitLivesInTheRest) {
  auto view = two_units();
  const auto tied = view.parameters[1].tensor;  // a.w
  view.parameters.push_back({"head.w", tied});
  const ParamTable table(view);
  EXPECT_EQ(table.find("head.w"), table.find("a.w"));
  EXPECT_EQ(table.entries()[static_cast<std::size_t>(table.find("a.w"))].unit, table.rest_unit());
  EXPECT_EQ(table.needs(0), (std::vector<int>{0, table.rest_unit()}));
  EXPECT_EQ(table.needs(1), std::vector<int>{1});
  // A name that another unit lists is no use outside.
  view.units[1].parameters.push_back("head.w");
  const ParamTable between(view);
  EXPECT_EQ(between.entries()[static_cast<std::size_t>(between.find("a.w"))].unit, 0);
  EXPECT_EQ(between.needs(1), (std::vector<int>{0, 1}));
}

TEST(ParamTable, HashSeesEveryDifference) {
  const ParamTable table(two_units());
  EXPECT_EQ(table.hash(), ParamTable(two_units()).hash());
  auto renamed = two_units();
  renamed.parameters[0].name = "tail";
  EXPECT_NE(table.hash(), ParamTable(renamed).hash());
  auto reshaped = two_units();
  reshaped.parameters[3].tensor = at::zeros({16, 16}).requires_grad_();
  EXPECT_NE(table.hash(), ParamTable(reshaped).hash());
}

TEST(ParamTable, UnknownNamesNameTheNearest) {
  const ParamTable table(two_units());
  try {
    table.find("hea");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'head'"), std::string::npos);
  }
  auto bad = two_units();
  bad.units[0].parameters.push_back("a.x");
  EXPECT_THROW(ParamTable{bad}, Error);
}

TEST(NearestName, IsTheSmallestEditDistance) {
  EXPECT_EQ(nearest_name("adamv", {"sgd", "adam", "adamw"}), "adam");
  EXPECT_EQ(nearest_name("sdg", {"sgd", "adam"}), "sgd");
  EXPECT_EQ(nearest_name("x", {}), "");
}

}  // namespace
}  // namespace poise
