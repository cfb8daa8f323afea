#include "hang_detect/rank/nccl_now.h"

#include <map>
#include <optional>

#include <unistd.h>

#include "intercept/base/clock.h"
#include "intercept/base/proc_stat.h"
#include "intercept/nccl_profiler/plugin.h"

namespace reft {

namespace {

// So long without a change is no progress: a transfer of the largest buffer takes less.
constexpr int64_t kQuietNs = 2 * kSecond;

NcclProxy proxyState(uint32_t thread) {
  if (thread == 0) {
    return NcclProxy::kUnknown;
  }
  const auto stat = threadStat(::getpid(), static_cast<int>(thread));
  return stat && stat->state == 'R' ? NcclProxy::kRuns : NcclProxy::kStuck;
}

}  // namespace

std::vector<NcclFinding> ncclFindingsNow() {
  try {
    const NcclProgressTable* const table = ncclProgressTable();
    if (table == nullptr) {
      return {};
    }
    const NcclProgress progress = table->snapshot();
    std::map<uint32_t, NcclProxy> proxies;
    for (const NcclComm& comm : progress.comms) {
      proxies[comm.proxy_thread] = proxyState(comm.proxy_thread);
    }
    return diagnoseNccl(progress, SteadyClock::instance().nowNs(), kQuietNs, proxies);
  } catch (...) {  // no memory left
    return {};
  }
}

}  // namespace reft
