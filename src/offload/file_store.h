// Spans in one scratch file, read and written by lanes.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "offload/lane.h"
#include "poise/offload.h"

namespace poise::offload {

class FileStore final : public Store, public std::enable_shared_from_this<FileStore> {
 public:
  // `make`: of each lane's input and output; tests bring their own.
  FileStore(const config::OffloadPolicy& policy, HostMemory& memory, const MakeIo& make,
            ScratchFile::Name name = ScratchFile::Name::none);

  SpanPtr reserve(std::int64_t numel, at::ScalarType dtype) override;
  std::int64_t file_bytes() const override;
  const ScratchFile& file() const { return space_->file; }
  const char* io_name() const { return reads_.lanes.front()->io_name(); }

 private:
  class FileSpan;
  // One direction. A lane lets its blocks run out at the end of a transfer: then it is the other
  // one that keeps the disk busy, with the next transfer.
  struct Lanes {
    Lanes(ScratchFile& file, const config::OffloadPolicy& policy, HostMemory& memory,
          const MakeIo& make);
    Lane& next();
    std::vector<std::unique_ptr<Lane>> lanes;
    std::size_t turn = 0;
  };
  // The file and the rooms in it that nobody has; rooms share it, so that a room may be given back
  // from a lane's worker.
  struct Space {
    Space(const std::string& directory, ScratchFile::Name name) : file(directory, name) {}
    ScratchFile file;
    mutable std::mutex mutex;
    std::multimap<std::int64_t, std::int64_t> free;  // bytes -> begin
    std::int64_t used = 0;
  };
  std::shared_ptr<Room> take_room(std::int64_t bytes);

  std::shared_ptr<Space> space_;
  const std::int64_t block_bytes_;
  Lanes reads_, writes_;
  std::mutex mutex_;  // streams are driven by one thread at a time
};

// io_uring or threads, as the policy and the system say; the fall-back is said.
MakeIo io_of(const config::OffloadPolicy& policy);

}  // namespace poise::offload
