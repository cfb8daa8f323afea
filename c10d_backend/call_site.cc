#include "c10d_backend/call_site.h"

#include <array>
#include <mutex>

namespace reft {

namespace call_site_detail {
std::atomic<CallSiteProvider> provider{nullptr};
}

namespace {

// Ids that have a text, by their low bits: open addressing without deletion. When it is full, further places have an id
// and no text.
constexpr size_t kSlots = 8192;
constexpr size_t kProbes = 16;
std::array<std::atomic<uint32_t>, kSlots> known{};

struct Names {
  std::mutex mutex;
  std::map<uint32_t, std::string> texts;
};

Names& names() {
  static auto* names = new Names;  // never destroyed: ops may run during static destruction
  return *names;
}

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

void nameCallSite(uint32_t id, std::string text) {
  const std::lock_guard<std::mutex> lock(names().mutex);
  names().texts.emplace(id, std::move(text));
  for (size_t probe = 0; probe < kProbes; ++probe) {
    std::atomic<uint32_t>& slot = known[(id + probe) % kSlots];
    const uint32_t found = slot.load(std::memory_order_relaxed);
    if (found == id) {
      return;
    }
    if (found == 0) {
      slot.store(id, std::memory_order_relaxed);
      return;
    }
  }
}

std::map<uint32_t, std::string> callSites() {
  const std::lock_guard<std::mutex> lock(names().mutex);
  return names().texts;
}

}  // namespace reft
