// Pages, waits and reads between processes.
#include "comm/near.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "comm/messages.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

// How long a wait sleeps before it looks whether the peer still lives, or stop() came.
constexpr std::chrono::milliseconds kLook{20};

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

// Bytes read; -1 and errno.
ssize_t read_once(std::int64_t pid, std::uint64_t address, void* target, std::int64_t bytes) {
  const iovec local{target, static_cast<std::size_t>(bytes)};
  const iovec remote{reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes)};
  return process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
}

void futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

bool has_ended(int process) {
  pollfd look{process, POLLIN, 0};
  return poll(&look, 1, 0) > 0;
}

}  // namespace

// Of one rank, written by it alone. Two records: a rank shows the next one while a slower peer
// still reads the last; the one after that it shows only when all have come to the next.
struct NearRanks::Page {
  std::atomic<std::uint32_t> round;  // of the record shown last; what the others sleep on
  std::atomic<std::uint32_t> left;   // 1: this rank comes no more
  std::uint64_t number;              // of its process: the page is the right one
  std::array<Record, 2> records;
};

NearRanks::NearRanks(int rank, std::chrono::milliseconds timeout)
    : rank_(rank), timeout_(timeout), number_(random_number()) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  const auto machine = this_machine();
  if (machine == 0) return;
  const int descriptor = memfd_create("poise", MFD_CLOEXEC);
  if (descriptor < 0) return;
  if (ftruncate(descriptor, sizeof(Page)) == 0) {
    void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory != MAP_FAILED) page_ = static_cast<Page*>(memory);  // zeros
  }
  if (page_ == nullptr) {
    close(descriptor);
    return;
  }
  page_->number = number_;
  self_ = {machine, getpid(), descriptor, reinterpret_cast<std::uint64_t>(&number_), number_};
}

NearRanks::~NearRanks() {
  stop();
  if (page_ != nullptr) {
    munmap(page_, sizeof(Page));
    close(static_cast<int>(self_.descriptor));
  }
  for (const Peer& peer : peers_) {
    if (peer.process >= 0) close(peer.process);
    if (peer.page != nullptr) munmap(const_cast<Page*>(peer.page), sizeof(Page));
  }
}

bool NearRanks::find(const std::vector<NearProcess>& ranks) noexcept {
  if (page_ == nullptr) return false;
  peers_.resize(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    if (!find_one(ranks[rank], peers_[rank])) return false;
  }
  return true;
}

bool NearRanks::find_one(const NearProcess& other, Peer& peer) const noexcept {
  if (other.machine != self_.machine) return false;
  peer.pid = other.pid;
  std::uint64_t number = 0;
  if (read_once(other.pid, other.address, &number, sizeof(number)) != sizeof(number) ||
      number != other.number) {
    return false;  // not allowed
  }
  peer.process = static_cast<int>(syscall(SYS_pidfd_open, other.pid, 0));
  if (peer.process < 0) return false;
  const auto path = join("/proc/", other.pid, "/fd/", other.descriptor);
  // May be another file: /proc of another process namespace, or what the user closed and opened.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return false;
  struct stat file {};
  const bool long_enough = fstat(descriptor, &file) == 0 && file.st_size >= off_t{sizeof(Page)};
  void* memory =
      long_enough ? mmap(nullptr, sizeof(Page), PROT_READ, MAP_SHARED, descriptor, 0) : MAP_FAILED;
  close(descriptor);
  if (memory == MAP_FAILED) return false;
  peer.page = static_cast<const Page*>(memory);
  return peer.page->number == other.number;
}

void NearRanks::stop() noexcept {
  stopped_ = true;
  if (page_ == nullptr) return;
  page_->left.store(1);
  futex(page_->round, FUTEX_WAKE, INT_MAX, nullptr);
}

void NearRanks::meet(std::vector<Record>& records) {
  ++round_;
  const auto slot = round_ % 2;
  page_->records[slot] = records[static_cast<std::size_t>(rank_)];
  page_->round.store(round_, std::memory_order_release);
  futex(page_->round, FUTEX_WAKE, INT_MAX, nullptr);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].page == nullptr) continue;
    wait_for(static_cast<int>(rank), deadline);
    records[rank] = peers_[rank].page->records[slot];
  }
}

void NearRanks::wait_for(int rank, std::chrono::steady_clock::time_point deadline) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const timespec look{0, std::chrono::nanoseconds(kLook).count()};
  bool left = false, ended = false;
  for (;;) {
    // Looked at after `left` and `ended`: it may have come before.
    const auto round = peer.page->round.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(round - round_) >= 0) return;
    if (stopped_) throw Stopped();
    if (left) throw PeerFailure(rank, false, "it left the group");
    if (ended) throw PeerFailure(rank, false, "its process ended");
    if (std::chrono::steady_clock::now() >= deadline) {
      throw PeerFailure(rank, true, "it did not come");
    }
    futex(peer.page->round, FUTEX_WAIT, round, &look);
    left = peer.page->left.load() != 0;
    ended = has_ended(peer.process);
  }
}

void NearRanks::read(int rank, std::uint64_t address, void* target, std::int64_t bytes) const {
  auto* to = static_cast<char*>(target);
  while (bytes > 0) {
    if (stopped_) throw Stopped();  // 2 GiB at most are read at once
    const auto read = read_once(peers_[static_cast<std::size_t>(rank)].pid, address, to, bytes);
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) {
      throw PeerFailure(rank, false,
                        join("cannot read its memory: ", std::strerror(read < 0 ? errno : EFAULT)));
    }
    to += read;
    address += static_cast<std::uint64_t>(read);
    bytes -= read;
  }
}

}  // namespace poise::comm
