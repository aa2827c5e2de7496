// One save: begin, shards, commit.
//
// [Note: notes of a save] "begin" (rank 0): the temporary folder; "done/<rank>": sizes and digests
// of its files, or why there are none; "outcome" (rank 0). Each begins with the number of the save.
// A note is replaced only after all have read it: outcome n + 1 follows done n + 1, which follows
// outcome n.
#include "state/saver.h"

#include <cstdlib>
#include <exception>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "offload/digest.h"
#include "poise/error.h"
#include "poise/interrupt.h"
#include "poise/log.h"
#include "poise/version.h"
#include "state/directory.h"
#include "state/files.h"
#include "state/rank_writer.h"

namespace poise::state {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kToAppear{10};  // a folder on a network file system
constexpr char kFailed = '!';                  // begins the text of a note that is an error

std::uint64_t digest_of_values(const std::vector<Piece>& pieces) {
  offload::Digest digest;
  for (const auto& piece : pieces) {
    const auto host = piece.values.cpu();
    digest.update(host.const_data_ptr(), host.nbytes());
  }
  return digest.value();
}

// By the caller of a save in the background.
std::int64_t bytes_copied_at_once(const Contents& contents) {
  std::int64_t bytes = 0;
  for (const auto* pieces : {&contents.pieces, &contents.buffers}) {
    for (const auto& piece : *pieces) {
      if (!piece.engine_only) bytes += piece.numel() * piece.element_size();
    }
  }
  return bytes;
}

void remove_unfinished(const std::string& folder) {
  try {
    remove_tree(folder);
  } catch (const Error& error) {  // the next save tries again
    log::warning("what is left of a save stays: ", error.what());
  }
}

std::string message_of(const std::exception_ptr& reason) {
  try {
    std::rethrow_exception(reason);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "it was interrupted";
  }
}

}  // namespace

std::string random_word() {
  std::random_device device;
  return offload::hex(std::uint64_t{device()} << 32 | device());
}

struct Saver::Job {
  std::int64_t number = 0;
  Mode mode = Mode::wait;
  std::string directory, name;
  std::string temporary;  // folder that becomes the save
  std::uint64_t buffers_digest = 0;
  std::int64_t total_limit = 0, keep_every = 0;
  bool best = false;
  bool commits = true;     // else the folder goes when all of it is on the disk
  std::int64_t bytes = 0;  // of all ranks
  Manifest manifest;
  std::optional<Lock> lock;
  std::unique_ptr<RankWriter> shard;
  std::optional<std::string> error;  // this rank's, before the end
  std::optional<std::string> outcome;
  Event done;
  std::string final() const { return in(directory, name); }
};

Saver::Saver(std::shared_ptr<comm::Group> group, offload::HostMemory& memory,
             SaverSettings settings)
    : group_(std::move(group)), settings_(settings), staging_(memory, settings.staging_bytes) {}

Saver::~Saver() {
  try {
    finish();
  } catch (const std::exception& error) {
    log::warning("the last save failed: ", error.what());
  } catch (...) {
    log::warning("the wait for the last save was interrupted");
  }
}

void Saver::say(const Job& job, const std::string& key, const std::string& text) const {
  if (group_->size() > 1)
    group_->leave_note(join("save/", settings_.id, '/', key), join(job.number, ' ', text));
}

std::string Saver::hear(const Job& job, const std::string& key, Interrupts interrupts) const {
  const auto deadline = Clock::now() + settings_.timeout;
  const auto wanted = join(job.number, ' ');
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kInterruptPeriod)) {
    const auto note = group_->note(join("save/", settings_.id, '/', key));
    if (note && note->rfind(wanted, 0) == 0) return note->substr(wanted.size());
    group_->check();
    if (interrupts == Interrupts::end_it) check_interrupt();
    if (Clock::now() > deadline) {
      fail("state", "rank ", group_->rank(), " waited ", settings_.timeout.count() / 1000.0,
           " s for '", key, "' of the save ", job.name, "; look at the output of the other ranks");
    }
    std::this_thread::sleep_for(pause);
  }
}

std::shared_ptr<Saver::Job> Saver::new_job(const std::string& directory, const Contents& contents,
                                           const SaveOptions& options, Mode mode) {
  finish();
  auto job = std::make_shared<Job>();
  job->number = ++saves_;
  job->mode = mode;
  job->directory = directory;
  job->name =
      options.name.empty() ? default_name(contents.manifest.progress.updates) : options.name;
  check_name(job->name);
  job->total_limit = options.total_limit;
  job->keep_every = options.keep_every;
  job->best = options.best;
  job->manifest = contents.manifest;
  job->manifest.written_by = POISE_VERSION;
  job->manifest.ranks = group_->size();
  job->manifest.cursor = options.cursor;
  job->manifest.user = options.user;
  job->buffers_digest = digest_of_values(contents.buffers);
  return job;
}

std::string Saver::save(const std::string& directory, const Contents& contents,
                        const SaveOptions& options, Mode mode) {
  const auto job = new_job(directory, contents, options, mode);
  run(job, contents, options);
  return job->final();
}

Rehearsal Saver::rehearse(const std::string& directory, const Contents& contents) {
  const auto job = new_job(directory, contents, {.name = "rehearsal"}, Mode::wait);
  job->commits = false;
  const auto begin = Clock::now();
  run(job, contents, {});
  const std::chrono::duration<double> taken = Clock::now() - begin;
  if (settings_.keeps_staging) staging_.make(bytes_copied_at_once(contents));
  return {job->bytes, taken.count(), free_bytes(directory)};
}

void Saver::run(const std::shared_ptr<Job>& job, const Contents& contents,
                const SaveOptions& options) {
  begin(*job);
  std::exception_ptr reason;
  try {
    write(*job, contents, options);
  } catch (...) {
    reason = std::current_exception();
    job->error = message_of(reason);
  }
  job_ = job;
  const auto finish_behind = [this, job] {
    try {
      if (!job->error) job->shard->write_rest();
    } catch (const std::exception& error) {
      job->error = error.what();
    }
    job->done = stream_.submit([this, job] { end(*job); });
  };
  if (reason || job->mode == Mode::wait) {
    read_ = {};
    finish_behind();
  } else {
    read_ = reader_.submit(finish_behind);
  }
  if (reason) {  // the others have heard; this rank's own exception keeps its type
    job->done.synchronize();
    job_.reset();
    std::rethrow_exception(reason);
  }
  if (job->mode == Mode::wait) {
    finish();
    if (!settings_.keeps_staging) staging_.free_unused();
  }
}

void Saver::begin(Job& job) {
  if (group_->rank() == 0) {
    try {
      make_folders(job.directory);
      job.lock.emplace(job.directory);
      check_place(job.directory, job.name, job.best);
      clear_left_overs(job.directory);
      job.temporary = in(job.directory, temporary_name(job.name, random_word()));
      make_folder(job.temporary);
    } catch (const std::exception& error) {
      say(job, "begin", kFailed + std::string(error.what()));
      throw;
    }
    say(job, "begin", join(offload::hex(job.buffers_digest), ' ', job.temporary));
    return;
  }
  const auto text = hear_begin(job);
  if (text.front() == kFailed) throw Error(text.substr(1));
  const auto space = text.find(' ');
  if (text.substr(0, space) == offload::hex(job.buffers_digest)) {
    job.buffers_digest = 0;  // as rank 0's
  }
  job.temporary = text.substr(space + 1);
}

// A rank that does not hear it takes no part in the save: rank 0 must not wait for its files.
std::string Saver::hear_begin(const Job& job) const {
  try {
    return hear(job, "begin", Interrupts::end_it);
  } catch (...) {
    try {
      say(job, join("done/", group_->rank()),
          join(kFailed, "[state] rank ", group_->rank(), " takes no part in the save ", job.name,
               ": ", message_of(std::current_exception())));
    } catch (const std::exception&) {
      // A group without its store: the others find out by themselves.
    }
    throw;
  }
}

void Saver::write(Job& job, const Contents& contents, const SaveOptions& options) {
  const auto deadline = Clock::now() + kToAppear;
  while (!is_folder(job.temporary)) {
    if (Clock::now() > deadline) {
      fail("state", "rank ", group_->rank(), " does not see ", job.temporary,
           ", which rank 0 has made; saves need a directory that all ranks share");
    }
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  auto pieces = contents.pieces;
  const bool own_buffers = group_->rank() == 0 || job.buffers_digest != 0;
  if (own_buffers) {
    pieces.insert(pieces.end(), contents.buffers.begin(), contents.buffers.end());
  }
  job.shard = std::make_unique<RankWriter>(
      job.temporary, group_->rank(), staging_, stream_,
      job.mode == Mode::wait ? ShardWriter::Caller::waits : ShardWriter::Caller::goes_on);
  job.shard->write(pieces, options.own);
  if (group_->rank() == 0 && options.extra) options.extra(job.temporary);
}

void Saver::end(Job& job) const {
  std::string mine;
  try {
    if (job.error) job.shard.reset();  // nothing writes into what is removed
    if (job.error) throw Error(*job.error);
    for (const auto& file : job.shard->finish()) mine += join(file.bytes, ' ', file.digest, ' ');
  } catch (const std::exception& error) {
    mine = kFailed + std::string(error.what());
  }
  try {
    std::string outcome;
    if (group_->rank() > 0) {
      say(job, join("done/", group_->rank()), mine);
      outcome = hear(job, "outcome", Interrupts::are_not_its);
    } else {
      std::vector<std::string> shards{mine};
      for (int rank = 1; rank < group_->size(); ++rank) {
        shards.push_back(hear(job, join("done/", rank), Interrupts::are_not_its));
      }
      for (std::size_t rank = 0; rank < shards.size() && outcome.empty(); ++rank) {
        if (shards[rank].front() == kFailed) outcome = shards[rank];
      }
      try {
        if (outcome.empty()) outcome = std::to_string(commit(job, shards));
      } catch (const std::exception& error) {
        outcome = kFailed + std::string(error.what());
      }
      if (outcome.front() == kFailed || !job.commits) remove_unfinished(job.temporary);
      say(job, "outcome", outcome);
    }
    if (outcome.front() == kFailed) {
      job.outcome = outcome.substr(1);
    } else {
      job.bytes = std::stoll(outcome);
    }
  } catch (const std::exception& error) {
    job.outcome = error.what();
  }
  job.lock.reset();
  job.shard.reset();
}

std::int64_t Saver::commit(const Job& job, const std::vector<std::string>& shards) const {
  auto manifest = job.manifest;
  std::uint64_t bytes = 0;
  for (std::size_t rank = 0; rank < shards.size(); ++rank) {
    std::istringstream written(shards[rank]);
    SavedFile file;
    file.rank = static_cast<std::int64_t>(rank);
    for (int part = 0; written >> file.bytes >> file.digest; ++part) {
      file.name = shard_name(static_cast<int>(rank), part);
      manifest.files.push_back(file);
      bytes += file.bytes;
    }
  }
  if (job.commits) {
    commit_folder(job.directory, job.temporary, job.name, std::move(manifest), job.best);
    rotate(job.directory, job.name, job.total_limit, job.keep_every);
  }
  return static_cast<std::int64_t>(bytes);
}

void Saver::finish_reading() { read_.synchronize(); }

void Saver::finish() {
  if (!job_) return;
  finish_reading();
  job_->done.synchronize();
  check();
}

void Saver::check() {
  if (!job_ || !read_.done() || !job_->done.done()) return;
  const auto job = std::exchange(job_, nullptr);
  if (job->outcome) throw Error(*job->outcome);
}

}  // namespace poise::state
