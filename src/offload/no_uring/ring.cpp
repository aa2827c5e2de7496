// What stands in for io_uring where liburing was not there when poise was configured.
#include "offload/block_io.h"

namespace poise::offload {

std::unique_ptr<BlockIo> make_ring(const std::vector<iovec>&, std::string& why_not) {
  why_not = "poise was built without liburing";
  return nullptr;
}

}  // namespace poise::offload
