// The commands and their arguments. Few and frozen by a test: everything else is the config file.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/doctor.h"
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
};

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

}  // namespace

int run(int argc, const char* const* argv) {
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

}  // namespace poise::cli
