// Makes saves: every rank writes its shard, and when all are on the disk rank 0 makes them a save
// in one step. Ranks talk by notes, never by collectives: the background of a save and the training
// have no order between them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "poise/comm.h"
#include "poise/state.h"
#include "poise/stream.h"
#include "state/contents.h"
#include "state/staging.h"

namespace poise::state {

struct SaverSettings {
  std::chrono::milliseconds timeout{1800 * 1000};  // for the other ranks
  std::int64_t staging_bytes = 0;                  // that a save may hold
  bool keeps_staging = false;                      // between saves, made by the rehearsal
  std::string id = {};  // alike on all ranks, and of no other Saver over this group
};

std::string random_word();

class Saver {
 public:
  // `memory`, which staging is taken from, outlives it.
  Saver(std::shared_ptr<comm::Group> group, offload::HostMemory& memory, SaverSettings settings);
  ~Saver();  // finishes a save in flight; its failure is logged
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  enum class Mode { wait, in_background };
  // All ranks, with the same options. Returns the path of the save, which is whole when it returns,
  // in the background after finish(). Throws Error, that of the save before too. In the background
  // pieces that only the engine changes may be read until finish_reading() has returned.
  std::string save(const std::string& directory, const Contents& contents,
                   const SaveOptions& options, Mode mode);
  // A save, written to its end and removed instead of made; waits.
  Rehearsal rehearse(const std::string& directory, const Contents& contents);
  void finish_reading();  // what the save in flight still reads may change from now on
  void finish();          // waits for the save in flight
  void check();           // throws the failure of one that has ended, once

 private:
  struct Job;
  std::shared_ptr<Job> new_job(const std::string& directory, const Contents& contents,
                               const SaveOptions& options, Mode mode);
  void run(const std::shared_ptr<Job>& job, const Contents& contents, const SaveOptions& options);
  void begin(Job& job);
  void write(Job& job, const Contents& contents, const SaveOptions& options);
  void end(Job& job) const;
  std::int64_t commit(const Job& job, const std::vector<std::string>& shards) const;  // bytes
  void say(const Job& job, const std::string& key, const std::string& text) const;
  enum class Interrupts { end_it, are_not_its };  // which only the thread of the caller hears of
  std::string hear(const Job& job, const std::string& key, Interrupts interrupts) const;
  std::string hear_begin(const Job& job) const;

  const std::shared_ptr<comm::Group> group_;
  const SaverSettings settings_;
  Staging staging_;
  std::int64_t saves_ = 0;  // begun so far, alike on all ranks
  std::shared_ptr<Job> job_;
  Event read_;     // all pieces; and what is left to do is on its way to stream_
  Stream stream_;  // to the disk
  Stream
      reader_;  // of pieces; the last member: it ends first, and drives stream_ while read_ lasts
};

}  // namespace poise::state
