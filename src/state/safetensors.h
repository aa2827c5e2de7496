// Headers of safetensors files: the tensors of a file, their types, shapes and bytes. The reader
// takes nothing on trust: what it hands on lies inside the file, in order, without gaps.
// (https://github.com/huggingface/safetensors, "Format".)
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "state/files.h"

namespace poise::state {

// "F32" and so on; throws Error on a type that the format does not have.
std::string dtype_name(c10::ScalarType type);
c10::ScalarType dtype_of(const std::string& name);

struct TensorEntry {
  std::string name;
  c10::ScalarType type = c10::ScalarType::Float;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;
};

struct Header {
  std::vector<TensorEntry> tensors;  // in order of their bytes
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  // in the file
};

// The first bytes of a file whose data follows: the tensors one after another, their begin and end
// set here. Throws Error on a name that is no UTF-8.
std::string write_header(std::vector<TensorEntry>& tensors,
                         const std::map<std::string, std::string>& metadata);

// `text`: of the header without its length; `data_bytes`: what follows it in the file. Throws Error
// naming `file` and the tensor. Allocates a small multiple of the text.
Header parse_header(std::string_view text, std::uint64_t data_bytes, const std::string& file);

Header read_header(const InputFile& file);

}  // namespace poise::state
