// Groups of processes on GPUs: NCCL's own collectives, queued on the group's stream. The digest of
// on_cpu.cpp would cost a host wait for each; differing ranks are found by the watch.
#include <ATen/ops/zeros.h>

#include <chrono>
#include <thread>
#include <utility>

#include "comm/backend.h"
#include "comm/failure.h"
#include "comm/flat.h"
#include "comm/process_group.h"
#include "comm/store_notes.h"
#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::comm {
namespace {

at::Tensor unversioned(const at::Tensor& flat) { return flat.variable_data(); }

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
    meet(call);
    try {
      start()->wait();
    } catch (const std::exception& error) {
      failure_.check();
      fail("comm", describe(call), " failed: ", c10d_calls::message_of(error),
           "; look at the output of the other ranks");
    }
  }

  // Before the first collective. NCCL would wait without end for a rank that died before it came,
  // and that wait could not be ended.
  void meet(const Call& call) {
    if (met_ || !watch_) return;
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    while (const auto awaited = watch_->awaited()) {
      check_interrupt();
      failure_.check();
      if (std::chrono::steady_clock::now() > deadline) {
        abort(join("it waited ", timeout_.count() / 1000.0, " s in ", describe(call), ", for rank ",
                   called(*awaited),
                   ", which has not made its group; look at the output of that rank, or raise the "
                   "timeout"));
        failure_.check();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    met_ = true;
  }

  // Kernels that wait for a lost peer end by this alone.
  void end(const std::string& message) noexcept {
    failure_.set(message);
    try {
      backend_->abort();
    } catch (const std::exception&) {  // the group is of no more use either way
    }
  }

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  bool met_ = false;  // all ranks have made their group
  c10d_calls::BackendPtr backend_;
  const bool owns_backend_;
  at::Tensor one_;
  Failure failure_;
  StoreNotes notes_;
  std::unique_ptr<Watch> watch_;  // ends first: its thread calls end()
};

}  // namespace

std::unique_ptr<Backend> on_gpu(const Peers& peers, Seat seat, const Options& options) {
  return std::make_unique<OnGpu>(peers, std::move(seat), options);
}

}  // namespace poise::comm
