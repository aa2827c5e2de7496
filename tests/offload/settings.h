// Settings of the stores under test, and bytes to move.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <string>

#include "offload/file_store.h"
#include "poise/error.h"
#include "poise/offload.h"
#include "support/temp_folder.h"

namespace poise::offload {

inline config::OffloadPolicy policy_in(const std::string& directory,
                                       config::OffloadIo io = config::OffloadIo::automatic) {
  config::OffloadPolicy policy;
  policy.directory = directory;
  policy.io = io;
  policy.queue_depth = 3;
  policy.block_bytes = 8192;
  return policy;
}

inline std::shared_ptr<HostMemory> host_memory() {
  return std::make_shared<HostMemory>(c10::Device(c10::kCPU), 0);
}

inline std::shared_ptr<FileStore> open_store(const config::OffloadPolicy& policy,
                                             ScratchFile::Name name = ScratchFile::Name::none) {
  return std::make_shared<FileStore>(policy, *host_memory(), io_of(policy), name);
}

inline at::Tensor random_floats(std::int64_t numel, std::uint64_t seed) {
  return at::empty({numel}, at::kFloat)
      .normal_(0, 1, at::make_generator<at::CPUGeneratorImpl>(seed));
}

using testing::message_of;
using testing::TempFolder;

}  // namespace poise::offload
