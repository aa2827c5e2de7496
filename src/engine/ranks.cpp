// What the ranks of a group tell each other besides gradients and parameters.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <c10/util/Exception.h>

#include <sstream>

#include "engine/impl.h"
#include "poise/interrupt.h"

namespace poise::engine {

std::vector<double> gather_rows(comm::Group& group, const std::vector<double>& row,
                                const char* what) {
  return gather_rows(group, row, what, [](const Event& done) {
    done.wait();
    done.synchronize();  // the host waits here, where an interrupt reaches it
  });
}

std::vector<double> gather_rows(comm::Group& group, const std::vector<double>& row,
                                const char* what, const std::function<void(const Event&)>& wait) {
  if (group.size() == 1) return row;
  const auto columns = static_cast<std::int64_t>(row.size());
  auto mine = at::empty({columns}, at::kDouble);
  std::copy(row.begin(), row.end(), mine.mutable_data_ptr<double>());
  mine = mine.to(group.device());
  const auto rows = at::empty({group.size() * columns}, mine.options());
  wait(group.all_gather(rows, mine, what));
  const auto host = rows.cpu();
  group.check();  // on a GPU the collectives of a failed group end without a result
  const auto* first = host.const_data_ptr<double>();
  return {first, first + host.numel()};
}

std::string message_of(const std::exception_ptr& reason) {
  try {
    std::rethrow_exception(reason);
  } catch (const Interrupted& interrupted) {
    return join("ended by signal ", interrupted.signal);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

namespace {

// One line for each thing that must be the same on all ranks.
std::string description(const ModelView& model, const ParamTable& table, const Config& config) {
  std::ostringstream text;
  for (const auto& entry : table.entries()) {
    text << "parameter '" << entry.name << "' of shape " << at::IntArrayRef(entry.sizes) << ' '
         << entry.dtype << (entry.trainable ? "" : ", frozen") << ", unit "
         << table.units()[static_cast<std::size_t>(entry.unit)] << '\n';
  }
  for (const auto& [name, tensor] : model.buffers) {
    text << "buffer '" << name << "' of shape " << tensor.sizes() << ' ' << tensor.scalar_type()
         << '\n';
  }
  auto same = config;
  same.offload.directory.clear();  // machines may have their disks in different places
  text << same.to_json();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void end_group(const comm::Ranks& ranks, const std::exception_ptr& reason) noexcept {
  for (const auto& group : {ranks.all, ranks.shard, ranks.replica}) {
    if (group && group->size() > 1) group->abort(message_of(reason));
  }
}

void check_ranks_agree(comm::Group& group, const ModelView& model, const ParamTable& table,
                       const Config& config) {
  const auto texts = group.all_gather_text(description(model, table, config), "model and settings");
  const auto first = lines_of(texts.front());
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts.front()) continue;
    const auto other = lines_of(texts[rank]);
    std::size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    const auto line = [i](const std::vector<std::string>& lines) {
      return i < lines.size() ? lines[i] : std::string("nothing more");
    };
    fail("engine", "ranks 0 and ", rank,
         " have different models or settings; the first difference "
         "is on rank 0: ",
         line(first), "; on rank ", rank, ": ", line(other),
         "; build the same model from the same settings on every rank");
  }
}

}  // namespace poise::engine
