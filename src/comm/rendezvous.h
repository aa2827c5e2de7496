// Where the ranks of a launch first meet: rank 0's store.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/c10d_calls.h"
#include "comm/launch.h"

namespace poise::comm {

// Rank 0 opens the store unless the launcher has one; the others connect, for `timeout` at most.
// What it returns holds keys of this launch and of this call alone.
c10d_calls::StorePtr meet(const Launch& launch, std::chrono::milliseconds timeout);

// Each rank's text, by rank, when all have come. Throws Error naming who is missing after
// `timeout`, or who was told of another number of ranks.
std::vector<std::string> roll_call(::c10d::Store& store, const Launch& launch,
                                   const std::string& text, std::chrono::milliseconds timeout);

// The address of this machine on the way to rank 0's.
std::string own_address(const Launch& launch);

}  // namespace poise::comm
