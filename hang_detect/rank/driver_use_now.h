// Reads what this process does in CUDA's driver.
//
// The name of a kernel is the driver's, and a call to it may never return while a kernel hangs. So
// a thread apart asks, is waited for a moment, and is left behind if it does not come back; then no
// name is asked for again.
//
// Threads: one at a time. Errors: none; without the preloaded library, nothing is known.
#pragma once

#include "hang_detect/evidence/driver_use.h"

namespace reft {

DriverUse driverUseNow();

}  // namespace reft
