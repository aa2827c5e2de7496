// What the launcher of this process said of it in the environment: torchrun, mpirun (Open MPI, or
// MPICH and its relatives) or Slurm.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace poise::comm {

struct Launch {
  bool operator==(const Launch&) const = default;
  std::string by;  // the variable that says the rank
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  std::string address;  // where rank 0 listens
  int port = 0;
  bool store_runs = false;  // torchrun's agent hosts it already
  int attempt = 0;          // of torchrun, which restarts ranks on the same store
};

using Environment = std::function<const char*(const char* name)>;  // null: not set

// nullopt: started by hand. Throws Error where variables are missing, no numbers, or contradict.
std::optional<Launch> launch_of(const Environment& environment);

// "node07" of "node[07-09,12],gpu3"; "" of "".
std::string first_host(const std::string& nodes);

}  // namespace poise::comm
