// A folder of its own for a test, removed when it goes.
#pragma once

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace poise::data {

class TempDir {
 public:
  TempDir() {
    std::string path = (std::filesystem::temp_directory_path() / "poise_data_XXXXXX").string();
    if (!::mkdtemp(path.data())) throw std::runtime_error("mkdtemp failed");
    path_ = path;
  }
  ~TempDir() { ::nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

  // Writes a file, making its folders; returns its path.
  std::string write(const std::string& name, const std::string& content) const {
    const auto file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file.string();
  }

 private:
  // std::filesystem::remove_all crashes beside libtorch, which exports one of another libstdc++.
  static int remove_one(const char* path, const struct stat*, int, struct FTW*) {
    return ::remove(path);
  }
  std::filesystem::path path_;
};

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

}  // namespace poise::data
