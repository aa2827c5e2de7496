// Groups of processes on GPUs: NCCL's own collectives, queued on the group's stream. The digest of
// on_cpu.cpp would cost a host wait for each; differing ranks are found by the watch.
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "comm/apart.h"
#include "comm/backend.h"
#include "comm/failure.h"
#include "comm/flat.h"
#include "comm/greeting.h"
#include "comm/process_group.h"
#include "comm/store_notes.h"
#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPause{10};  // between two looks at what is awaited

at::Tensor unversioned(const at::Tensor& flat) { return flat.variable_data(); }

std::unique_ptr<Greeting> greet(const Peers& peers, int instance) {
  const int tag = kFirstTag + 2 * instance;
  return std::make_unique<Greeting>(peers.gloo, peers.rank, peers.size, tag);
}

class OnGpu final : public Backend {
 public:
  OnGpu(const Peers& peers, Seat seat, const Options& options)
      : Backend(peers.numbers),
        rank_(peers.rank),
        size_(peers.size),
        timeout_(options.timeout),
        backend_(peers.backend),
        owns_backend_(peers.owns_backend),
        one_(at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(peers.device))),
        notes_(seat.store),
        greeting_(peers.gloo && seat.watch ? greet(peers, seat.instance) : nullptr),
        watch_(std::move(seat.watch)) {
    if (watch_) watch_->tell([this](const std::string& message) { end(message); });
  }

  // NCCL's end waits for the other ranks', which come to it only where all are here.
  ~OnGpu() override {
    const bool together = watch_ && watch_->end();
    if (!owns_backend_ || !together || failure_.happened()) return;
    try {
      backend_->shutdown();
    } catch (const std::exception&) {  // the group is of no more use either way
    }
  }

  std::string name() const override { return "nccl"; }

  void all_gather(const Call& call, const at::Tensor& whole, const at::Tensor& mine) override {
    run(call,
        [&] { return c10d_calls::all_gather(*backend_, unversioned(whole), unversioned(mine)); });
  }

  // NCCL sums in the dtype of the wire; 16-bit sums are made in place and cast afterwards.
  void reduce_scatter(const Call& call, const at::Tensor& mine, const at::Tensor& whole) override {
    const bool cast = whole.scalar_type() != at::kFloat;
    const auto sum = cast ? piece_of(whole, rank_, size_) : mine;
    run(call, [&] {
      return c10d_calls::reduce_scatter(*backend_, unversioned(sum), unversioned(whole));
    });
    if (cast) cast_flat(mine, sum);
  }

  void all_reduce(const Call& call, const at::Tensor& values) override {
    run(call, [&] { return c10d_calls::all_reduce(*backend_, unversioned(values)); });
  }

  void all_to_all(const Call& call, const at::Tensor& received, const at::Tensor& sent) override {
    run(call, [&] {
      return c10d_calls::all_to_all(*backend_, unversioned(received), unversioned(sent));
    });
  }

  void broadcast(const Call& call, const at::Tensor& values) override {
    run(call, [&] { return c10d_calls::broadcast(*backend_, unversioned(values), call.root); });
  }

  // The caller waits for the stream.
  void barrier(const Call& call) override {
    run(call, [&] { return c10d_calls::all_reduce(*backend_, one_); });
  }

  void leave_note(const std::string& key, const std::string& text) override {
    notes_.leave(key, text);
  }
  std::optional<std::string> note(const std::string& key) override { return notes_.find(key); }

  void abort(const std::string& message) noexcept override {
    const std::string who = watch_ ? watch_->name_of(rank_) : join("rank ", called(rank_));
    const std::string whole = join("[comm] ", who, " ended the group: ", message);
    if (watch_) watch_->publish(whole);
    end(whole);
  }

  void check() const override { failure_.check(); }

 private:
  // The wait makes the current stream wait, not this thread.
  template <class Start>
  void run(const Call& call, Start start) {
    if (watch_) watch_->enter(call);
    if (watch_ && !connected_) connect(call);
    try {
      start()->wait();
    } catch (const std::exception& error) {
      explain(call, error);
    }
  }

  // Before the first collective, in which torch makes NCCL's communicator. NCCL waits in that for
  // all ranks, without end for one that died on its way there, and nothing ends its wait.
  void connect(const Call& call) {
    std::optional<int> absent;
    await(
        call,
        [&] {
          if (greeting_) hear_of_lost_ranks();
          return !(absent = watch_->awaited());
        },
        [&] { return join("rank ", called(*absent), ", which has not made its group"); });
    // After an interrupt it is still under way.
    if (!connecting_.valid()) connecting_ = begin_to_connect();
    await(
        call, [&] { return is_over(connecting_); }, [&] { return whoever_is_not_in(call); });
    try {
      connecting_.get()->wait();
    } catch (const std::exception& error) {
      explain(call, error);
    }
    connected_ = true;
  }

  std::future<c10d_calls::WorkPtr> begin_to_connect() const {
    const auto stream = c10::impl::VirtualGuardImpl(one_.device().type()).getStream(one_.device());
    return apart([backend = backend_, one = one_, stream] {
      const c10::StreamGuard guard(stream);
      return c10d_calls::all_reduce(*backend, unversioned(one));
    });
  }

  void hear_of_lost_ranks() {
    const auto lost = greeting_->lost();
    if (!lost) return;
    const auto message =
        join("[comm] ", watch_->name_of(lost->peer),
             " disappeared before it made its group: ", lost->what(), "; look at its own output");
    watch_->publish(message);
    end(message);
  }

  // Until `there()`, for the timeout at most. `whom` says who was waited for.
  template <class There, class Whom>
  void await(const Call& call, There there, Whom whom) {
    const auto deadline = Clock::now() + timeout_;
    while (!there()) {
      check_interrupt();
      failure_.check();
      if (Clock::now() > deadline) {
        abort(join("it waited ", timeout_.count() / 1000.0, " s in ", describe(call), ", for ",
                   whom(), "; look at the output of that rank, or raise the timeout"));
        failure_.check();
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  std::string whoever_is_not_in(const Call& call) {
    const auto here = join("in ", describe(call));
    for (int other = 0; other < size_; ++other) {
      const auto place = other == rank_ ? here : watch_->place_of(other);
      if (place != here) return join("rank ", called(other), ", which is ", place);
    }
    return "all ranks to make NCCL's communicator";
  }

  // Of a lost peer NCCL says that it was lost, the watch says who it was. What failed here alone
  // the others are told, who have entered the same collective and would wait in it.
  [[noreturn]] void explain(const Call& call, const std::exception& error) {
    if (watch_ && c10d_calls::blames_a_peer(error)) {
      const auto deadline = Clock::now() + watch_->time_to_notice();
      while (!failure_.happened() && Clock::now() < deadline) {
        check_interrupt();
        std::this_thread::sleep_for(kPause);
      }
    }
    failure_.check();
    const auto message = join(describe(call), " failed: ", c10d_calls::message_of(error),
                              "; look at the output of the other ranks");
    abort(message);
    failure_.check();
    fail("comm", message);  // not reached
  }

  // Kernels that wait for a lost peer end by this alone.
  void end(const std::string& message) noexcept {
    failure_.set(message);
    if (greeting_) greeting_->stop();
    try {
      backend_->abort();
    } catch (const std::exception&) {  // the group is of no more use either way
    }
  }

  const int rank_;
  const int size_;
  const milliseconds timeout_;
  std::future<c10d_calls::WorkPtr> connecting_;
  bool connected_ = false;  // all ranks have made NCCL's communicator
  c10d_calls::BackendPtr backend_;
  const bool owns_backend_;
  at::Tensor one_;
  Failure failure_;
  StoreNotes notes_;
  std::unique_ptr<Greeting> greeting_;  // null: no gloo
  std::unique_ptr<Watch> watch_;        // ends first: its thread calls end()
};

}  // namespace

std::unique_ptr<Backend> on_gpu(const Peers& peers, Seat seat, const Options& options) {
  return std::make_unique<OnGpu>(peers, std::move(seat), options);
}

}  // namespace poise::comm
