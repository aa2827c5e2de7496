// Where the ranks of a launch first meet: rank 0's store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/c10d_calls.h"
#include "comm/launch.h"
#include "comm/watch.h"

namespace poise::comm {

// Rank 0 opens the store unless the launcher has one; the others connect, for `timeout` at most.
// What it returns holds keys of this launch and of this call alone.
c10d_calls::StorePtr meet(const Launch& launch, std::chrono::milliseconds timeout);

// Shows the others that this rank lives, and sees whether they do, from here until all have met.
// One that has not come yet may be slow to start.
std::unique_ptr<Watch> watch_meeting(const c10d_calls::StorePtr& store, const Launch& launch);

// Each rank's text, by rank, when all have come. Throws Error naming who is missing after
// `timeout`, or who was told of another number of ranks. `check` is called while it waits, and ends
// that by what it throws.
std::vector<std::string> roll_call(
    const c10d_calls::StorePtr& store, const Launch& launch, const std::string& text,
    std::chrono::milliseconds timeout, const std::function<void()>& check = [] {});

// The address of this machine on the way to rank 0's.
std::string own_address(const Launch& launch);

}  // namespace poise::comm
