// Saved tensors on their way out while forward goes on, and back ahead of backward.
//
// [Note: when the memory is free] pack() hands autograd a ticket instead of the tensor. The tensor
// is held by the transfer alone, so that its memory is free as soon as the bytes are out (and
// forward has no further use for it). Backward asks for tickets in about the opposite order: with
// each, the ones saved before it are fetched ahead.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_set>

#include "checkpointing/hooks.h"
#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

constexpr std::size_t kAhead = 2;    // tensors on their way back besides the one that is needed
constexpr std::size_t kLeaving = 2;  // tensors on their way out, whose memory is not free yet
constexpr std::size_t kNearby = 32;  // the same tensor is saved again within so many

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// What a saved tensor was, and where its elements are.
struct Ticket {
  at::Tensor kept;  // one that stays: a parameter, a small one
  offload::SpanPtr span;
  std::vector<std::int64_t> sizes, strides;
  at::TensorOptions options;
  std::int64_t numel = 0;
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};  // of the tensor, to know it again
  std::int64_t offset = 0;
  c10::VariableVersion counter;  // the tensor's own: an in-place change after the save shows
  std::uint32_t version = 0;
  at::Tensor back;  // on its way, or here
  Event fetched;
  bool asked = false;  // backward has had it: not fetched ahead again

  bool same(const at::Tensor& tensor) const {
    return !storage.expired() &&
           storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
           offset == tensor.storage_offset() && version == tensor._version() &&
           tensor.sizes() == c10::IntArrayRef(sizes) &&
           tensor.strides() == c10::IntArrayRef(strides) && tensor.dtype() == options.dtype();
  }
};
using TicketPtr = std::shared_ptr<Ticket>;

// Elements in the order of memory; a tensor that fills its memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

}  // namespace

struct ActivationOffload::Books {
  Books(std::shared_ptr<offload::Store> store, std::int64_t min_bytes)
      : store(std::move(store)), min_bytes(min_bytes) {}

  const std::shared_ptr<offload::Store> store;
  const std::int64_t min_bytes;
  std::unordered_set<const c10::StorageImpl*> stay;
  // CPU and device threads of one backward; a ticket may go while it is held.
  std::recursive_mutex mutex;
  std::deque<std::weak_ptr<Ticket>> saved;  // in order
  struct Leaving {
    Event event;
    at::Tensor tensor;  // a GPU's allocator would give its memory to somebody else
  };
  std::deque<Leaving> leaving;
  std::multimap<std::pair<at::ScalarType, std::int64_t>, offload::SpanPtr> free_spans;

  bool leaves(const at::Tensor& tensor) const;
  TicketPtr known(const at::Tensor& tensor);
  void put(const offload::SpanPtr& span, const at::Tensor& tensor);
  void forget_first_leaving();
  offload::SpanPtr take_span(const at::Tensor& tensor);
  TicketPtr ticket_for(const std::shared_ptr<Books>& self, const at::Tensor& tensor);
  at::Tensor redeem(Ticket& ticket);
  void fetch(Ticket& ticket);
  void fetch_ahead(const Ticket& of);
};

// Only dense strided tensors are put as they lie in memory; the others stay, and those that are
// read as the conjugate or the negative of what lies there.
bool ActivationOffload::Books::leaves(const at::Tensor& tensor) const {
  return tensor.defined() && !tensor.is_inference() && tensor.layout() == at::kStrided &&
         static_cast<std::int64_t>(tensor.nbytes()) >= min_bytes && tensor.numel() > 0 &&
         tensor.is_non_overlapping_and_dense() && tensor.has_storage() && !tensor.is_conj() &&
         !tensor.is_neg() && stay.count(tensor.storage().unsafeGetStorageImpl()) == 0;
}

// Several operations save the same tensor: one copy serves all.
TicketPtr ActivationOffload::Books::known(const at::Tensor& tensor) {
  const auto nearby = std::min(saved.size(), kNearby);
  for (std::size_t back = 1; back <= nearby; ++back) {
    if (auto ticket = saved[saved.size() - back].lock(); ticket && ticket->same(tensor)) {
      return ticket;
    }
  }
  return nullptr;
}

void ActivationOffload::Books::put(const offload::SpanPtr& span, const at::Tensor& tensor) {
  while (leaving.size() >= kLeaving || (!leaving.empty() && leaving.front().event.done())) {
    forget_first_leaving();
  }
  const auto flat = in_memory_order(tensor);
  leaving.push_back({span->put(0, flat), flat});
}

void ActivationOffload::Books::forget_first_leaving() {
  try {
    leaving.front().event.wait();  // on a GPU what takes the memory comes later; the host goes on
  } catch (
      ...) {  // the others are of the same window, which is lost: the next one has none of them
    for (const auto& one : leaving) {
      try {
        one.event.synchronize_on_worker();  // an interrupt would not end the transfer
      } catch (...) {
        // It follows the failure that is on its way to the caller.
      }
    }
    leaving.clear();
    throw;
  }
  leaving.pop_front();
}

offload::SpanPtr ActivationOffload::Books::take_span(const at::Tensor& tensor) {
  const auto found = free_spans.find({tensor.scalar_type(), tensor.numel()});
  if (found == free_spans.end()) return store->reserve(tensor.numel(), tensor.scalar_type());
  auto span = found->second;
  free_spans.erase(found);
  return span;
}

TicketPtr ActivationOffload::Books::ticket_for(const std::shared_ptr<Books>& self,
                                               const at::Tensor& tensor) {
  if (!leaves(tensor)) {
    auto ticket = std::make_shared<Ticket>();
    ticket->kept = tensor.detach();
    return ticket;
  }
  const std::lock_guard guard(mutex);
  if (auto ticket = known(tensor)) return ticket;
  // Weak: the control block that `saved` keeps would keep the books.
  TicketPtr ticket(new Ticket, [weak = std::weak_ptr(self)](Ticket* gone) {
    if (const auto books = weak.lock()) {
      const std::lock_guard back(books->mutex);
      books->free_spans.emplace(std::pair(gone->options.dtype().toScalarType(), gone->numel),
                                gone->span);
    }
    delete gone;
  });
  ticket->options = tensor.options().requires_grad(false);
  ticket->numel = tensor.numel();
  ticket->span = take_span(tensor);
  ticket->sizes = tensor.sizes().vec();
  ticket->strides = tensor.strides().vec();
  ticket->offset = tensor.storage_offset();
  ticket->version = tensor._version();
  ticket->storage = tensor.storage().getWeakStorageImpl();
  ticket->counter = tensor.unsafeGetTensorImpl()->version_counter();
  put(ticket->span, tensor);
  while (!saved.empty() && saved.front().expired()) saved.pop_front();
  saved.push_back(ticket);
  return ticket;
}

void ActivationOffload::Books::fetch(Ticket& ticket) {
  at::NoGradGuard no_grad;
  ticket.back = at::empty_strided(ticket.sizes, ticket.strides, ticket.options);
  ticket.fetched = ticket.span->fetch(0, in_memory_order(ticket.back));
}

// What was saved just before.
void ActivationOffload::Books::fetch_ahead(const Ticket& of) {
  while (!saved.empty() && saved.back().expired()) saved.pop_back();
  std::size_t at = saved.size();
  while (at > 0 && saved[at - 1].lock().get() != &of) --at;
  std::size_t ahead = 0;
  for (; at > 1 && ahead < kAhead; --at) {
    const auto ticket = saved[at - 2].lock();
    if (!ticket || ticket->asked) continue;
    ++ahead;
    if (ticket->back.defined()) continue;
    try {
      fetch(*ticket);
    } catch (const c10::OutOfMemoryError&) {
      return;  // then it comes when it is needed
    }
  }
}

at::Tensor ActivationOffload::Books::redeem(Ticket& ticket) {
  if (ticket.kept.defined()) return ticket.kept;
  if (ticket.counter.current_version() != ticket.version) {
    fail("checkpointing", "a tensor that backward needs was changed in place after it was saved (",
         ticket.options.dtype(), " ", c10::IntArrayRef(ticket.sizes),
         "); use the operation that makes a new tensor");
  }
  const std::lock_guard guard(mutex);
  // Nothing is saved any more that would let go of the last ones: backward would hold them to its
  // end. It begins with what was saved last, so that it waits for them in any case.
  while (!leaving.empty()) forget_first_leaving();
  if (!ticket.back.defined()) fetch(ticket);
  ticket.asked = true;
  fetch_ahead(ticket);
  ticket.fetched.wait();
  return std::exchange(ticket.back, {});
}

class ActivationOffload::Hooks : public SavedTensorHooks {
 public:
  explicit Hooks(std::shared_ptr<Books> books) : books_(std::move(books)) {}
  std::shared_ptr<void> pack(const at::Tensor& tensor) override {
    return books_->ticket_for(books_, tensor);
  }
  at::Tensor unpack(const std::shared_ptr<void>& packed) override {
    return books_->redeem(*static_cast<Ticket*>(packed.get()));
  }

 private:
  std::shared_ptr<Books> books_;
};

ActivationOffload::ActivationOffload(std::shared_ptr<offload::Store> store, std::int64_t min_bytes,
                                     const std::vector<at::Tensor>& stay)
    : books_(std::make_shared<Books>(std::move(store), min_bytes)) {
  for (const auto& tensor : stay) {
    if (tensor.defined() && tensor.has_storage()) {
      books_->stay.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
}

std::shared_ptr<void> ActivationOffload::scope() const {
  return std::make_shared<HookScope>(std::make_shared<Hooks>(books_));
}

Tensors ActivationOffload::operator()(const std::function<Tensors(const Tensors&)>& forward,
                                      const Tensors& inputs) const {
  const auto saved = scope();
  return forward(inputs);
}

}  // namespace poise::checkpointing
