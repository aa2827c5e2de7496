// ByteCorpus against the same bytes sliced by hand, the walk over folders, and bad files.
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "data/file_walk.h"
#include "data/mapped_file.h"
#include "poise/data.h"
#include "poise/log.h"
#include "support/temp_folder.h"

namespace poise::data {
namespace {

using testing::message_of;
using testing::TempFolder;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::vector<std::int64_t> values_of(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<std::int64_t>();
  return {data, data + tensor.numel()};
}

std::string text_of(const at::Tensor& tensor) {
  std::string text;
  for (const std::int64_t value : values_of(tensor)) text.push_back(static_cast<char>(value));
  return text;
}

TEST(ByteCorpus, SamplesAreSlicesOfTheJoinedFiles) {
  const TempFolder dir;
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  // Sizes that put file ends inside, at the start and at the end of samples; one file is empty.
  const std::size_t cuts[] = {0, 1, 8, 8, 9, 30, 200, 256};
  std::vector<std::string> paths;
  for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
    paths.push_back(
        dir.write("part" + std::to_string(i), all.substr(cuts[i], cuts[i + 1] - cuts[i])));
  }
  for (const std::int64_t length : {1, 2, 7, 100, 255}) {
    const ByteCorpus corpus({.paths = paths, .sequence_length = length});
    EXPECT_EQ(corpus.elements(), 256);
    EXPECT_EQ(corpus.files(), 6u);
    ASSERT_EQ(corpus.size(), 255 / length);
    for (std::int64_t i = 0; i < corpus.size(); ++i) {
      const auto sample = corpus.sample(i);
      EXPECT_EQ(sample.input.scalar_type(), at::kLong);
      EXPECT_EQ(text_of(sample.input), all.substr(i * length, length));
      EXPECT_EQ(text_of(sample.target), all.substr(i * length + 1, length));
      EXPECT_GE(values_of(sample.input).back(), 0) << "bytes are unsigned";
    }
  }
}

TEST(ByteCorpus, BatchStacksSamples) {
  const TempFolder dir;
  const ByteCorpus corpus({.paths = {dir.write("a", "abcdefghijklmnop")}, .sequence_length = 5});
  const Batch batch = corpus.batch({2, 0, 2});
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(text_of(batch.inputs), "klmnoabcdeklmno");
  EXPECT_EQ(text_of(batch.targets), "lmnopbcdeflmnop");
  EXPECT_EQ(corpus.batch({}).inputs.sizes(), (std::vector<std::int64_t>{0, 5}));
  EXPECT_THAT(message_of([&] { corpus.batch({0, 3}); }), HasSubstr("sample 3 of 3"));
  EXPECT_THAT(message_of([&] { corpus.sample(-1); }), HasSubstr("sample -1"));
}

TEST(ByteCorpus, ReadsTokensOfTwoAndFourBytes) {
  const TempFolder dir;
  const std::string raw("\x01\x00\xff\xff\x00\x80\x02\x01", 8);
  const auto file = dir.write("tokens.bin", raw);
  const ByteCorpus two({.paths = {file}, .sequence_length = 3, .element = Element::uint16});
  EXPECT_THAT(values_of(two.sample(0).input), ElementsAre(1, 65535, 32768));
  EXPECT_THAT(values_of(two.sample(0).target), ElementsAre(65535, 32768, 258));
  const ByteCorpus four({.paths = {file}, .sequence_length = 1, .element = Element::uint32});
  EXPECT_THAT(values_of(four.sample(0).input), ElementsAre(0xffff0001));
  EXPECT_THAT(values_of(four.sample(0).target), ElementsAre(0x01028000));
  const auto odd = dir.write("odd.bin", raw.substr(1));
  const auto message = message_of(
      [&] { ByteCorpus({.paths = {odd}, .sequence_length = 1, .element = Element::uint16}); });
  EXPECT_THAT(message, HasSubstr(odd));
  EXPECT_THAT(message, HasSubstr("7 bytes, no multiple of 2"));
}

TEST(ByteCorpus, SplitsTheTailOffWithoutOverlap) {
  const TempFolder dir;
  const auto file = dir.write("a", std::string(60, 'a') + std::string(40, 'b'));
  const ByteCorpus corpus({.paths = {file}, .sequence_length = 10});
  const auto parts = corpus.split(0.4);
  EXPECT_EQ(parts.train.elements() + parts.validation.elements(), 100);
  EXPECT_EQ(parts.train.size(), 5);
  EXPECT_EQ(parts.validation.size(), 3);
  EXPECT_EQ(text_of(parts.train.sample(4).target), std::string(10, 'a'));
  EXPECT_EQ(text_of(parts.validation.sample(0).input), std::string(10, 'b'));
  EXPECT_THAT(
      message_of([&] { corpus.split(0.05); }),
      HasSubstr("sequence_length 10 needs 10 + 1 elements, the validation part of the data has 5"));
  EXPECT_THAT(message_of([&] { corpus.split(0.95); }),
              HasSubstr("training part of the data has 5"));
  for (const double fraction : {0.0, 1.0, -0.5, std::nan("")}) {
    EXPECT_THAT(message_of([&] { corpus.split(fraction); }), HasSubstr("fraction"));
  }
}

TEST(ByteCorpus, BadDataIsNamedWithItsNumbers) {
  const TempFolder dir;
  const auto empty = dir.write("empty", "");
  const auto tiny = dir.write("tiny", "12345");
  const auto open = [](const std::string& path, std::int64_t length) {
    return message_of(
        [&] { ByteCorpus({.paths = {path}, .suffix = ".x", .sequence_length = length}); });
  };
  EXPECT_THAT(open(empty, 4), HasSubstr("data is empty: " + empty));
  EXPECT_THAT(open(tiny, 5), HasSubstr("sequence_length 5 needs 5 + 1 elements, the data has 5"));
  EXPECT_EQ(open(tiny, 4), "");
  EXPECT_THAT(open(tiny, 0), HasSubstr("sequence_length is 0"));
  EXPECT_THAT(open(dir / "missing", 4), HasSubstr("no such file or folder: " + dir / "missing"));
  EXPECT_THAT(open(dir.path(), 4), HasSubstr("no file ending in '.x' in folder: " + dir.path()));
  EXPECT_THAT(open("/dev/null", 4), HasSubstr("neither a file nor a folder: /dev/null"));
  EXPECT_THAT(message_of([] { ByteCorpus({.sequence_length = 4}); }), HasSubstr("no path given"));
}

TEST(Walk, IsSortedBySuffixAndStaysInTheFolder) {
  const TempFolder dir;
  const TempFolder outside;
  outside.write("secret.py", "x");
  dir.write("b.py", "x");
  dir.write("a/z.py", "x");
  dir.write("a/B.py", "x");
  dir.write("a/notes.txt", "x");
  fs::create_symlink(outside / "secret.py", dir / "leak.py");
  fs::create_directory_symlink(outside.path(), dir / "leak");
  fs::create_directory_symlink(dir.path(), dir / "loop");
  fs::create_symlink(dir / "nothing", dir / "broken.py");
  fs::create_symlink(dir / "b.py", dir / "again.py");
  fs::create_symlink(dir / "a/notes.txt", dir / "notes.py");

  std::vector<std::string> lines;
  const auto old =
      log::set_sink([&](log::Level, const std::string& line) { lines.push_back(line); });
  const auto files = walk({dir.path()}, ".py");
  log::set_sink(old);

  const std::string root = fs::canonical(dir.path()).string();
  EXPECT_THAT(files, ElementsAre(root + "/a/B.py", root + "/a/z.py", root + "/b.py",
                                 root + "/a/notes.txt"));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("4 links not followed"));
  // Named outright, a link is what the user wants.
  EXPECT_EQ(walk({dir / "leak.py"}, ".py").size(), 1u);
}

TEST(MappedFile, ReadsTheSameWithAndWithoutAMapAndNoticesAShorterFile) {
  const TempFolder dir;
  const auto path = dir.write("f", "0123456789");
  for (const auto access : {MappedFile::Access::mapped, MappedFile::Access::read}) {
    const MappedFile file(path, access);
    std::string got(4, ' ');
    file.copy(3, 4, reinterpret_cast<unsigned char*>(got.data()));
    EXPECT_EQ(got, "3456");
  }
  const MappedFile read(path, MappedFile::Access::read), map(path, MappedFile::Access::mapped);
  const auto copied = [](const MappedFile& file, std::int64_t offset, std::int64_t count) {
    std::string got(static_cast<std::size_t>(count), ' ');
    return std::pair(
        message_of([&] { file.copy(offset, count, reinterpret_cast<unsigned char*>(got.data())); }),
        got);
  };
  fs::resize_file(path, 5);
  for (const auto* file : {&read, &map}) {
    EXPECT_THAT(copied(*file, 2, 8).first,
                HasSubstr("became shorter while it was read: " + path + " ended at byte 5 of 10"));
    EXPECT_EQ(copied(*file, 1, 4).second, "1234");
  }
}

// An editor's way to save, and a folder that is cleaned up: what is mapped stays what it was.
TEST(MappedFile, AFileThatWasReplacedOrRemovedIsStillThere) {
  const TempFolder dir;
  const MappedFile file(dir.write("f", "0123456789"), MappedFile::Access::mapped);
  std::string got(10, ' ');
  const auto copy = [&] { file.copy(0, 10, reinterpret_cast<unsigned char*>(got.data())); };
  fs::rename(dir.write("new", "a"), dir / "f");
  EXPECT_NO_THROW(copy());
  fs::remove(dir / "f");
  EXPECT_NO_THROW(copy());
  EXPECT_EQ(got, "0123456789");
}

// Without a map it would be another file that is read, from the same places.
TEST(MappedFile, AReplacedFileThatIsReadWithoutAMapIsAnError) {
  const TempFolder dir;
  const auto path = dir.write("f", "0123456789");
  const MappedFile file(path, MappedFile::Access::read);
  fs::rename(dir.write("new", "abcdefghij"), path);
  std::string got(10, ' ');
  EXPECT_THAT(message_of([&] { file.copy(0, 10, reinterpret_cast<unsigned char*>(got.data())); }),
              HasSubstr("file was replaced while it was read: " + path));
}

// A file that is cut while a run reads it: pages behind its end may not be touched.
TEST(ByteCorpus, AFileCutShortIsAnErrorAndNotTheEndOfTheProcess) {
  const TempFolder dir;
  const auto path = dir.write("f", std::string(1 << 20, 'x'));
  const ByteCorpus corpus({.paths = {path}, .sequence_length = 100});
  fs::resize_file(path, 1000);
  EXPECT_EQ(text_of(corpus.sample(3).input), std::string(100, 'x'));
  EXPECT_THAT(message_of([&] { corpus.sample(9000); }), HasSubstr("became shorter"));
}

// Anonymous memory of this process in KiB; pages of mapped files belong to the page cache.
std::int64_t own_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8));
  }
  return -1;
}

// 64 MiB of (sparse) file are opened and read within a few MiB.
TEST(ByteCorpus, DoesNotCopyTheFile) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer keeps what was freed for a while";
#endif
  const TempFolder dir;
  const auto path = dir.write("big", "");
  fs::resize_file(path, 64 << 20);
  const auto before = own_kib();
  ASSERT_GT(before, 0);
  const ByteCorpus corpus({.paths = {path}, .sequence_length = 128});
  for (std::int64_t i = 0; i < corpus.size(); i += 16) corpus.sample(i);
  EXPECT_LT(own_kib() - before, 8 << 10);
  EXPECT_EQ(corpus.elements(), 64 << 20);
}

TEST(CastInputs, CastsFloatsAndLeavesTheRest) {
  const at::Tensor floats = at::tensor({1.5, 2.5}, at::kDouble);
  EXPECT_EQ(cast_inputs(floats, at::kBFloat16).scalar_type(), at::kBFloat16);
  for (const auto dtype : {at::kLong, at::kBool, at::kComplexFloat}) {
    const at::Tensor other = floats.to(dtype);
    EXPECT_TRUE(cast_inputs(other, at::kHalf).is_same(other)) << c10::toString(dtype);
  }
  const Batch cast = cast_inputs(Batch{floats, floats}, at::kHalf);
  EXPECT_EQ(cast.inputs.scalar_type(), at::kHalf);
  EXPECT_EQ(cast.targets.scalar_type(), at::kDouble) << "targets keep their digits";
  EXPECT_THAT(message_of([&] { cast_inputs(floats, at::kLong); }), HasSubstr("Long"));
  EXPECT_FALSE(cast_inputs(at::Tensor(), at::kHalf).defined());
}

TEST(Pinned, KeepsTheValues) {
  const at::Tensor ids = at::tensor({1, 2}, at::kLong);
  EXPECT_TRUE(at::equal(pinned(ids), ids));
}

}  // namespace
}  // namespace poise::data
