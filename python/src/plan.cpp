// Planning: traced models and described ones searched, and tables of published runs predicted.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "poise/cli.h"
#include "poise/error.h"
#include "poise/module_plan.h"
#include "poise/plan.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using plan::Job;
using plan::Link;
using plan::Pass;

std::map<std::string, std::int64_t> by_name(const plan::Accounts& accounts) {
  std::map<std::string, std::int64_t> named;
  for (std::size_t i = 0; i < accounts.size(); ++i) {
    named[memory::name_of(static_cast<memory::Account>(i))] = accounts[i];
  }
  return named;
}

config::Offload place_of(const std::string& name) {
  if (name == "none") return config::Offload::none;
  if (name == "host") return config::Offload::host;
  if (name == "file") return config::Offload::file;
  fail("plan", "unknown place to offload to: \"", name, "\"; use none, host or file");
}

const char* name_of(config::Offload place) {
  return place == config::Offload::host ? "host" : place == config::Offload::file ? "file" : "none";
}

config::DType dtype_of(const std::string& name) {
  if (name == "fp32") return config::DType::fp32;
  if (name == "bf16") return config::DType::bf16;
  if (name == "fp16") return config::DType::fp16;
  fail("plan", "unknown dtype: \"", name, "\"; use fp32, bf16 or fp16");
}

using Bytes = std::vector<std::int64_t>;

Pass pass_of(const Bytes& bytes, double again_flops) {
  POISE_CHECK(bytes.size() == 3 || bytes.size() == 4, bytes.size());
  return {.saved = bytes[0],
          .forward_peak = bytes[1],
          .backward_peak = bytes[2],
          .again_flops = again_flops,
          .sent = bytes.size() == 4 ? static_cast<double>(bytes[3]) : 0};
}

// `kept`, `recomputed`: saved, peak of forward, peak of backward; of what is no block after blocks
// that are kept or recomputed. `away`, empty or the same two
// where what is saved is offloaded: and what leaves.
Link link_of(const std::string& name, int flat, bool block, const Bytes& kept,
             const Bytes& recomputed, double flops, double moved, const std::vector<Bytes>& away) {
  constexpr auto whole = static_cast<std::size_t>(plan::Recompute::whole);
  Link link;
  link.name = name;
  link.flat = flat;
  link.block = block;
  link.passes.fill(pass_of(kept, 0));
  const double again = block ? flops : 0;
  link.passes[whole] = pass_of(recomputed, again);
  if (!away.empty()) {
    POISE_CHECK(away.size() == 2, away.size());
    link.away.fill(pass_of(away[0], 0));
    link.away[whole] = pass_of(away[1], again);
  }
  link.flops = flops;
  link.moved = moved;
  return link;
}

void bind_chain(py::module_& module) {
  py::class_<Link>(module, "PlanLink", "One step of a model's forward: embedding, block or head.")
      .def(py::init(&link_of), py::arg("name"), py::arg("flat"), py::arg("block"), py::arg("kept"),
           py::arg("recomputed"), py::arg("flops"), py::arg("moved"),
           py::arg("away") = std::vector<Bytes>())
      .def_readonly("name", &Link::name)
      .def_readonly("flops", &Link::flops);
  py::class_<plan::Traced>(module, "PlanTraced", "A model's chain at several micro-batches.")
      .def(
          py::init([](const std::vector<
                          std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>>& flats,
                      int rest, std::vector<std::int64_t> micro_batches,
                      std::vector<std::vector<Link>> links) {
            plan::Chain chain;
            for (const auto& [name, elements, frozen, factored] : flats) {
              chain.flats.push_back({name, elements, frozen, factored});
            }
            chain.rest = rest;
            plan::Traced traced;
            traced.micro_batches = std::move(micro_batches);
            for (auto& one : links) {
              chain.links = std::move(one);
              traced.chains.push_back(chain);
            }
            return traced;
          }),
          py::arg("flats"), py::arg("rest"), py::arg("micro_batches"), py::arg("links"));
}

void bind_plans(py::module_& module) {
  py::class_<plan::Plan>(module, "PlanFound", "One way to run an update and what it takes.")
      .def_property_readonly("micro_batch",
                             [](const plan::Plan& p) { return p.choice.micro_batch; })
      .def_property_readonly("accumulation",
                             [](const plan::Plan& p) { return p.choice.accumulation; })
      .def_property_readonly("ranks", [](const plan::Plan& p) { return p.choice.ranks; })
      .def_property_readonly("shard_ranks",
                             [](const plan::Plan& p) { return plan::shard_ranks(p.choice); })
      .def_property_readonly("stage", [](const plan::Plan& p) { return p.choice.stage; })
      .def_property_readonly("keep_gathered",
                             [](const plan::Plan& p) { return p.choice.keep_gathered; })
      .def_property_readonly("recomputed", [](const plan::Plan& p) { return p.choice.recomputed; })
      .def_property_readonly(
          "selective",
          [](const plan::Plan& p) { return p.choice.recompute == plan::Recompute::selective; })
      .def_property_readonly("loss_chunk_tokens",
                             [](const plan::Plan& p) { return p.choice.loss_chunk_tokens; })
      .def_property_readonly("offload",
                             [](const plan::Plan& p) {
                               const auto& o = p.choice.offload;
                               return std::map<std::string, std::string>{
                                   {"optimizer", name_of(o.optimizer)},
                                   {"gradients", name_of(o.gradients)},
                                   {"parameters", name_of(o.parameters)},
                                   {"activations", name_of(o.activations)}};
                             })
      .def_property_readonly("peak_bytes", [](const plan::Plan& p) { return p.memory.highest(); })
      .def_property_readonly("build_bytes", [](const plan::Plan& p) { return p.memory.build; })
      .def_property_readonly("peak_moment",
                             [](const plan::Plan& p) -> std::string {
                               const bool while_built = p.memory.build > p.memory.peak;
                               return while_built ? "building of the engine" : p.memory.moment;
                             })
      .def_property_readonly("held", [](const plan::Plan& p) { return by_name(p.memory.held); })
      .def_property_readonly("at_peak",
                             [](const plan::Plan& p) { return by_name(p.memory.at_peak); })
      .def_property_readonly("seconds", [](const plan::Plan& p) {
        const auto& t = p.time;
        return std::map<std::string, double>{{"update", t.total},
                                             {"forward", t.forward},
                                             {"backward", t.backward},
                                             {"recompute", t.recompute},
                                             {"exposed_collectives", t.exposed},
                                             {"exposed_transfers", t.transfers},
                                             {"optimizer", t.update}};
      });
  py::class_<plan::Lever>(module, "PlanLever", "What else would lower the need.")
      .def_readonly("name", &plan::Lever::name)
      .def_readonly("setting", &plan::Lever::setting)
      .def_readonly("changes_numbers", &plan::Lever::changes_numbers)
      .def_readonly("fits", &plan::Lever::fits)
      .def_readonly("plan", &plan::Lever::plan);
  py::class_<plan::Answer>(module, "PlanAnswer", "What the search found.")
      .def_readonly("budget", &plan::Answer::budget)
      .def_readonly("floor", &plan::Answer::floor)
      .def_readonly("fits", &plan::Answer::fits)
      .def_readonly("best", &plan::Answer::best)
      .def_readonly("front", &plan::Answer::front)
      .def_property_readonly("runner_up",
                             [](const plan::Answer& a) {
                               return a.has_runner_up ? std::optional(a.runner_up) : std::nullopt;
                             })
      .def_readonly("why", &plan::Answer::why)
      .def_readonly("dominated_by", &plan::Answer::dominated_by)
      .def_readonly("candidates", &plan::Answer::candidates);
}

void bind_job(py::module_& module) {
  py::class_<Job>(module, "PlanJob", "What is to be planned.")
      .def(py::init<>())
      .def("describe",
           [](Job& job, const std::string& name) { job.model = plan::known_transformer(name); })
      .def("trace",
           [](Job& job, const std::string& name, const plan::Traced& traced) {
             job.model.name = name;
             job.traced = traced;
           })
      .def(
          "run_on",
          [](Job& job, const std::string& gpus, std::int64_t per_node, std::int64_t nodes,
             double node_link, double network, const std::string& machine) {
            job.machine = cli::machine_of({gpus, nodes, per_node, node_link, network, machine});
          },
          py::arg("gpus"), py::arg("per_node") = 0, py::arg("nodes") = 0, py::arg("node_link") = 0,
          py::arg("network") = 0, py::arg("machine") = "",
          "As `poise plan` reads them; links in GB/s.")
      .def("compute_in",
           [](Job& job, const std::string& dtype, const std::string& parameters) {
             job.precision.dtype = dtype_of(dtype);
             job.precision.parameters = dtype_of(parameters);
           })
      .def(
          "optimize_with",
          [](Job& job, const std::string& type, double momentum, const std::string& moments) {
            job.optimizer.type = type;
            job.optimizer.momentum = momentum;
            job.optimizer.moments = moments;
          },
          py::arg("type"), py::arg("momentum") = 0.0, py::arg("moments") = "fp32")
      .def("may_offload",
           [](Job& job, const std::vector<std::vector<std::string>>& allowed) {
             job.offloads.clear();
             for (const auto& places : allowed) {
               POISE_CHECK(places.size() == 4, places.size());
               config::OffloadPolicy offload;
               offload.optimizer = place_of(places[0]);
               offload.gradients = place_of(places[1]);
               offload.parameters = place_of(places[2]);
               offload.activations = place_of(places[3]);
               job.offloads.push_back(offload);
             }
           })
      .def_property_readonly("ranks", [](const Job& job) { return job.machine.ranks; })
      .def(
          "recompute",
          [](Job& job, const std::vector<bool>& blocks) {
            job.searches_recompute = false;
            job.recompute = plan::Recompute::whole;
            job.recomputed = blocks;
          },
          py::arg("blocks"), "These blocks, instead of a search for the best ones.")
      .def_readwrite("sequence", &Job::sequence)
      .def_readwrite("global_batch", &Job::global_batch)
      .def_readwrite("micro_batch", &Job::micro_batch)
      .def_readwrite("budget", &Job::budget)
      .def(
          "run_on_this_cpu", [](Job& job) { job.cpu = cpu_operators(); },
          "Operators of a CPU take what they take here.")
      .def_property_readonly(
          "for_cpus", [](const Job& job) { return job.machine.device.place == plan::Place::cpu; },
          "Whether its devices are CPUs.")
      .def_readwrite("stages", &Job::stages)
      .def_readwrite("shard_ranks", &Job::shard_ranks);
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("plan_search", &plan::search, py::arg("job"), Release());
  module.def("plan_levers", &plan::levers, py::arg("job"), Release());
  module.def(
      "plan_misfit", &cli::misfit, py::arg("job"), py::arg("answer"), Release(),
      "What to say where nothing fits: the floor, what most of it is, the nearest budget that "
      "works, and what else would help.");
  module.def(
      "plan_what_helps", [](const Job& job) { return cli::what_helps(plan::levers(job)); },
      py::arg("job"), Release(), "The levers that would fit, each with what it would need.");
  module.def("budget_text", &cli::budget_text, py::arg("bytes"),
             "At least so many bytes, as budgets are given: \"1.24MiB\".");
  module.def(
      "plan_moments",
      [](const Job& job, const plan::Plan& found) {
        std::vector<std::pair<std::string, std::map<std::string, std::int64_t>>> all;
        for (const auto& moment :
             plan::moments(plan::chain(job, found.choice), found.choice, plan::widths(job))) {
          all.emplace_back(moment.name, by_name(moment.accounts));
        }
        return all;
      },
      py::arg("job"), py::arg("found"), "Every moment of an update and its bytes by account.");
  module.def(
      "plan_settings",
      [](const plan::Plan& found, const std::vector<std::string>& units) {
        return plan::settings(found.choice, units);
      },
      py::arg("found"), py::arg("units"), "The keys of a run.json that follow a plan, as JSON.");
  module.def(
      "plan_page",
      [](const Job& job, const plan::Answer& answer, const std::vector<plan::Lever>& levers,
         double gpu_hour, double utilisation, const std::vector<std::string>& units) {
        return cli::plan_page(job, answer, levers, {gpu_hour, utilisation}, units);
      },
      py::arg("job"), py::arg("answer"), py::arg("levers"), py::arg("gpu_hour"),
      py::arg("utilisation"), py::arg("units"), "The answer as one HTML page.");
  module.def(
      "plan_cost",
      [](const plan::Plan& found, double tokens, double gpu_hour, double utilisation) {
        const auto paid = plan::cost(found, tokens, {gpu_hour, utilisation});
        return std::pair(paid.month, paid.billion_tokens);
      },
      py::arg("found"), py::arg("tokens"), py::arg("gpu_hour"), py::arg("utilisation"));
}

void bind_runs(py::module_& module) {
  py::class_<plan::RunPrediction>(
      module, "RunPrediction",
      "What a published run of another framework holds and how fast it is, predicted.")
      .def_readonly("id", &plan::RunPrediction::id)
      .def_readonly("predicted", &plan::RunPrediction::predicted,
                    "Whether its row gives enough to predict from.")
      .def_readonly("peak_gib", &plan::RunPrediction::peak_gib,
                    "Of each device, as the run's meter reads it.")
      .def_readonly("tokens_per_second", &plan::RunPrediction::tokens_per_second, "Of each device.")
      .def_readonly("meter_offset_gib", &plan::RunPrediction::meter_offset_gib,
                    "In peak_gib: what the meter counts beside the allocator.")
      .def_readonly("device_constant", &plan::RunPrediction::device_constant,
                    "In tokens_per_second.");
  module.def("predict_runs", &plan::predict_runs, py::arg("table"),
             "Predictions for the rows of a comma-separated table (docs/planner_scores.md).");
}

std::int64_t gpu_reserve(std::int64_t memory) {
  plan::Device gpu;
  gpu.place = plan::Place::gpu;
  gpu.memory = memory;
  return plan::reserve(gpu);
}

py::list known_devices() {
  py::list all;
  for (const auto& device : plan::known_devices()) {
    py::dict entry;
    entry["name"] = device.name;
    entry["memory"] = device.memory;
    entry["half_flops"] = device.half_flops;
    entry["float_flops"] = device.float_flops;
    all.append(entry);
  }
  return all;
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_chain(module);
  bind_plans(module);
  bind_job(module);
  bind_runs(module);
  module.def("known_devices", &known_devices,
             "Name, memory (bytes) and peak FLOP/s, in 16 bits and in fp32, of the devices that "
             "`poise plan` knows.");
  module.def(
      "gpu_reserve", &gpu_reserve, py::arg("memory"),
      "Bytes of a GPU's memory that a plan leaves to its context and libraries, and to blocks "
      "that the allocator cannot join.");
}

}  // namespace poise::python
