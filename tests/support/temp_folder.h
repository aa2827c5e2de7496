// A folder of its own for a test, removed when it goes; bytes of files, messages of errors.
#pragma once

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace poise::testing {

class TempFolder {
 public:
  TempFolder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/poise_test_XXXXXX";
    if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp failed");
  }
  ~TempFolder() { ::nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

  // A file, and the folders on its way.
  std::string write(const std::string& name, const std::string& content) const {
    for (auto end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1)) {
      ::mkdir((*this / name.substr(0, end)).c_str(), 0777);
    }
    const auto file = *this / name;
    std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
    return file;
  }

 private:
  static int remove_one(const char* path, const struct stat*, int, struct FTW*) {
    return ::remove(path);
  }
  std::string path_;
};

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The message of the exception that `body` throws, empty if it throws none.
template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// How often a test repeats: `usual`, or what the environment variable says.
inline std::int64_t rounds(const char* variable, std::int64_t usual) {
  const char* said = std::getenv(variable);
  return said ? std::atoll(said) : usual;
}

}  // namespace poise::testing
