// Declarations only; see ../context.h.
#pragma once

namespace gloo::transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace gloo::transport
