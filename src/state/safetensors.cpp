// Reading and writing headers.
#include "state/safetensors.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "poise/error.h"
#include "state/json_scanner.h"

namespace poise::state {
namespace {

constexpr std::uint64_t kLongestHeader = 100'000'000;  // of the format
constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMostDimensions = 64;  // torch's own limit

constexpr std::pair<const char*, c10::ScalarType> kTypes[] = {
    {"F32", c10::ScalarType::Float},
    {"BF16", c10::ScalarType::BFloat16},
    {"F16", c10::ScalarType::Half},
    {"F64", c10::ScalarType::Double},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
    {"U16", c10::ScalarType::UInt16},
    {"U32", c10::ScalarType::UInt32},
    {"U64", c10::ScalarType::UInt64},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"C64", c10::ScalarType::ComplexFloat},
};

std::optional<c10::ScalarType> type_named(const std::string& name) {
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape,
                                      std::uint64_t element) {
  std::uint64_t bytes = element;
  bool empty = false;
  for (const auto size : shape) {
    const auto factor = static_cast<std::uint64_t>(size);
    empty = empty || factor == 0;
    if (!empty && bytes > std::numeric_limits<std::int64_t>::max() / factor) return std::nullopt;
    bytes *= factor;
  }
  return empty ? 0 : bytes;
}

// {"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, keys in any order.
TensorEntry tensor_of(JsonScanner& scanner, std::string name) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  std::optional<c10::ScalarType> type;
  std::optional<std::vector<std::uint64_t>> shape, offsets;
  scanner.expect('{');
  do {
    const auto key = scanner.string();
    scanner.expect(':');
    const bool again =
        (key == "dtype" && type) || (key == "shape" && shape) || (key == "data_offsets" && offsets);
    if (again) scanner.refuse(join("tensor '", tensor.name, "' has '", key, "' twice"));
    if (key == "dtype") {
      const auto said = scanner.string();
      type = type_named(said);
      if (!type) scanner.refuse(join("tensor '", tensor.name, "' is of an unknown type ", said));
    } else if (key == "shape") {
      shape = scanner.numbers();
    } else if (key == "data_offsets") {
      offsets = scanner.numbers();
    } else {
      scanner.refuse(join("tensor '", tensor.name, "' has an unknown key '", key, "'"));
    }
  } while (scanner.accept(','));
  scanner.expect('}');
  if (!type || !shape || !offsets || offsets->size() != 2) {
    scanner.refuse(join("tensor '", tensor.name, "' lacks its type, shape or place"));
  }
  if (shape->size() > kMostDimensions) {
    scanner.refuse(join("tensor '", tensor.name, "' has ", shape->size(), " dimensions"));
  }
  tensor.type = *type;
  for (const auto size : *shape) {
    if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      scanner.refuse(join("tensor '", tensor.name, "' is larger than any memory"));
    }
    tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  tensor.begin = offsets->at(0);
  tensor.end = offsets->at(1);
  return tensor;
}

// Tensors follow each other from the first byte of the data to its last.
void check_places(const std::vector<TensorEntry>& tensors, std::uint64_t data_bytes,
                  const JsonScanner& scanner) {
  std::uint64_t at = 0;
  for (const auto& tensor : tensors) {
    const auto bytes = bytes_of(tensor.shape, c10::elementSize(tensor.type));
    if (tensor.begin != at || tensor.end < tensor.begin) {
      scanner.refuse(join("tensor '", tensor.name, "' lies at ", tensor.begin, " to ", tensor.end,
                          ", the one before it ends at ", at));
    }
    if (!bytes || tensor.end - tensor.begin != *bytes) {
      scanner.refuse(join("tensor '", tensor.name, "' has ", tensor.end - tensor.begin,
                          " bytes, which is not what its type and shape need"));
    }
    at = tensor.end;
  }
  if (at != data_bytes) {
    scanner.refuse(join("its tensors have ", at, " bytes, and ", data_bytes, " follow the header"));
  }
}

}  // namespace

std::string dtype_name(c10::ScalarType type) {
  for (const auto& [name, known] : kTypes) {
    if (type == known) return name;
  }
  fail("state", "tensors of type ", c10::toString(type),
       " have no place in a safetensors file; cast it");
}

c10::ScalarType dtype_of(const std::string& name) {
  if (const auto type = type_named(name)) return *type;
  fail("state", "unknown type of a saved tensor: '", name, "'; was it saved by a newer poise?");
}

std::string write_header(std::vector<TensorEntry>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::ostringstream out;
  const char* separator = "";
  out << '{';
  if (!metadata.empty()) {
    out << "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      out << std::exchange(separator, ",") << json_text(key) << ':' << json_text(value);
    }
    out << '}';
  }
  std::uint64_t at = 0;
  for (auto& tensor : tensors) {
    const auto bytes = bytes_of(tensor.shape, c10::elementSize(tensor.type));
    POISE_CHECK(bytes, tensor.name);
    tensor.begin = at;
    tensor.end = at += *bytes;
    out << std::exchange(separator, ",") << json_text(tensor.name) << ":{\"dtype\":\""
        << dtype_name(tensor.type) << "\",\"shape\":[" << c10::Join(",", tensor.shape)
        << "],\"data_offsets\":[" << tensor.begin << ',' << tensor.end << "]}";
  }
  out << '}';
  auto text = out.str();
  while ((kLengthBytes + text.size()) % 64 != 0) text += ' ';  // the data begins aligned
  if (text.size() > kLongestHeader) {
    fail("state", "a header of ", text.size(), " bytes for ", tensors.size(),
         " tensors; safetensors allows ", kLongestHeader);
  }
  const std::uint64_t length = text.size();
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  return bytes.append(text);
}

Header parse_header(std::string_view text, std::uint64_t data_bytes, const std::string& file) {
  JsonScanner scanner(text, file);
  Header header;
  bool has_metadata = false;
  std::unordered_set<std::string> names;
  if (text.empty() || text.front() != '{') scanner.refuse("it does not begin with '{'");
  scanner.expect('{');
  if (!scanner.accept('}')) {
    do {
      auto name = scanner.string();
      scanner.expect(':');
      if (name != "__metadata__") {
        if (!names.insert(name).second) scanner.refuse(join("tensor '", name, "' comes twice"));
        header.tensors.push_back(tensor_of(scanner, std::move(name)));
        continue;
      }
      if (std::exchange(has_metadata, true)) scanner.refuse("__metadata__ comes twice");
      scanner.expect('{');
      if (scanner.accept('}')) continue;
      do {
        auto key = scanner.string();
        scanner.expect(':');
        auto value = scanner.string();
        if (!header.metadata.emplace(key, std::move(value)).second) {
          scanner.refuse(join("__metadata__ has '", key, "' twice"));
        }
      } while (scanner.accept(','));
      scanner.expect('}');
    } while (scanner.accept(','));
    scanner.expect('}');
  }
  scanner.end();
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_places(header.tensors, data_bytes, scanner);
  header.data_begin = kLengthBytes + text.size();
  return header;
}

Header read_header(const InputFile& file) {
  std::uint64_t length = 0;
  if (file.size() < kLengthBytes) {
    fail("state", file.path(), " has ", file.size(),
         " bytes, too few for a safetensors file; load another save");
  }
  file.read(&length, kLengthBytes, 0);
  if (length > file.size() - kLengthBytes || length > kLongestHeader) {
    fail("state", file.path(), " says that its header has ", length, " bytes; it has ", file.size(),
         " in all: it is damaged or cut off, load another save");
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read(text.data(), text.size(), kLengthBytes);
  return parse_header(text, file.size() - kLengthBytes - length, file.path());
}

}  // namespace poise::state
