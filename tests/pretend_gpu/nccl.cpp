// A stand-in for libnccl.so.2: its ranks are processes of one machine with a pretend GPU each, or
// several.
//
// As in NCCL a call queues its work on a stream and returns. The work of a communicator runs in the
// order of its calls and waits for the other ranks; that ends when the communicator is aborted.
// What NCCL has beyond what torch's process group uses is not there.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "peers.h"
#include "pretend_gpu.h"
#include "runtime.h"
#include "transfers.h"

using namespace pretend_gpu;

struct ncclComm {
  Peers peers;
  int device = 0;
  std::uint64_t calls = 0;  // under the lock, as all of these
  std::uint64_t over = 0;   // of the calls
  bool aborted = false;
};

namespace {

// A call between ncclGroupStart and ncclGroupEnd.
struct Grouped {
  ncclComm* comm;
  cudaStream_t stream;
  std::shared_ptr<CollectiveTransfer> collective;  // or a message
  PairTransfer message;
};
thread_local int group_depth = 0;
thread_local std::vector<Grouped> grouped;

ncclResult_t missing(const char* name) {
  std::fprintf(stderr, "pretend GPU: %s is not there\n", name);
  return ncclInvalidUsage;
}

// Under the lock.
ncclResult_t launch_call(ncclComm* comm, cudaStream_t stream, std::function<bool()> transfer) {
  const std::uint64_t turn = comm->calls++;
  const auto attempt = [comm, turn, transfer = std::move(transfer)] {
    if (comm->aborted) return true;
    if (comm->over != turn) return false;
    const Kernel kernel(comm->device);
    if (!transfer()) return false;
    ++comm->over;
    return true;
  };
  return launch_attempts(stream, attempt) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Messages of one group and stream wait for one another's peers together.
ncclResult_t launch_messages(std::vector<Grouped>& calls, std::size_t first) {
  std::vector<PairTransfer> messages;
  ncclComm* comm = calls[first].comm;
  const cudaStream_t stream = calls[first].stream;
  for (std::size_t i = first; i < calls.size(); ++i) {
    Grouped& call = calls[i];
    if (call.collective || call.comm != comm || call.stream != stream) continue;
    messages.push_back(call.message);
    call.comm = nullptr;
  }
  return launch_call(comm, stream, [messages]() mutable {
    bool all = true;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      PairTransfer& message = messages[i];
      // One after the other between the same two.
      const bool turn = std::none_of(messages.begin(), messages.begin() + static_cast<long>(i),
                                     [&](const PairTransfer& earlier) {
                                       return earlier.done < earlier.bytes &&
                                              earlier.peer == message.peer &&
                                              earlier.sends == message.sends;
                                     });
      all = turn && message.attempt() && all;
    }
    return all;
  });
}

ncclResult_t launch_group() {
  const Lock lock;
  std::vector<Grouped> calls = std::exchange(grouped, {});
  for (std::size_t i = 0; i < calls.size(); ++i) {
    Grouped& call = calls[i];
    if (call.comm == nullptr) continue;  // went with others
    const auto result = call.collective
                            ? launch_call(call.comm, call.stream,
                                          [one = call.collective] { return one->attempt(); })
                            : launch_messages(calls, i);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

ncclResult_t add(Grouped call) {
  grouped.push_back(std::move(call));
  return group_depth > 0 ? ncclSuccess : launch_group();
}

bool on_device(const ncclComm* comm, const void* address) {
  if (device_of(address) == comm->device) return true;
  std::fprintf(stderr, "pretend GPU: NCCL was given memory that is not that of device %d\n",
               comm->device);
  return false;
}

ncclResult_t collective(const CollectiveCall& call, ncclComm* comm, cudaStream_t stream) {
  const bool sums = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter ||
                    call.kind == Kind::reduce;
  if (sums ? !has_sums(call.type) || call.operation > ncclAvg : bytes_of(call.type) == 0) {
    return missing("this type or operation");
  }
  if (call.count == 0) return ncclSuccess;
  const int rank = comm->peers.rank();
  const bool brings = call.kind != Kind::broadcast || rank == call.root;
  const bool takes = call.kind != Kind::reduce || rank == call.root;
  if (brings && !on_device(comm, call.from)) return ncclInvalidArgument;
  if (takes && !on_device(comm, call.to)) return ncclInvalidArgument;
  return add({comm, stream, std::make_shared<CollectiveTransfer>(comm->peers, call), {}});
}

ncclResult_t message(bool sends, void* data, std::size_t count, ncclDataType_t type, int peer,
                     ncclComm* comm, cudaStream_t stream) {
  if (count == 0) return ncclSuccess;
  if (!on_device(comm, data)) return ncclInvalidArgument;
  return add({comm, stream, nullptr, {&comm->peers, sends, data, count * bytes_of(type), peer}});
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "an error of the pretend GPU";
  }
}
const char* ncclGetLastError(ncclComm_t) { return "said by the pretend GPU"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made = 0;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "/pretend_gpu-%d-%d", getpid(), made++);
  return ncclSuccess;
}

// Not under the lock: ranks may be threads of one process. Waits for all ranks in any case.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  if (size > kMostRanks) return missing("a communicator of so many ranks");
  if (pretend_gpu::Peers::fails_to_meet()) return ncclInvalidUsage;
  auto* made = new ncclComm;  // stays: queued work names it
  made->device = current_device();
  if (!made->peers.meet(id.internal, rank, size)) return ncclRemoteError;
  *comm = made;
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->peers.size();
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->peers.rank();
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;  // a lost peer on the same machine is not noticed by NCCL either
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;  // as NCCL: torch aborts what it has aborted before
  const Lock lock;
  comm->aborted = true;
  comm->peers.leave();
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const Lock lock;
  while (comm->over < comm->calls && !comm->aborted) let_others();
  return ncclSuccess;
}
// "An intra-node collective call": it waits for the other ranks to make it, too.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  ncclCommFinalize(comm);
  comm->peers.leave();
  const Lock lock;
  while (!comm->aborted && !comm->peers.all_have_left()) let_others();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  return --group_depth == 0 ? launch_group() : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::all_reduce, from, to, count, type, operation}, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::reduce_scatter, from, to, count, type, operation}, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::all_gather, from, to, count, type}, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, std::size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::all_to_all, from, to, count, type}, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::broadcast, from, to, count, type, ncclSum, root}, comm, stream);
}
ncclResult_t ncclBcast(void* data, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
  return collective({Kind::reduce, from, to, count, type, operation, root}, comm, stream);
}
ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return message(true, const_cast<void*>(from), count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return message(false, to, count, type, peer, comm, stream);
}

ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return missing("ncclCommInitAll"); }
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) {
  return missing("ncclCommSplit");
}
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  return missing("ncclCommShrink");
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t,
                                      ncclComm_t) {
  return missing("ncclRedOpCreatePreMulSum");
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void**, std::size_t) { return missing("ncclMemAlloc"); }
ncclResult_t ncclMemFree(void*) { return missing("ncclMemFree"); }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return missing("ncclGroupSimulateEnd"); }
ncclResult_t ncclCommRegister(ncclComm_t, void*, std::size_t, void**) {
  return missing("ncclCommRegister");
}
ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return missing("ncclCommDeregister"); }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, std::size_t, ncclWindow_t*, int) {
  return missing("ncclCommWindowRegister");
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return missing("ncclCommWindowDeregister");
}

}  // extern "C"
