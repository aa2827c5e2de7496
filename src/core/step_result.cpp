// Names of a step's outcomes.
#include "poise/core.h"

namespace poise {

const char* name_of(Status status) {
  switch (status) {
    case Status::applied:
      return "applied";
    case Status::overflow:
      return "overflow";
    case Status::nonfinite_loss:
      return "nonfinite_loss";
    case Status::nonfinite_gradient:
      return "nonfinite_gradient";
    case Status::empty:
      return "empty";
  }
  POISE_CHECK(false, "unknown status ", static_cast<int>(status));
  return "";
}

}  // namespace poise
