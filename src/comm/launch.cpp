// Reads the environment. The innermost launcher wins: torchrun inside Slurm or mpirun inside Slurm
// leave Slurm's variables as they were.
#include "comm/launch.h"

#include <charconv>

#include "poise/error.h"

namespace poise::comm {
namespace {

struct Names {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr Names kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::string text(const char* name) const {
    const char* value = environment_(name);
    return value ? value : "";
  }

  std::optional<int> number(const char* name) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int parsed = 0;
    const char* end = value.data() + value.size();
    const auto [stopped, error] = std::from_chars(value.data(), end, parsed);
    if (error != std::errc() || stopped != end || parsed < 0) {
      fail("comm", "the environment has ", name, "=\"", value,
           "\", which is no count; set it to 0 ", "or more");
    }
    return parsed;
  }

  int needed(const char* name, const char* beside) const {
    const auto value = number(name);
    if (!value) {
      fail("comm", "the environment has ", beside, " but not ", name,
           "; set both, or neither for one rank");
    }
    return *value;
  }

 private:
  const Environment& environment_;
};

// The shell that runs a batch script is one process, and rank 0 as Slurm has it; srun alone counts
// the tasks of a step. Some of Slurm's versions number the shell's own step.
bool is_slurm_shell(const Reader& read) {
  const auto step = read.text("SLURM_STEP_ID");
  if (step == "batch" || step == "interactive" || step == "4294967291" || step == "4294967290") {
    return true;
  }
  return read.text("SLURM_STEP_NUM_TASKS").empty() && read.number("SLURM_PROCID").value_or(0) == 0;
}

std::string address_of(const Reader& read, const Names& names, int size) {
  std::string address = read.text("MASTER_ADDR");
  if (!address.empty()) return address;
  if (names.rank == std::string("SLURM_PROCID")) {
    address = first_host(read.text("SLURM_STEP_NODELIST"));
    if (address.empty()) address = first_host(read.text("SLURM_JOB_NODELIST"));
  } else if (names.rank != std::string("RANK") && read.number(names.local_size) == size) {
    address = "127.0.0.1";  // all on this machine
  }
  if (address.empty()) {
    fail("comm", "the environment has ", names.rank,
         " but not MASTER_ADDR; set it to the host of rank 0");
  }
  return address;
}

int port_of(const Reader& read, const Names& names) {
  if (const auto port = read.number("MASTER_PORT")) {
    if (*port < 1 || *port > 65535) {
      fail("comm", "the environment has MASTER_PORT=", *port, "; set it to 1 to 65535");
    }
    return *port;
  }
  // The same on all ranks, and another one for each job of a machine.
  if (const auto job = read.number("SLURM_JOB_ID")) return 15000 + *job % 15000;
  fail("comm", "the environment has ", names.rank,
       " but not MASTER_PORT; set it to a free port of rank 0's host");
}

}  // namespace

std::string first_host(const std::string& nodes) {
  std::string host;
  for (std::size_t i = 0; i < nodes.size() && nodes[i] != ','; ++i) {
    if (nodes[i] != '[') {
      host += nodes[i];
      continue;
    }
    const auto end = nodes.find_first_of(",-]", i + 1);
    const auto close = nodes.find(']', i);
    if (end == std::string::npos || close == std::string::npos) break;
    host += nodes.substr(i + 1, end - i - 1);
    i = close;
  }
  return host;
}

std::optional<Launch> launch_of(const Environment& environment) {
  const Reader read(environment);
  for (const Names& names : kLaunchers) {
    const bool rank_set = !read.text(names.rank).empty();
    const bool size_set = !read.text(names.size).empty();
    const bool slurm = names.rank == std::string("SLURM_PROCID");
    if (!rank_set && (!size_set || slurm)) continue;
    if (slurm && is_slurm_shell(read)) continue;
    Launch launch;
    launch.by = names.rank;
    launch.rank = read.needed(names.rank, names.size);
    launch.size = read.needed(names.size, names.rank);
    launch.local_rank = read.number(names.local_rank);
    if (launch.rank >= launch.size) {
      fail("comm", "the environment contradicts itself: ", names.rank, "=", launch.rank, ", ",
           names.size, "=", launch.size, "; ranks go from 0 to the size - 1");
    }
    if (launch.size == 1) return launch;
    launch.address = address_of(read, names, launch.size);
    launch.port = port_of(read, names);
    launch.store_runs = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    launch.attempt = read.number("TORCHELASTIC_RESTART_COUNT").value_or(0);
    return launch;
  }
  return std::nullopt;
}

}  // namespace poise::comm
