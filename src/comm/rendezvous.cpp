// Stores over TCP.
#include "comm/rendezvous.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "comm/apart.h"
#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A socket of `type` connected to rank 0's host, and so with an address of its own; -1: no way.
// Over UDP this sends nothing; over TCP it says whether somebody listens.
class Connection {
 public:
  Connection(const Launch& launch, int type) {
    addrinfo hints{};
    hints.ai_socktype = type;
    addrinfo* found = nullptr;
    const std::string port = std::to_string(launch.port);
    const int error = getaddrinfo(launch.address.c_str(), port.c_str(), &hints, &found);
    if (error != 0) {
      fail("comm", "cannot find the host of rank 0, ", launch.address, ": ", gai_strerror(error),
           "; set MASTER_ADDR to a name or address that this machine knows");
    }
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found, freeaddrinfo);
    for (const addrinfo* one = found; one && socket_ < 0; one = one->ai_next) {
      const int made = ::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, 0);
      if (made < 0) continue;
      if (::connect(made, one->ai_addr, one->ai_addrlen) == 0) {
        socket_ = made;
      } else {
        ::close(made);
      }
    }
  }
  ~Connection() {
    if (socket_ >= 0) ::close(socket_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool made() const { return socket_ >= 0; }
  int socket() const { return socket_; }

 private:
  int socket_ = -1;
};

c10d_calls::StorePtr open_store(const Launch& launch, milliseconds timeout) {
  ::c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launch.store_runs;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<::c10d::TCPStore>(launch.address, options);
  } catch (const std::exception& error) {
    if (options.isServer) {
      fail("comm", "rank 0 cannot listen on port ", launch.port, ": ",
           c10d_calls::message_of(error), "; set MASTER_PORT to a free port");
    }
    fail("comm", "rank ", launch.rank, " cannot reach the store at ", launch.address, ":",
         launch.port, ": ", c10d_calls::message_of(error), "; check MASTER_ADDR and MASTER_PORT");
  }
}

}  // namespace

c10d_calls::StorePtr meet(const Launch& launch, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const bool hosts = launch.rank == 0 && !launch.store_runs;
  const auto look = [&] {
    if (!hosts && Clock::now() >= deadline) {
      fail("comm", "rank ", launch.rank, " waited ", static_cast<double>(timeout.count()) / 1000,
           " s for rank 0 at ", launch.address, ":", launch.port,
           "; start it, or check MASTER_ADDR and MASTER_PORT");
    }
    check_interrupt();
  };
  // torch's own waits for a listener and for its answers could not be interrupted.
  while (!hosts && !Connection(launch, SOCK_STREAM).made()) {
    look();
    std::this_thread::sleep_for(milliseconds(100));
  }
  const auto store = answer_of([launch, timeout] { return open_store(launch, timeout); }, look);
  const std::string launches = join("poise/launch/", launch.attempt);
  const auto own = join(launches, "/rank/", launch.rank);
  const auto before = answer_of([store, own] { return store->add(own, 1); }, look) - 1;
  return c10::make_intrusive<::c10d::PrefixStore>(join(launches, '/', before), store);
}

std::unique_ptr<Watch> watch_meeting(const c10d_calls::StorePtr& store, const Launch& launch) {
  auto connection = c10::make_intrusive<::c10d::PrefixStore>("meeting", store->clone());
  return std::make_unique<Watch>(std::move(connection), Watched{launch.rank, launch.size},
                                 WatchSettings());
}

std::vector<std::string> roll_call(const c10d_calls::StorePtr& store, const Launch& launch,
                                   const std::string& text, milliseconds timeout,
                                   const std::function<void()>& check) {
  const auto look = [&] {
    check_interrupt();
    check();
  };
  // A host that was stopped does not answer, and `check` is to be heard all the same.
  const auto ask = [&](auto question) {
    return answer_of([store, question] { return question(*store); }, look);
  };
  const auto key = [](int rank) { return join("roll/", rank); };
  ask([key = key(launch.rank), said = join(launch.size, '\n', text)](::c10d::Store& roll) {
    roll.set(key, said);
  });
  const auto deadline = Clock::now() + timeout;
  std::vector<std::string> texts;
  for (int rank = 0; rank < launch.size; ++rank) {
    const auto one = key(rank);
    while (!ask([one](::c10d::Store& roll) { return roll.check({one}); })) {
      if (Clock::now() >= deadline) {
        fail("comm", "rank ", rank, " of ", launch.size, " did not come within ",
             static_cast<double>(timeout.count()) / 1000, " s; ", launch.by,
             " says that there is one, start it or correct the number of ranks");
      }
      look();
      std::this_thread::sleep_for(milliseconds(20));
    }
    const auto said = ask([one](::c10d::Store& roll) { return roll.get_to_str(one); });
    const auto end = said.find('\n');
    if (said.substr(0, end) != std::to_string(launch.size)) {
      std::this_thread::sleep_for(
          milliseconds(500));  // the others look, too, before the store ends
      fail("comm", "rank ", rank, " was started as one of ", said.substr(0, end),
           " ranks and rank ", launch.rank, " as one of ", launch.size,
           "; start all with the same number of ranks");
    }
    texts.push_back(said.substr(end + 1));
  }
  return texts;
}

std::string own_address(const Launch& launch) {
  const Connection connection(launch, SOCK_DGRAM);
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  char text[NI_MAXHOST] = "";
  const bool known =
      connection.made() &&
      getsockname(connection.socket(), reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
      getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) == 0;
  if (!known) {
    fail("comm", "no way from this machine to ", launch.address,
         "; set GLOO_SOCKET_IFNAME to the network interface to use");
  }
  return text;
}

}  // namespace poise::comm
