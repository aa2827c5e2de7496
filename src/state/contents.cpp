// Names of pieces.
#include "state/contents.h"

#include <charconv>

#include "poise/error.h"

namespace poise::state {

std::string moment(std::int64_t number) { return join(kMoment, '.', number); }

std::string key_of(const Piece& piece) {
  return join(piece.kind, '@', piece.begin, ':', piece.name);
}

PieceKey key_from(const std::string& key, const std::string& file) {
  const auto sign = key.find('@'), colon = key.find(':', sign == std::string::npos ? 0 : sign);
  PieceKey made;
  bool fits = sign != std::string::npos && colon != std::string::npos;
  if (fits) {
    const auto* begin = key.data() + sign + 1;
    const auto* end = key.data() + colon;
    const auto read = std::from_chars(begin, end, made.begin);
    fits = read.ec == std::errc() && read.ptr == end && made.begin >= 0;
  }
  if (!fits) {
    fail("state", file, " holds a tensor named '", key,
         "', which is no piece of a parameter; is it a file of a save?");
  }
  made.kind = key.substr(0, sign);
  made.name = key.substr(colon + 1);
  return made;
}

}  // namespace poise::state
