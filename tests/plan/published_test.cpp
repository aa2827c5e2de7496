// Other people's runs: parts of their peaks that can be written down by hand, and tables.
#include "plan/published.h"

#include <gmock/gmock.h>

#include <cstdio>
#include <fstream>

#include "poise/error.h"

namespace poise::plan::published {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kGib = 1024.0 * 1024 * 1024;

// A GPT of Korthikanti et al. (arXiv:2205.05198), whose formulas are the reference.
Run gpt(int tp, int pp) {
  Run r;
  r.model = {.name = "gpt",
             .layers = 48,
             .width = 6144,
             .heads = 64,
             .ffn = 4 * 6144,
             .vocabulary = 51200,
             .mlp = Mlp::gelu,
             .tied = true,
             .biases = true};
  r.device = known_device("A100-80GB");
  r.sequence = 2048;
  r.tp = tp;
  r.pp = pp;
  r.world = tp * pp;
  r.sharding = Sharding::megatron;
  r.dropout = true;
  return r;
}

TEST(Published, BlocksKeepWhatTheFormulaSays) {
  // Two runs that differ in their micro-batch alone, far from the head (chunked away): what the
  // blocks keep for a sequence, plus one block's work.
  const double sbh = 2048.0 * 6144;
  for (const int tp : {1, 8}) {
    auto shallow = gpt(tp, 1);
    shallow.head = Head::none;
    auto deep = shallow;
    deep.model.layers = 49;
    const double block = (12.0 * 6144 * 6144 + 13.0 * 6144) / tp;  // parameters
    const double each = peak_bytes(deep) - peak_bytes(shallow) - 16 * block;
    const double scores = 5.0 * 64 * 2048 / 6144;
    EXPECT_NEAR(each, sbh * (10 + (24 + scores) / tp), 1e-3 * each) << tp;
    deep.kept = shallow.kept = Kept::input;
    EXPECT_NEAR(peak_bytes(deep) - peak_bytes(shallow) - 16 * block, 2 * sbh, 2e-3 * sbh);
    deep.kept = shallow.kept = Kept::no_scores;
    EXPECT_NEAR(peak_bytes(deep) - peak_bytes(shallow) - 16 * block, sbh * (10 + 24.0 / tp),
                2e-3 * sbh);
    deep.sequence_parallel = shallow.sequence_parallel = true;
    EXPECT_NEAR(peak_bytes(deep) - peak_bytes(shallow) - 16 * block, sbh * 34 / tp, 2e-3 * sbh);
  }
}

TEST(Published, StatesAreSplitAsTheStagesSay) {
  auto r = gpt(1, 1);
  r.model.tied = false;
  r.micro_batch = 1e-9;  // no activations
  r.sharding = Sharding::fsdp;
  const auto all = static_cast<double>(parameters(r.model));
  EXPECT_NEAR(peak_bytes(r), 16 * all, 1e-3 * all);
  r.dp = r.world = 8;
  r.shards = 8;
  r.stage = 1;
  EXPECT_NEAR(peak_bytes(r), (4 + 12.0 / 8) * all, 1e-3 * all);
  r.stage = 2;
  EXPECT_NEAR(peak_bytes(r), (2 + 14.0 / 8) * all, 1e-3 * all);
  r.stage = 3;
  EXPECT_GT(peak_bytes(r), 16.0 / 8 * all);
  EXPECT_LT(peak_bytes(r), (16.0 / 8 + 1) * all);  // two blocks and both tables are whole
}

TEST(Published, TheFirstStageHoldsAPipelineOfMicroBatches) {
  auto r = gpt(8, 1);
  r.head = Head::none;
  r.model.layers = 8;
  r.accumulation = 64;
  auto piped = r;
  piped.pp = piped.world = 8;
  piped.world = 64;
  const double kept = 2048.0 * 6144 * (10 + (24 + 5.0 * 64 * 2048 / 6144) / 8);
  // As many blocks in flight; an eighth of their states.
  const double block = 16 * (12.0 * 6144 * 6144 + 13.0 * 6144) / 8;
  EXPECT_NEAR(peak_bytes(r) - peak_bytes(piped), 7 * block, 0.01 * 7 * block);
  piped.accumulation = 2;  // no more than there are
  EXPECT_NEAR(peak_bytes(r) - peak_bytes(piped), 7 * block + 6 * kept, 0.02 * 7 * block);
}

TEST(Published, TimeCountsTheBubbleAndRecomputation) {
  auto r = gpt(8, 8);
  r.accumulation = 1e6;
  const double busy = tokens_per_second(r);
  r.accumulation = 8;
  // (p - 1) / m idle over ideal (Narayanan et al. 2021); the head and the update are no part of it.
  EXPECT_NEAR(busy / tokens_per_second(r), 1 + 7.0 / 8, 0.1);
  r.kept = Kept::input;
  const double again = tokens_per_second(r);
  r.kept = Kept::all;
  EXPECT_NEAR(tokens_per_second(r) / again, 4.0 / 3, 0.06);
}

TEST(Published, FlatParametersOfFrozenOnesHaveGradients) {
  auto r = gpt(1, 1);
  r.model.tied = false;
  r.micro_batch = 1e-9;
  r.sharding = Sharding::fsdp;
  r.stage = 3;
  r.dp = r.world = 4;
  r.shards = 4;
  r.trained = 1e-6;
  r.accumulation = 8;
  const auto all = static_cast<double>(parameters(r.model));
  const double apart = peak_bytes(r);
  r.frozen_gradients = true;
  EXPECT_NEAR(peak_bytes(r) - apart, 2.0 / 4 * all, 1e-3 * all);
  r.joins_once = true;  // whole ones
  EXPECT_NEAR(peak_bytes(r) - apart, 2.0 * all, 1e-3 * all);
}

TEST(Published, AnUpdateOfAllAtOnceTakesARootOfTheMoments) {
  auto r = gpt(1, 1);
  r.micro_batch = 1e-9;
  const auto all = static_cast<double>(parameters(r.model));
  const double one_by_one = peak_bytes(r);
  r.updates_all_at_once = true;
  EXPECT_NEAR(peak_bytes(r) - one_by_one, 4 * all, 1e-3 * all);
}

TEST(Published, HeadsTakeWhatTheirLossTakes) {
  // Far from the states: a vocabulary that dwarfs the blocks.
  auto r = gpt(1, 1);
  r.model.layers = 1;
  r.model.vocabulary = 1'000'000;
  r.fused_attention = true;
  const double logits = 2048.0 * 1'000'000;
  r.head = Head::none;
  const double without = peak_bytes(r);
  const auto taken = [&](Head head) {
    r.head = head;
    return (peak_bytes(r) - without) / logits;
  };
  EXPECT_NEAR(taken(Head::whole), 14, 0.5);
  EXPECT_NEAR(taken(Head::plain), 8, 0.5);
  EXPECT_NEAR(taken(Head::fused), 4, 0.5);
  r.caps_logits = true;
  EXPECT_NEAR(taken(Head::plain), 10, 0.5);
  r.caps_logits = false;
  r.activation = 4;  // as a loss that is measured alone: 20 bytes less the fp32 copy that is given
  EXPECT_NEAR(taken(Head::plain), 16, 0.5);
}

TEST(Published, MetersAddWhatTheySay) {
  auto r = gpt(8, 1);
  const double allocated = peak_bytes(r);
  r.meter = Meter::reserved;
  EXPECT_NEAR(peak_bytes(r), 1.1 * allocated, 1);
  r.meter = Meter::device;
  EXPECT_NEAR(peak_bytes(r), 1.1 * allocated + 3.5 * kGib, 1);  // context, two communicators
}

class Table {
 public:
  explicit Table(const std::string& text) : path_(::testing::TempDir() + "published_runs.csv") {
    std::ofstream(path_) << text;
  }
  ~Table() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Published, TablesAreReadByColumn) {
  const Table table(
      "case_id,gpu,notes,hidden,layers,heads,ffn,ffn_kind,vocab,seq_len,micro_batch,tuned\n"
      "\"a, quoted \"\"one\"\"\",H100-80,\"chunked cross entropy; and "
      "more\",4096,32,32,11008,swiglu,"
      "32000,4096,2,full\n"
      "no shape,H100-80,,4096,,32,11008,swiglu,32000,4096,2,full\n"
      "\"small letters\",rtxpro6000-96,\"x\",4096,32,32,11008,swiglu,32000,4096,2,full\n"
      "no such device,Z9,,4096,32,32,11008,swiglu,32000,4096,2,full\n");
  const auto rows = read_table(table.path());
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].id, "a, quoted \"one\"");
  EXPECT_TRUE(rows[0].predictable);
  EXPECT_EQ(rows[0].run.head, Head::chunked);
  EXPECT_EQ(rows[0].run.device.name, "H100-80GB");
  EXPECT_EQ(parameters(rows[0].run.model), parameters(known_transformer("llama-2-7b")));
  EXPECT_FALSE(rows[1].predictable);
  EXPECT_TRUE(rows[2].predictable);
  EXPECT_FALSE(rows[3].predictable);
}

TEST(Published, TablesThatAreNoneAreNamed) {
  EXPECT_THAT([] { read_table("/nowhere.csv"); }, ThrowsMessage<Error>(HasSubstr("cannot read")));
  const Table table("layers,heads\n1,2\n");
  EXPECT_THAT([&] { read_table(table.path()); },
              ThrowsMessage<Error>(HasSubstr("no column case_id")));
}

}  // namespace
}  // namespace poise::plan::published
