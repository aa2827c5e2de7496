// Ranks as threads: a body runs once per rank, each with its own handle of the group.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "poise/comm.h"

namespace poise::testing {

// `body` takes the rank's Group& or std::shared_ptr<Group>. What each rank threw, by rank; empty
// where it ended well. A rank that throws ends the group, as
// an engine would. A handle lives until its thread is over.
template <class Body>
std::vector<std::string> errors_on_ranks(int size, Body body, comm::Options options = {}) {
  auto groups = comm::threads(size, options);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    ranks.emplace_back([&, rank, group = std::move(groups[rank])] {
      try {
        if constexpr (std::is_invocable_v<Body&, std::shared_ptr<comm::Group>>) {
          body(group);
        } else {
          body(*group);
        }
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        group->abort(error.what());
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  return errors;
}

// The same where nothing should go wrong: throws what went wrong.
template <class Body>
void on_ranks(int size, Body body, comm::Options options = {}) {
  for (const std::string& error : errors_on_ranks(size, std::move(body), options)) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

}  // namespace poise::testing
