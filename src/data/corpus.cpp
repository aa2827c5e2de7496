// ByteCorpus: many files as one row of elements, samples cut from it on demand.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "data/file_walk.h"
#include "data/mapped_file.h"
#include "poise/data.h"

namespace poise::data {
namespace {

// Linux allows a process 65,530 maps; the rest of a very large folder is read without one.
constexpr std::size_t kMaxMaps = 16384;

std::int64_t bytes_of(Element element) {
  switch (element) {
    case Element::byte:
      return 1;
    case Element::uint16:
      return 2;
    case Element::uint32:
      return 4;
  }
  POISE_CHECK(false, "unknown element type");
  return 0;
}

}  // namespace

struct ByteCorpus::Files {
  Element element = Element::byte;
  std::vector<MappedFile> files;     // none of them empty
  std::vector<std::int64_t> starts;  // first element of each, and the total at the end

  explicit Files(const CorpusOptions& options);
  std::int64_t elements() const { return starts.back(); }
  // Raw bytes of `count` elements from `first` on, across files.
  void read(std::int64_t first, std::int64_t count, unsigned char* to) const;
};

ByteCorpus::Files::Files(const CorpusOptions& options) : element(options.element), starts{0} {
  const std::int64_t width = bytes_of(element);
  for (auto& path : walk(options.paths, options.suffix)) {
    const auto access =
        files.size() < kMaxMaps ? MappedFile::Access::mapped : MappedFile::Access::read;
    MappedFile file(std::move(path), access);
    if (file.bytes() == 0) continue;
    if (file.bytes() % width != 0) {
      fail("data", "file is cut short or holds other elements: ", file.path(), " has ",
           file.bytes(), " bytes, no multiple of ", width, "; check the element type");
    }
    starts.push_back(starts.back() + file.bytes() / width);
    files.push_back(std::move(file));
  }
  if (files.empty())
    fail("data", "the data is empty: ", options.paths.front(), "; give files with content");
}

void ByteCorpus::Files::read(std::int64_t first, std::int64_t count, unsigned char* to) const {
  const std::int64_t width = bytes_of(element);
  auto file = static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), first) -
                                       starts.begin() - 1);
  for (; count > 0; ++file) {
    const std::int64_t taken = std::min(count, starts[file + 1] - first);
    files[file].copy((first - starts[file]) * width, taken * width, to);
    to += taken * width;
    first += taken;
    count -= taken;
  }
}

ByteCorpus::ByteCorpus(const CorpusOptions& options) : sequence_length_(options.sequence_length) {
  if (sequence_length_ < 1) {
    fail("data", "sequence_length is ", sequence_length_, "; give 1 or more");
  }
  files_ = std::make_shared<const Files>(options);
  end_ = files_->elements();
  check_length("data");
}

ByteCorpus::~ByteCorpus() = default;
ByteCorpus::ByteCorpus(const ByteCorpus&) = default;
ByteCorpus& ByteCorpus::operator=(const ByteCorpus&) = default;

void ByteCorpus::check_length(const char* what) const {
  // elements - 1: the last target needs one more element.
  if (elements() - 1 >= sequence_length_) return;
  fail("data", "sequence longer than the ", what, ": sequence_length ", sequence_length_, " needs ",
       sequence_length_, " + 1 elements, the ", what, " has ", elements(),
       "; shorten the sequence or give more data");
}

std::int64_t ByteCorpus::elements() const { return end_ - begin_; }
std::int64_t ByteCorpus::size() const { return (elements() - 1) / sequence_length_; }
std::size_t ByteCorpus::files() const { return files_->files.size(); }

ByteCorpus::Split ByteCorpus::split(double fraction) const {
  if (!(fraction > 0 && fraction < 1)) {
    fail("data", "fraction for validation is ", fraction, "; give more than 0 and less than 1");
  }
  Split parts{*this, *this};
  const auto tail =
      static_cast<std::int64_t>(std::floor(static_cast<double>(elements()) * fraction));
  parts.train.end_ = parts.validation.begin_ = end_ - tail;
  parts.train.check_length("training part of the data");
  parts.validation.check_length("validation part of the data");
  return parts;
}

void ByteCorpus::read(std::int64_t i, std::int64_t* input, std::int64_t* target) const {
  if (i < 0 || i >= size()) {
    fail("data", "sample ", i, " of ", size(), "; give 0 to ", size() - 1);
  }
  const std::int64_t length = sequence_length_;
  const std::int64_t width = bytes_of(files_->element);
  std::vector<unsigned char> raw(static_cast<std::size_t>((length + 1) * width));
  files_->read(begin_ + i * length, length + 1, raw.data());
  for (std::int64_t t = 0; t <= length; ++t) {
    std::uint32_t value = 0;
    for (std::int64_t byte = width; byte-- > 0;) {
      value = value << 8 | raw[static_cast<std::size_t>(t * width + byte)];
    }
    if (t < length) input[t] = value;
    if (t > 0) target[t - 1] = value;
  }
}

ByteCorpus::Sample ByteCorpus::sample(std::int64_t i) const {
  Sample sample{at::empty({sequence_length_}, at::kLong), at::empty({sequence_length_}, at::kLong)};
  read(i, sample.input.mutable_data_ptr<std::int64_t>(),
       sample.target.mutable_data_ptr<std::int64_t>());
  return sample;
}

Batch ByteCorpus::batch(const std::vector<std::int64_t>& indices) const {
  const auto rows = static_cast<std::int64_t>(indices.size());
  Batch batch{at::empty({rows, sequence_length_}, at::kLong),
              at::empty({rows, sequence_length_}, at::kLong)};
  auto* input = batch.inputs.mutable_data_ptr<std::int64_t>();
  auto* target = batch.targets.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t i : indices) {
    read(i, input, target);
    input += sequence_length_;
    target += sequence_length_;
  }
  return batch;
}

}  // namespace poise::data
