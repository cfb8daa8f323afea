// The caller of a collective: a cheap id per place in the user's code, and the text of each id.
//
// This folder knows no Python: the bindings install a provider that inspects the calling thread.
//
// Threads: all functions from any thread; currentCallSite() takes no lock.
// Errors:  none; an unknown place is 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace reft {

// Returns 0 for an unknown place. Must not block and must not take the GIL.
using CallSiteProvider = uint32_t (*)() noexcept;

void setCallSiteProvider(CallSiteProvider provider) noexcept;

namespace call_site_detail {
extern std::atomic<CallSiteProvider> provider;
}

inline uint32_t currentCallSite() noexcept {
  const CallSiteProvider provide = call_site_detail::provider.load(std::memory_order_relaxed);
  return provide == nullptr ? 0 : provide();
}

// Whether the text of `id` is known; costs a few loads.
bool callSiteKnown(uint32_t id) noexcept;
// Sets the text of an id, as "train.py:88 load_batch", and writes it to the op log of the process.
// The first text stays.
void nameCallSite(uint32_t id, std::string_view text) noexcept;

}  // namespace reft
