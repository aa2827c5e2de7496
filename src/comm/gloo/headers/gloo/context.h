// torch's libraries contain gloo and its packages ship ProcessGroupGloo.hpp, but not the gloo
// headers which that includes. These declare what it names, as much as it takes to make a process
// group and to destroy it. Nothing of gloo is defined or laid out here, and nothing may be made
// from these declarations: objects of these classes exist only behind pointers, inside torch.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
