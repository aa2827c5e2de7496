// The self-test of `poise doctor`: a small training at every stage, compared bit by bit.
#pragma once

#include <memory>
#include <string>

#include "poise/comm.h"

namespace poise::cli {

// Trains a small model at stages 0 to 3 over the group and says whether 0 and 1, and 2 and 3, end
// with the same bits, as they must on CPU groups. All ranks; the same text on each.
struct StageCheck {
  bool same = false;
  std::string text;
};
StageCheck check_stages(const std::shared_ptr<comm::Group>& group);

// The same over two threads of this process.
StageCheck check_stages_in_threads();

}  // namespace poise::cli
