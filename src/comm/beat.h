// What a rank says of itself in the store, once a second.
#pragma once

#include <cstdint>
#include <string>

namespace poise::comm {

struct Beat {
  std::int64_t pulse = 0;
  std::int64_t entered = 0;  // collectives so far
  bool inside = false;       // the last of them is not over
  bool left = false;         // this rank will enter no more
  std::string place;         // description of the last one
};

std::string text_of(const Beat& beat);
Beat beat_of(const std::string& text);

// "host a, pid 17" of this process.
std::string own_name();

}  // namespace poise::comm
