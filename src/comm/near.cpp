// Reads of other processes.
#include "comm/near.h"

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <system_error>

namespace poise::comm {
namespace {

// 0 where the system does not say, or the user does not want it: then nothing is read.
std::uint64_t this_machine() {
  const char* wanted = std::getenv("POISE_NEAR_MEMORY");
  if (wanted != nullptr && std::string(wanted) == "off") return 0;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat pids {};
  if (boot.empty() || stat("/proc/self/ns/pid", &pids) != 0) return 0;
  return std::hash<std::string>()(boot + ' ' + std::to_string(pids.st_ino));
}

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

NearMemory::NearMemory() : number_(random_number()) {
  self_ = {this_machine(), getpid(), reinterpret_cast<std::uint64_t>(&number_), number_};
}

bool NearMemory::reads(const NearProcess& other) const noexcept {
  if (self_.machine == 0 || other.machine != self_.machine) return false;
  std::uint64_t number = 0;
  try {
    read(other.pid, other.address, &number, sizeof(number));
  } catch (const std::system_error&) {  // not allowed here: messages do it
    return false;
  }
  return number == other.number;
}

void NearMemory::read(std::int64_t pid, std::uint64_t address, void* target, std::int64_t bytes) {
  auto* to = static_cast<char*>(target);
  while (bytes > 0) {
    const iovec local{to, static_cast<std::size_t>(bytes)};
    const iovec remote{reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes)};
    const auto read = process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) {
      throw std::system_error(read < 0 ? errno : EFAULT, std::generic_category(),
                              "reading its memory");
    }
    to += read;
    address += static_cast<std::uint64_t>(read);
    bytes -= read;
  }
}

}  // namespace poise::comm
