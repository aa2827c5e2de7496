// The face of a group: checks, counts, and the stream that collectives run on.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/backend.h"
#include "comm/checks.h"
#include "core/fork.h"
#include "poise/error.h"

namespace poise::comm {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::all_gather:
      return "all_gather";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::all_to_all:
      return "all_to_all";
    case Kind::broadcast:
      return "broadcast";
    case Kind::barrier:
      return "barrier";
  }
  POISE_CHECK(false, "unknown kind ", static_cast<int>(kind));
  return "";
}

std::string describe(const Call& call) {
  const std::string subject =
      join("collective ", call.number, ", ", name_of(call.kind), " of '", call.what, "'");
  if (call.kind == Kind::barrier) return subject;
  const std::string from = call.kind == Kind::broadcast ? join(" from rank ", call.root_name) : "";
  return join(subject, from, " (", call.bytes, " bytes of ", c10::toString(call.dtype), ")");
}

std::string differing(int rank_a, const std::string& a, int rank_b, const std::string& b) {
  const bool in_order = rank_a < rank_b;
  return join("[comm] ranks differ in their sequence of collectives: rank ",
              in_order ? rank_a : rank_b, " is in ", in_order ? a : b, ", rank ",
              in_order ? rank_b : rank_a, " is in ", in_order ? b : a,
              "; all ranks must run the same parts of the model in the same order");
}

namespace {

// Bytes this rank sends in theory.
std::int64_t sent_bytes(const Call& call, int rank, int size) {
  switch (call.kind) {
    case Kind::all_gather:
    case Kind::reduce_scatter:
    case Kind::all_to_all:
      return call.bytes / size * (size - 1);
    case Kind::all_reduce:
      return 2 * call.bytes * (size - 1) / size;
    case Kind::broadcast:
      return size > 1 && rank == call.root ? call.bytes : 0;
    case Kind::barrier:
      return 0;
  }
  return 0;
}

// How long a dropped group waits for collectives in flight before it ends, and an ended one for
// this rank's to let go of their tensors.
constexpr std::chrono::seconds kGrace{5};

// "cuda" is the current one, as for torch.
c10::Device numbered(c10::Device device) {
  if (device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

struct Group::Impl {
  Impl(std::unique_ptr<Backend> backend, int rank, int size, c10::Device device)
      : backend(std::move(backend)),
        rank(rank),
        size(size),
        device(numbered(device)),
        stream(device) {}

  ~Impl() {
    if (generation != fork_generation()) {  // the child of a fork has none of its threads
      static_cast<void>(backend.release());
    } else if (!settled()) {
      backend->abort(join("its handle was dropped during ", describe(last_call)));
    }
  }

  Call call(Kind kind, std::string what, const at::Tensor& larger) {
    Call made{kind, std::move(what)};
    if (larger.defined()) {
      made.bytes = static_cast<std::int64_t>(larger.nbytes());
      made.dtype = larger.scalar_type();
    }
    return made;
  }

  // `work(call)` runs on the stream, in a world of one here and now.
  template <class Work>
  Event submit(Call call, Work work) {
    call.number = submitted++;
    traffic.calls[static_cast<std::size_t>(call.kind)] += 1;
    traffic.bytes[static_cast<std::size_t>(call.kind)] += sent_bytes(call, rank, size);
    if (size == 1) {
      backend->check();
      work(call);
      return {};
    }
    last_call = call;
    last = stream.submit([this, call = std::move(call), work = std::move(work)] {
      backend->check();
      work(call);
    });
    return last;
  }

  void make_room(std::int64_t bytes) {
    if (bytes <= reserved || size == 1) return;
    stream.synchronize();  // the scratch may be in use
    backend->reserve(bytes);
    reserved = bytes;
  }

  // Whether nothing is in flight any more, waiting a few seconds for it. Does not throw: failures
  // are told to who waits for the result.
  bool settled() const noexcept {
    const auto deadline = std::chrono::steady_clock::now() + kGrace;
    do {
      try {
        if (last.done()) return true;
        last.wait_for(kGrace);
      } catch (...) {  // its failure, or an interrupt, which comes again and again
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
  }

  std::unique_ptr<Backend> backend;
  const int rank;
  const int size;
  const c10::Device device;
  Traffic traffic;
  std::int64_t submitted = 0;
  std::int64_t reserved = 0;
  const int generation = fork_generation();
  Call last_call;
  Event last;
  Stream stream;  // the last member: it ends first, while the backend still lives
};

Group::Group(std::unique_ptr<Backend> backend, int rank, int size, c10::Device device)
    : impl_(std::make_unique<Impl>(std::move(backend), rank, size, device)) {
  POISE_CHECK(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
}
Group::~Group() = default;

int Group::rank() const { return impl_->rank; }
int Group::size() const { return impl_->size; }
c10::Device Group::device() const { return impl_->device; }
std::string Group::backend() const { return impl_->backend->name(); }

Event Group::all_gather(at::Tensor whole, at::Tensor mine, std::string what) {
  Impl& my = *impl_;
  const Call call = my.call(Kind::all_gather, std::move(what), whole);
  check_flat(call, "the whole", whole, my.device);
  check_flat(call, "the piece", mine, my.device);
  check_pieces(call, whole, mine, my.rank, my.size);
  return my.submit(call, [&backend = *my.backend, whole, mine](const Call& c) {
    backend.all_gather(c, whole, mine);
  });
}

Event Group::reduce_scatter(at::Tensor mine, at::Tensor whole, std::string what) {
  Impl& my = *impl_;
  const Call call = my.call(Kind::reduce_scatter, std::move(what), whole);
  check_flat(call, "the whole", whole, my.device);
  check_flat(call, "the piece", mine, my.device);
  check_reducible(call, mine, whole);
  check_pieces(call, whole, mine, my.rank, my.size);
  my.make_room(call.bytes);
  return my.submit(call, [&backend = *my.backend, whole, mine](const Call& c) {
    backend.reduce_scatter(c, mine, whole);
  });
}

Event Group::all_reduce(at::Tensor values, std::string what) {
  Impl& my = *impl_;
  const Call call = my.call(Kind::all_reduce, std::move(what), values);
  check_flat(call, "the tensor", values, my.device);
  check_summable(call, values);
  my.make_room(my.backend->all_reduce_scratch(call.bytes));
  return my.submit(
      call, [&backend = *my.backend, values](const Call& c) { backend.all_reduce(c, values); });
}

Event Group::all_to_all(at::Tensor received, at::Tensor sent, std::string what) {
  Impl& my = *impl_;
  const Call call = my.call(Kind::all_to_all, std::move(what), sent);
  check_flat(call, "what is received", received, my.device);
  check_flat(call, "what is sent", sent, my.device);
  check_exchange(call, received, sent, my.size);
  return my.submit(call, [&backend = *my.backend, received, sent](const Call& c) {
    backend.all_to_all(c, received, sent);
  });
}

Event Group::broadcast(at::Tensor values, int root, std::string what) {
  Impl& my = *impl_;
  Call call = my.call(Kind::broadcast, std::move(what), values);
  call.root = root;
  check_flat(call, "the tensor", values, my.device);
  if (root < 0 || root >= my.size) {
    fail("comm", "broadcast of '", call.what, "' from rank ", root, " in a group of ", my.size,
         "; ranks go from 0 to size - 1");
  }
  call.root_name = my.backend->called(root);
  return my.submit(
      call, [&backend = *my.backend, values](const Call& c) { backend.broadcast(c, values); });
}

void Group::barrier(std::string what) {
  Impl& my = *impl_;
  my.submit(my.call(Kind::barrier, std::move(what), {}), [&backend = *my.backend](const Call& c) {
      backend.barrier(c);
    }).synchronize();
  check();
}

std::vector<std::string> Group::all_gather_text(const std::string& text, const std::string& what) {
  const auto on_cpu = at::TensorOptions().dtype(at::kLong);
  auto length = at::empty({1}, on_cpu);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(text.size());
  auto lengths = at::zeros({size()}, on_cpu.device(device()));
  all_gather(lengths, length.to(device()), what).wait();
  lengths = lengths.cpu();
  check();
  const auto* bytes = lengths.const_data_ptr<std::int64_t>();
  const std::int64_t longest = *std::max_element(bytes, bytes + size());
  if (longest == 0) return std::vector<std::string>(static_cast<std::size_t>(size()));

  auto mine = at::zeros({longest}, on_cpu.dtype(at::kByte));
  if (!text.empty()) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  auto all = at::zeros({size() * longest}, mine.options().device(device()));
  all_gather(all, mine.to(device()), what).wait();
  all = all.cpu();
  check();
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    const auto* begin = static_cast<const char*>(all.const_data_ptr()) + rank * longest;
    texts.emplace_back(begin, static_cast<std::size_t>(bytes[rank]));
  }
  return texts;
}

void Group::leave_note(const std::string& key, const std::string& text) {
  impl_->backend->leave_note(key, text);
}
std::optional<std::string> Group::note(const std::string& key) const {
  return impl_->backend->note(key);
}

void Group::reserve(std::int64_t bytes) { impl_->make_room(bytes); }
void Group::reserve_all_reduce(std::int64_t bytes) {
  impl_->make_room(impl_->backend->all_reduce_scratch(bytes));
}
void Group::check() const { impl_->backend->check(); }
void Group::abort(const std::string& message) noexcept {
  impl_->backend->abort(message);
  impl_->settled();
}
Traffic Group::traffic() const { return impl_->traffic; }
void Group::reset_traffic() { impl_->traffic = {}; }

}  // namespace poise::comm
