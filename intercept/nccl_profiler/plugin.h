// The profiler plugin of NCCL in this library: `ncclProfiler_v4`, `_v5` and `_v6`.
//
// NCCL dlopens the library that NCCL_PROFILER_PLUGIN names and looks for these symbols. The name is
// the path of the library that is already loaded, so NCCL gets the same instance, and its events
// end in a table of this process. Unless this process has armed the plugin, the plugin asks NCCL
// for no events: in a child that inherits the variable, it stays silent.
//
// A harness calls it as NCCL's source does; no real NCCL has run with it so far.
//
// Threads: armNcclProfiler() before NCCL's first communicator; the rest any.
// Errors:  none. The plugin returns success whatever it is given. If a count becomes impossible, it
//          asks for no more events and records nothing more.
#pragma once

#include "intercept/nccl_profiler/progress_table.h"

namespace reft {

enum class NcclArming {
  kArmed,
  kTaken,   // NCCL_PROFILER_PLUGIN names another plugin, which keeps its place
  kNoPath,  // the path of this library is unknown, or longer than NCCL takes
};

// Makes the table and points NCCL_PROFILER_PLUGIN to this library. A second call changes nothing.
// `kernels`: also ask for KernelCh (see listener.h).
NcclArming armNcclProfiler(bool kernels);

// The table of this process; nullptr if the plugin is not armed. It is never destroyed.
const NcclProgressTable* ncclProgressTable() noexcept;

}  // namespace reft
