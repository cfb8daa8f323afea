#include "c10d_backend/call_site.h"

#include <array>

#include "intercept/record/op_log.h"

namespace reft {

namespace call_site_detail {
std::atomic<CallSiteProvider> provider{nullptr};
}

namespace {

// Ids that have a text, by their low bits: open addressing without deletion. When it is full,
// further places have an id and no text.
constexpr size_t kSlots = 8192;
constexpr size_t kProbes = 16;
std::array<std::atomic<uint32_t>, kSlots> known{};

}  // namespace

void setCallSiteProvider(CallSiteProvider provider) noexcept {
  call_site_detail::provider.store(provider, std::memory_order_relaxed);
}

bool callSiteKnown(uint32_t id) noexcept {
  for (size_t probe = 0; probe < kProbes; ++probe) {
    const uint32_t found = known[(id + probe) % kSlots].load(std::memory_order_relaxed);
    if (found == id) {
      return true;
    }
    if (found == 0) {
      return false;
    }
  }
  return true;  // the neighbourhood is full: do not try again
}

void nameCallSite(uint32_t id, std::string_view text) noexcept {
  for (size_t probe = 0; probe < kProbes; ++probe) {
    std::atomic<uint32_t>& slot = known[(id + probe) % kSlots];
    uint32_t found = 0;
    if (slot.compare_exchange_strong(found, id, std::memory_order_relaxed)) {
      processOpLog().nameCallSite(id, text);
      return;
    }
    if (found == id) {
      return;  // another thread was first
    }
  }
}

}  // namespace reft
