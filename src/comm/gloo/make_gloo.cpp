// gloo, with the declarations under headers/.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "comm/make_backend.h"
#include "poise/error.h"

namespace poise::comm {

c10d_calls::BackendPtr make_gloo(const c10d_calls::StorePtr& store, int rank, int size,
                                 const std::string& address, std::chrono::milliseconds timeout) {
  using Gloo = ::c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create(timeout);
  options->threads = 1;  // for its own collectives, which we do not use
  try {
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    options->devices.push_back(interface && *interface ? Gloo::createDeviceForInterface(interface)
                                                       : Gloo::createDeviceForHostname(address));
    return c10::make_intrusive<Gloo>(c10::make_intrusive<::c10d::PrefixStore>("gloo", store), rank,
                                     size, options);
  } catch (const std::exception& error) {
    fail("comm", "rank ", rank, " cannot connect to its peers from ", address, ": ",
         c10d_calls::message_of(error), "; set GLOO_SOCKET_IFNAME to the network interface to use");
  }
}

}  // namespace poise::comm
