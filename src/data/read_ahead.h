// Windows read on another thread, handed out in the order they were asked for.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "poise/data.h"

namespace poise::data {

// The thread starts with the first request and ends with this object. In a forked child, where that
// thread does not exist, nothing is requested until the child asks anew. One thread calls it.
class ReadAhead {
 public:
  using Window = std::vector<Batch>;
  using Read = std::function<Window(std::int64_t cursor)>;

  explicit ReadAhead(Read read);
  ~ReadAhead();  // waits for the window that is being read, no further one
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  void request(std::int64_t cursor);
  // Windows requested and not taken; 0 in a freshly forked child.
  std::size_t requested();
  // The oldest requested window, waiting for it; throws what reading it threw, or what an interrupt
  // of the wait throws. Either way the window is no longer requested.
  Window take();
  void drop();  // forgets every request

 private:
  struct Slot;
  struct Worker;
  void forget_parent();

  Read read_;
  std::deque<std::shared_ptr<Slot>> slots_;
  std::unique_ptr<Worker> worker_;
  pid_t process_;
};

}  // namespace poise::data
