#include "hang_detect/rank/nccl_now.h"

#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include <unistd.h>

#include "intercept/base/clock.h"
#include "intercept/base/proc_stat.h"
#include "intercept/nccl_profiler/plugin.h"

namespace reft {

namespace {

// So long without a change is no progress: a transfer of the largest buffer takes less.
constexpr int64_t kQuietNs = 2 * kSecond;

// A thread that spins may sleep for a moment: for a page, or a lock.
constexpr int kProxyLooks = 5;
constexpr auto kBetweenProxyLooks = std::chrono::milliseconds(4);

NcclProxy proxyState(uint32_t thread) {
  if (thread == 0) {
    return NcclProxy::kUnknown;
  }
  for (int look = 0; look < kProxyLooks; ++look) {
    if (look > 0) {
      std::this_thread::sleep_for(kBetweenProxyLooks);
    }
    const auto stat = threadStat(::getpid(), static_cast<int>(thread));
    if (stat && stat->state == 'R') {
      return NcclProxy::kRuns;
    }
  }
  return NcclProxy::kStuck;
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
