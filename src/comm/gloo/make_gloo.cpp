// gloo, with the declarations under headers/.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <type_traits>
#include <utility>

#include "comm/apart.h"
#include "comm/make_backend.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

// Where ranks leave their addresses for each other. Its waits, of torch's own making, would last to
// their timeout whatever became of the peer, and its questions without end where the host of the
// store was stopped.
class AddressStore : public ::c10d::PrefixStore {
 public:
  AddressStore(const c10d_calls::StorePtr& store, std::function<void()> check)
      : PrefixStore("gloo", store),
        addresses_(c10::make_intrusive<::c10d::PrefixStore>("gloo", store)),
        check_(std::move(check)) {}

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    ask([key, value](Store& addresses) { addresses.set(key, value); });
  }
  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    auto pause = std::chrono::milliseconds(1);
    while (!ask([keys](Store& addresses) { return addresses.check(keys); })) {
      noted(check_);
      if (std::chrono::steady_clock::now() > deadline) {
        PrefixStore::wait(keys, std::chrono::milliseconds(1));  // fails in torch's words
        return;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(20));
    }
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key}, getTimeout());
    return ask([key](Store& addresses) { return addresses.get(key); });
  }
  bool hasExtendedApi() const override { return false; }  // which would wait for many at once

  std::exception_ptr ended_by() const { return ended_by_; }
  void all_connected() {
    check_ = [] {};
  }

 private:
  template <class Question>
  std::invoke_result_t<Question, Store&> ask(Question question) {
    return noted([&] {
      return answer_of([addresses = addresses_, question] { return question(*addresses); }, check_);
    });
  }

  // gloo would hand it on in words of its own: what the check throws, or that the store is lost.
  template <class Call>
  std::invoke_result_t<Call> noted(Call call) {
    try {
      return call();
    } catch (...) {
      ended_by_ = std::current_exception();
      throw;
    }
  }

  const c10d_calls::StorePtr addresses_;
  std::function<void()> check_;
  std::exception_ptr ended_by_;
};

}  // namespace

c10d_calls::BackendPtr make_gloo(const c10d_calls::StorePtr& store, int rank, int size,
                                 const std::string& address, std::chrono::milliseconds timeout,
                                 std::function<void()> check) {
  using Gloo = ::c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create(timeout);
  options->threads = 1;  // for its own collectives, which we do not use
  const auto addresses = c10::make_intrusive<AddressStore>(store, std::move(check));
  try {
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    options->devices.push_back(interface && *interface ? Gloo::createDeviceForInterface(interface)
                                                       : Gloo::createDeviceForHostname(address));
    const auto backend = c10::make_intrusive<Gloo>(addresses, rank, size, options);
    addresses->all_connected();
    return backend;
  } catch (const std::exception& error) {
    if (const auto reason = addresses->ended_by()) std::rethrow_exception(reason);
    fail("comm", "rank ", rank, " cannot connect to its peers from ", address, ": ",
         c10d_calls::message_of(error), "; set GLOO_SOCKET_IFNAME to the network interface to use");
  }
}

}  // namespace poise::comm
