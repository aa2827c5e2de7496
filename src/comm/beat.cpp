// Beats as lines of text.
#include "comm/beat.h"

#include <unistd.h>

#include <sstream>

#include "poise/error.h"

namespace poise::comm {

std::string text_of(const Beat& beat) {
  return join(beat.pulse, ' ', beat.entered, ' ', beat.inside, ' ', beat.left, '\n', beat.place);
}

Beat beat_of(const std::string& text) {
  Beat beat;
  std::istringstream in(text);
  in >> beat.pulse >> beat.entered >> beat.inside >> beat.left;
  in.ignore(1);
  std::getline(in, beat.place, '\0');
  return beat;
}

std::string own_name() {
  char host[256] = "unknown";
  gethostname(host, sizeof(host) - 1);
  return join("host ", host, ", pid ", getpid());
}

}  // namespace poise::comm
