// Index arithmetic past 2^31 and 2^32: in the chunk map by its numbers, in the kernels over sparse
// mappings of which only a few pages are ever touched.
#include "kernels/chunks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <set>
#include <utility>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/cpu/loops.h"
#include "kernels/isa.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/sgd.h"

namespace poise::kernels {
namespace {

constexpr std::int64_t kBig = (std::int64_t{1} << 32) + 12345;

TEST(Chunks, CoverEverySpanOnceInOrder) {
  const std::vector<std::int64_t> lengths = {0, 1, kChunk, 0, 0, kChunk + 1, 3 * kChunk, 0};
  const ChunkMap map(8, [&](std::int64_t s) { return lengths[s]; });
  std::vector<std::int64_t> covered(8);
  for (std::int64_t begin = 0; begin < map.chunks(); begin += 2) {
    map.for_each(begin, std::min(begin + 2, map.chunks()), [&](std::int64_t, const Chunk& chunk) {
      EXPECT_EQ(chunk.offset, covered[chunk.span]);
      EXPECT_GT(chunk.count, 0);
      EXPECT_LE(chunk.count, kChunk);
      covered[chunk.span] += chunk.count;
    });
  }
  EXPECT_EQ(covered, lengths);
}

TEST(Chunks, IndicesPastThirtyTwoBits) {
  const ChunkMap map(3, [](std::int64_t s) { return s == 1 ? kBig : 10; });
  EXPECT_EQ(map.chunks(), 2 + (kBig + kChunk - 1) / kChunk);
  map.for_each(map.chunks() - 2, map.chunks(), [&](std::int64_t number, const Chunk& chunk) {
    if (number == map.chunks() - 1) {
      EXPECT_EQ(chunk.span, 2);
    } else {
      EXPECT_EQ(chunk.span, 1);
      EXPECT_EQ(chunk.offset + chunk.count, kBig);
    }
  });
}

TEST(Chunks, ManyTinySpansAreFewTasks) {
  const ChunkMap map(2000, [](std::int64_t) { return 128; });
  EXPECT_EQ(map.chunks(), 2000);
  EXPECT_GE(map.grain(), 200);  // no thread for less than some ten thousand elements
  EXPECT_EQ(ChunkMap(0, [](std::int64_t) { return 0; }).chunks(), 0);
}

// `bytes` of address space; pages appear when touched.
class Sparse {
 public:
  explicit Sparse(std::int64_t bytes) : bytes_(bytes) {
    base_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (ok()) munmap(base_, bytes_);
  }
  bool ok() const { return base_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(base_);
  }

 private:
  void* base_;
  std::int64_t bytes_;
};

TEST(BigIndices, KernelsReachElementsPastThirtyTwoBits) {
  constexpr std::int64_t kEnd = kBig + 100;
  const Sparse master(kEnd * 4), moment1(kEnd * 4), moment2(kEnd * 4), gradient(kEnd * 4);
  const Sparse low(kEnd * 2);
  for (const Sparse* sparse : {&master, &moment1, &moment2, &gradient, &low}) {
    if (!sparse->ok()) GTEST_SKIP() << "this machine does not map 80 GiB of address space";
  }
  std::vector<std::pair<Backend, Isa>> targets{{Backend::reference, Isa::baseline}};
  for (const Isa isa : available_isas()) targets.emplace_back(Backend::cpu, isa);
  for (const auto& [backend, isa] : targets) {
    const IsaOverride forced(isa);
    Launch launch;
    launch.backend = backend;
    gradient.as<float>()[kBig] = 3;
    const Piece piece{kBig - 5, kEnd};
    double norm = 0;
    squared_norms(launch, DType::f32, gradient.as<float>(), &piece, 1, &norm);
    EXPECT_EQ(norm, 9);

    AdamArrays arrays;
    arrays.master = master.as<float>();
    arrays.moment1 = moment1.as<float>();
    arrays.moment2 = moment2.as<float>();
    arrays.gradient = gradient.as<float>();
    arrays.low = low.as<void>();
    const AdamSegment segment{kBig - 5, kEnd, 0.5, 0};
    master.as<float>()[kBig] = 0;
    moment1.as<float>()[kBig] = moment2.as<float>()[kBig] = 0;
    adamw(launch, arrays, &segment, 1, {});
    EXPECT_NEAR(master.as<float>()[kBig], -0.5, 1e-5);
    EXPECT_EQ(low.as<std::uint16_t>()[kBig], 0xBF00);

    const SgdSegment slow{kBig - 5, kEnd, 0.25, 0};
    SgdArrays momentum;
    momentum.master = master.as<float>();
    momentum.momentum = moment1.as<float>();
    momentum.gradient = gradient.as<float>();
    momentum.low = low.as<void>();
    master.as<float>()[kBig] = moment1.as<float>()[kBig] = 0;
    sgd(launch, momentum, &slow, 1, {0.9, false, 1.0});
    EXPECT_EQ(master.as<float>()[kBig], -0.75f);
    EXPECT_EQ(low.as<std::uint16_t>()[kBig], 0xBF40);

    const PackPiece copy{gradient.as<float>() + kBig, low.as<std::uint16_t>() + kBig, 50};
    pack(launch, DType::f32, DType::bf16, &copy, 1, 1.0f);
    EXPECT_EQ(low.as<std::uint16_t>()[kBig], 0x4040);
  }
}

// accumulate() has no way to begin late, so its loop over a late chunk is called as it would be.
TEST(BigIndices, AccumulateReachesElementsPastThirtyTwoBits) {
  const Sparse accumulator((kBig + 100) * 4), gradient((kBig + 100) * 4);
  if (!accumulator.ok() || !gradient.ok()) GTEST_SKIP() << "no 32 GiB of address space";
  gradient.as<float>()[kBig] = 3;
  for (const Isa isa : available_isas()) {
    const IsaOverride forced(isa);
    for (const bool with_norm : {false, true}) {
      accumulator.as<float>()[kBig] = 1;
      const double squares =
          cpu::loops().accumulate(Accumulate::add, accumulator.as<float>(), DType::f32,
                                  gradient.as<float>(), kBig - 50, 100, 0.5f, with_norm);
      EXPECT_EQ(accumulator.as<float>()[kBig], 2.5f) << name_of(isa);
      EXPECT_EQ(squares, with_norm ? 6.25 : 0) << name_of(isa);
    }
  }
}

}  // namespace
}  // namespace poise::kernels
