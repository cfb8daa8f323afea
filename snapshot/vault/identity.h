// Whose vault it is.
//
// Threads: a value. Errors: none.
#pragma once

#include <string>

namespace reft {

struct VaultIdentity {
  std::string job;
  int rank = 0;
  int world = 1;
};

}  // namespace reft
