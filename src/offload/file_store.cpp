// Rooms in the file, and transfers that keep the order of those they meet.
#include "offload/file_store.h"

#include <algorithm>

#include "poise/error.h"
#include "poise/log.h"

namespace poise::offload {

namespace {

constexpr std::int64_t kMostLanes = 2;  // each way

std::int64_t whole_sectors(std::int64_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

}  // namespace

class FileStore::FileSpan final : public Span {
 public:
  FileSpan(std::shared_ptr<FileStore> store, std::shared_ptr<Room> room, std::int64_t numel,
           at::ScalarType dtype)
      : Span(numel, dtype), store_(std::move(store)), room_(std::move(room)) {}

 private:
  // Blocks [first, last] on their way.
  struct Transfer {
    std::int64_t first, last;
    const Lane* lane;
    Event event;
    bool meets(const Transfer& other) const { return first <= other.last && other.first <= last; }
  };

  // Blocks that a put was to write: lost where it failed, or never began because one before it did.
  class Unwritten {
   public:
    Unwritten(std::shared_ptr<Room> room, std::int64_t first, std::int64_t last)
        : room_(std::move(room)), first_(first), last_(last) {}
    ~Unwritten() {
      for (auto block = first_; block <= last_; ++block) {
        room_->checksums[static_cast<std::size_t>(block)] = Room::kLost;
      }
    }
    void none() { last_ = first_ - 1; }

   private:
    const std::shared_ptr<Room> room_;
    std::int64_t first_, last_;
  };

  Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
    return submit(
        store_->reads_, reads_, writes_, begin, to,
        [](Lane& lane, Room& room, std::int64_t low, std::int64_t high, const at::Tensor& t) {
          lane.read(room, low, high, static_cast<char*>(t.mutable_data_ptr()));
        });
  }
  Event do_put(std::int64_t begin, const at::Tensor& from) override {
    return submit(
        store_->writes_, writes_, reads_, begin, from,
        [](Lane& lane, Room& room, std::int64_t low, std::int64_t high, const at::Tensor& t) {
          lane.write(room, low, high, static_cast<const char*>(t.const_data_ptr()));
        });
  }

  template <class Move>
  Event submit(Lanes& lanes, std::vector<Transfer>& same, std::vector<Transfer>& other,
               std::int64_t begin, const at::Tensor& tensor, Move move) {
    POISE_CHECK(tensor.device().is_cpu());
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype()));
    const auto low = begin * size, high = low + tensor.numel() * size;
    const auto block = store_->block_bytes_;
    const std::lock_guard guard(store_->mutex_);
    Lane& lane = lanes.next();
    lane.begin_anew();
    Transfer mine{low / block, (high - 1) / block, &lane, {}};
    const bool writes = &lanes == &store_->writes_;
    // What a write comes after and is over orders nothing, and where it failed, that is no concern
    // of the write. A read hears of it.
    const auto orders = [&](const Transfer& one) {
      return one.meets(mine) && !(writes && one.event.done());
    };
    for (const auto& one : other) {
      if (orders(one)) lane.stream().wait(one.event);
    }
    for (const auto& one : same) {
      if (writes && one.lane != &lane && orders(one)) lane.stream().wait(one.event);
    }
    const auto undone =
        writes ? std::make_shared<Unwritten>(room_, mine.first, mine.last) : nullptr;
    mine.event = lane.submit([&lane, room = room_, low, high, tensor, move, undone] {
      move(lane, *room, low, high, tensor);
      if (undone) undone->none();
    });
    // Those that are over stay until a transfer the other way has heard whether they failed.
    std::erase_if(same, [&](const Transfer& one) {
      return one.event.done() && one.first >= mine.first && one.last <= mine.last;
    });
    if (same.size() >= kMostRemembered) {
      std::erase_if(same, [](const Transfer& one) { return one.event.done(); });
    }
    same.push_back(mine);
    return mine.event;
  }

  static constexpr std::size_t kMostRemembered = 64;
  const std::shared_ptr<FileStore> store_;
  const std::shared_ptr<Room> room_;
  std::vector<Transfer> reads_, writes_;
};

FileStore::FileStore(const config::OffloadPolicy& policy, HostMemory& memory, const MakeIo& make,
                     ScratchFile::Name name)
    : space_(std::make_shared<Space>(policy.directory, name)),
      block_bytes_(policy.block_bytes),
      reads_(space_->file, policy, memory, make),
      writes_(space_->file, policy, memory, make) {}

FileStore::Lanes::Lanes(ScratchFile& file, const config::OffloadPolicy& policy, HostMemory& memory,
                        const MakeIo& make) {
  const auto count = std::min<std::int64_t>(kMostLanes, policy.queue_depth);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto depth = policy.queue_depth / count + (i < policy.queue_depth % count ? 1 : 0);
    const auto buffers = memory.allocate(depth * policy.block_bytes, at::kByte);
    lanes.push_back(std::make_unique<Lane>(file, buffers, policy.block_bytes, make));
  }
}

Lane& FileStore::Lanes::next() { return *lanes[turn++ % lanes.size()]; }

SpanPtr FileStore::reserve(std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  auto room = take_room(whole_sectors(bytes));
  room->used = bytes;
  return std::make_shared<FileSpan>(shared_from_this(), std::move(room), numel, dtype);
}

// Rooms of a size that was given back are used again; spans that come and go have few sizes.
std::shared_ptr<Room> FileStore::take_room(std::int64_t bytes) {
  const auto block = block_bytes_;
  auto room = std::make_unique<Room>();
  room->bytes = bytes;
  room->checksums.resize(static_cast<std::size_t>((bytes + block - 1) / block));
  const std::lock_guard guard(space_->mutex);
  const auto found = space_->free.find(bytes);
  if (found != space_->free.end()) {
    room->begin = found->second;
    space_->free.erase(found);
  } else if (bytes > 0) {
    room->begin = space_->file.bytes();
    space_->file.grow(bytes);
  }
  space_->used += bytes;
  return {room.release(), [space = space_](Room* gone) {
            const std::lock_guard back(space->mutex);
            space->free.emplace(gone->bytes, gone->begin);
            space->used -= gone->bytes;
            delete gone;
          }};
}

std::int64_t FileStore::file_bytes() const {
  const std::lock_guard guard(space_->mutex);
  return space_->used;
}

MakeIo io_of(const config::OffloadPolicy& policy) {
  return
      [io = policy.io, noted = std::make_shared<bool>(false)](const std::vector<iovec>& buffers) {
        std::string why_not;
        std::unique_ptr<BlockIo> made;
        if (io != config::OffloadIo::threads) made = make_ring(buffers, why_not);
        if (!why_not.empty() && !std::exchange(*noted, true)) {
          if (!made && io == config::OffloadIo::io_uring) {
            fail("offload", "no io_uring: ", why_not, "; set offload.io to auto or threads");
          }
          log::info("[offload] ", made ? "io_uring: " : "no io_uring, threads instead: ", why_not,
                    " (said once)");
        }
        return made ? std::move(made) : make_threads(buffers.size());
      };
}

std::shared_ptr<Store> file_store(const config::OffloadPolicy& policy,
                                  std::shared_ptr<HostMemory> memory) {
  return std::make_shared<FileStore>(policy, *memory, io_of(policy));
}

}  // namespace poise::offload
