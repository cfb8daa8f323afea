#include "intercept/record/cut.h"

namespace reft {

CutCounter& processCut() {
  static CutCounter counter;
  return counter;
}

}  // namespace reft
