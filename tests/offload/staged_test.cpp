// A staged store passes tensors of the CPU on to the store that it is made of, one transfer after
// the other. Those of a GPU are in staged_gpu_test.cpp.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "offload/settings.h"

namespace poise::offload {
namespace {

// Keeps elements in plain memory, some time after it was asked; fails where it is told to.
class SlowStore final : public Store {
 public:
  SpanPtr reserve(std::int64_t numel, at::ScalarType dtype) override {
    return std::make_shared<SlowSpan>(*this, numel, dtype);
  }
  std::int64_t file_bytes() const override { return 77; }
  bool fails = false;
  std::vector<std::string> calls;  // in the order in which they came

 private:
  struct SlowSpan final : Span {
    SlowSpan(SlowStore& store, std::int64_t numel, at::ScalarType dtype)
        : Span(numel, dtype), store(store), kept(at::zeros({numel}, dtype)) {}
    Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
      return later(join("fetch ", begin),
                   [=, this] { to.copy_(kept.narrow(0, begin, to.numel())); });
    }
    Event do_put(std::int64_t begin, const at::Tensor& from) override {
      return later(join("put ", begin),
                   [=, this] { kept.narrow(0, begin, from.numel()).copy_(from); });
    }
    Event later(const std::string& call, std::function<void()> work) {
      EXPECT_FALSE(store.busy) << "one transfer after the other";
      store.busy = true;
      store.calls.push_back(call);
      return store.stream.submit([this, work] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        store.busy = false;
        if (store.fails) fail("offload", "the stand-in fails");
        work();
      });
    }
    SlowStore& store;
    const at::Tensor kept;
  };
  std::atomic<bool> busy = false;
  Stream stream{c10::Device(c10::kCPU)};
};

constexpr std::int64_t kNumel = 5000;

TEST(StagedStore, KeepsTheOrderOfItsCalls) {
  const auto away = std::make_shared<SlowStore>();
  const auto memory = host_memory();
  const auto store = staged_store(away, memory, c10::Device(c10::kCPU));
  EXPECT_EQ(store->file_bytes(), 77);
  const auto span = store->reserve(kNumel, at::kFloat);
  const auto other = store->reserve(10, at::kFloat);
  const auto first = random_floats(kNumel, 1), second = random_floats(100, 2);
  auto before = at::empty({kNumel}, at::kFloat), after = at::empty({kNumel}, at::kFloat);
  Stream::set_test_delay(3, 500);
  span->put(0, first);
  span->fetch(0, before);
  other->put(3, random_floats(5, 3));
  span->put(700, second);
  span->fetch(0, after).synchronize();
  Stream::set_test_delay(0, 0);
  EXPECT_EQ(away->calls,
            (std::vector<std::string>{"put 0", "fetch 0", "put 3", "put 700", "fetch 0"}));
  EXPECT_TRUE(at::equal(before, first));
  first.narrow(0, 700, 100).copy_(second);
  EXPECT_TRUE(at::equal(after, first));
  EXPECT_EQ(memory->peak_bytes(), 0) << "what is on the host needs no way there";
}

TEST(StagedStore, AFailureComesOutWhereItIsWaitedFor) {
  const auto away = std::make_shared<SlowStore>();
  const auto span =
      staged_store(away, host_memory(), c10::Device(c10::kCPU))->reserve(9, at::kFloat);
  auto to = at::empty({9}, at::kFloat);
  span->put(0, random_floats(9, 1)).synchronize();
  away->fails = true;
  EXPECT_NE(message_of([&] { span->fetch(0, to).synchronize(); }).find("the stand-in fails"),
            std::string::npos);
}

TEST(StagedStore, SpansMayOutliveIt) {
  TempFolder folder;
  auto store = staged_store(file_store(policy_in(folder.path()), host_memory()), host_memory(),
                            c10::Device(c10::kCPU));
  const auto span = store->reserve(kNumel, at::kFloat);
  store.reset();
  const auto values = random_floats(kNumel, 4);
  span->put(0, values);
  auto back = at::empty({kNumel}, at::kFloat);
  span->fetch(0, back).synchronize();
  EXPECT_TRUE(at::equal(back, values));
}

}  // namespace
}  // namespace poise::offload
