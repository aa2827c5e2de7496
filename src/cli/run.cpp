// The commands and their arguments. Few and frozen by a test: everything else is the config file.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/doctor.h"
#include "cli/inspect.h"
#include "cli/plan.h"
#include "cli/train.h"
#include "poise/cli.h"
#include "poise/config.h"
#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::cli {
namespace {

constexpr int kFailed = 1;
constexpr int kUsage = 2;

struct Arguments {
  std::string file;
  std::vector<std::string> settings;
  bool json = false;
  bool reference = false;
  std::string print;
  PlanArguments plan;
  InspectArguments inspect;
};

void describe_machine(CLI::App& plan, PlanArguments& arguments) {
  plan.add_option(
      "--gpus", arguments.devices.gpus,
      "count and device, 8 to a node: 8xH100-80GB (a part of the name is enough: 8xH100); a JSON "
      "file that describes one: 8xdevice.json (memory, half_flops, memory_rate, ...); or the GPU "
      "that --calibrate measured: 8xthis");
  const auto count = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  auto* nodes =
      plan.add_option("--nodes", arguments.devices.nodes, "nodes of so many devices each");
  auto* per_node = plan.add_option("--per-node", arguments.devices.per_node, "devices of a node");
  nodes->check(count)->excludes(per_node);
  per_node->check(count);
  plan.add_option("--node-link", arguments.devices.node_link,
                  "GB/s between devices of a node, one way")
      ->check(CLI::PositiveNumber);
  plan.add_option("--network", arguments.devices.network,
                  "GB/s of each device to other nodes, one way")
      ->check(CLI::PositiveNumber);
  plan.add_option("--price", arguments.price, "of a device, by the hour: adds what plans cost")
      ->check(CLI::NonNegativeNumber);
  plan.add_option("--utilisation", arguments.utilisation, "share of the paid hours that train")
      ->check(CLI::Range(1e-6, 1.0));
  plan.add_flag("--calibrate", arguments.calibrate,
                "measure this machine (the CPU for as many threads as torch has, the disk of this "
                "folder, the first GPU) and keep the rates for plans");
  plan.add_option("--machine", arguments.devices.machine,
                  "file of measured rates; default: $POISE_MACHINE, else "
                  "~/.config/poise/machine.json");
}

void describe_plan(CLI::App& app, PlanArguments& arguments) {
  auto* plan = app.add_subcommand(
      "plan",
      "Say what a run will hold and how long it will take; find the fastest plan that fits");
  auto* file = plan->add_option("file", arguments.file, "run.json of the built-in model");
  auto* model = plan->add_option("--model", arguments.model,
                                 "known name (a wrong one lists them), or a JSON file with layers, "
                                 "width, heads, ffn, vocabulary and, where they differ from a "
                                 "Llama's, kv_heads, head_width, mlp, tied, biases, positions");
  const auto size = CLI::Range(std::int64_t{1}, std::int64_t{1} << 31);
  describe_machine(*plan, arguments);
  auto* sequence = plan->add_option("--seq", arguments.sequence, "tokens of a sequence");
  auto* batch = plan->add_option("--global-batch", arguments.global_batch,
                                 "sequences of an update on all ranks together; always kept");
  for (auto* option : {sequence, batch}) option->check(size)->excludes(file);
  plan->add_option("--micro-batch", arguments.micro_batch, "fixed, instead of searched")
      ->check(size);
  plan->add_option(
          "--shard-ranks", arguments.shard_ranks,
          "ranks of a group that shards, replicated by the other groups (those of a node); "
          "fixed, instead of searched")
      ->check(size);
  plan->add_option("--memory", arguments.memory, "budget of each rank, instead of the device's");
  plan->add_option("--precision", arguments.precision,
                   "bf16 (16-bit parameters, fp32 masters), bf16-autocast or fp32; default bf16")
      ->check(CLI::IsMember({"bf16", "bf16-autocast", "fp32"}))
      ->excludes(file);
  plan->add_option("--offload", arguments.offload,
                   "what may lie on the host or in a file is searched too: host or file")
      ->check(CLI::IsMember({"host", "file"}))
      ->excludes(file);
  plan->add_flag("--levers", arguments.levers,
                 "what else would lower the need, and what each lever buys");
  plan->add_option("--html", arguments.html,
                   "a file that gets a page with drawings: memory over an update, time against "
                   "memory, what each lever buys");
  plan->add_flag("--json", arguments.json, "everything as JSON");
  auto* runs = plan->add_option("--runs", arguments.runs,
                                "tables of runs of other frameworks: prints what each is predicted "
                                "to hold and reach, comma-separated");
  for (auto* option : {file, model}) runs->excludes(option);
  model->excludes(file);
  plan->footer(
      "Examples:\n"
      "  poise plan --model llama-3-8b --gpus 8xH100-80GB --seq 8192 --global-batch 512\n"
      "  poise plan run.json --memory 200MiB\n"
      "  poise plan --model gpt2-xl --gpus 4xA100-40GB --nodes 2 --network 12.5 --price 1.8 --seq "
      "1024 --global-batch 64\n"
      "  poise plan --calibrate\n"
      "The exit code is 1 where the plan does not fit.");
}

void describe_inspect(CLI::App& app, InspectArguments& arguments) {
  auto* inspect = app.add_subcommand(
      "inspect", "Show what saves hold and check every byte; compare two; take out the model");
  inspect->add_option("path", arguments.path, "a save, or a directory of saves")->required();
  auto* other = inspect->add_option("other", arguments.other, "a save to compare it with");
  inspect
      ->add_option("--export", arguments.export_file,
                   "a safetensors file that gets the model: its own names, shapes and types")
      ->excludes(other);
  inspect->footer("The exit code is 1 where a save is damaged or two differ.");
}

void describe(CLI::App& app, Arguments& arguments) {
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);

  auto* train = app.add_subcommand("train", "Train the model that a file describes");
  train->add_option("file", arguments.file, "run.json; `poise config --reference` lists its keys")
      ->required();
  train->add_option("--set", arguments.settings, "key=value, instead of the file's; may come again")
      ->expected(1)
      ->allow_extra_args(false)
      ->take_all();
  train->add_flag("--json", arguments.json, "JSON lines instead of text on standard output");

  describe_plan(app, arguments.plan);
  describe_inspect(app, arguments.inspect);

  auto* config = app.add_subcommand("config", "Show settings");
  auto* reference =
      config->add_flag("--reference", arguments.reference, "the page of all settings");
  auto* print =
      config->add_option("--print", arguments.print, "a file with all defaults filled in");
  reference->excludes(print);

  app.add_subcommand(
      "doctor",
      "Show versions, instruction sets and bandwidths; test the stages, also under torchrun");
}

int dispatch(const CLI::App& app, const Arguments& arguments) {
  if (app.got_subcommand("train")) {
    const auto config = Config::from_json_file(arguments.file, arguments.settings);
    return train(config, arguments.json ? Output::json : Output::text);
  }
  if (app.got_subcommand("plan")) {
    const auto& asked = arguments.plan;
    if (asked.file.empty() && asked.model.empty() && asked.runs.empty() && !asked.calibrate) {
      std::cerr << "poise: error: plan needs a file, --model, --runs or --calibrate; run with "
                   "--help for more "
                   "information\n";
      return kUsage;
    }
    return plan(arguments.plan, std::cout);
  }
  if (app.got_subcommand("inspect")) return inspect(arguments.inspect, std::cout);
  if (app.got_subcommand("doctor")) {
    doctor(std::cout);
    return 0;
  }
  if (arguments.reference) {
    std::cout << config::reference();
    return 0;
  }
  if (arguments.print.empty()) {
    std::cerr << "poise: error: config needs --reference or --print FILE\n";
    return kUsage;
  }
  std::cout << Config::from_json_file(arguments.print).to_json();
  return 0;
}

int complain(const std::string& message) {
  std::cout.flush();
  std::cerr << "poise: error: " << message << '\n';
  return kFailed;
}

// Prints the help, the version or the complaint. CLI11 says that a command is missing, but not what
// stood in its place.
int stop(const CLI::App& app, const CLI::ParseError& error) {
  const auto strangers = app.remaining();
  if (app.get_subcommands().empty() && !strangers.empty()) {
    std::cerr << "poise: error: no command or option \"" << strangers.front()
              << "\"; run with --help for more information\n";
    return kUsage;
  }
  return app.exit(error) == 0 ? 0 : kUsage;
}

int run_command(int argc, const char* const* argv) {
  CLI::App app("Trains the model you have on the memory you have.", "poise");
  Arguments arguments;
  describe(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return stop(app, error);
  }
  try {
    return dispatch(app, arguments);
  } catch (const Interrupted& interrupted) {  // before the run itself, which ends by itself
    std::cerr << "poise: ended by signal " << interrupted.signal << '\n';
    return 128 + interrupted.signal;
  } catch (const Bug& bug) {
    return complain(std::string(bug.what()) + " (a bug of poise; please report it)");
  } catch (const c10::Error& error) {
    return complain(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}

// Where a standard stream is closed, the next file that is opened would take its place, and what is
// told would be written into it.
void hold_standard_streams() {
  for (int stream = 0; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) == 0 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != stream) return;  // nothing can be done
  }
}

// Whoever read what is printed wants no more of it (`poise config --reference | head`).
bool reader_has_gone() {
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&out, 1, 0) > 0 && (out.revents & POLLERR) != 0;
}

}  // namespace

int run(int argc, const char* const* argv) {
  hold_standard_streams();
  const int code = run_command(argc, argv);
  std::cout.flush();
  // A page that is cut short must not pass for a whole one. What a run tells, its metrics.jsonl
  // has.
  const bool trains = argc > 1 && std::string(argv[1]) == "train";
  if (code != 0 || std::cout || trains || reader_has_gone()) return code;
  return complain("[cli] cannot write to standard output; is the disk full?");
}

}  // namespace poise::cli
