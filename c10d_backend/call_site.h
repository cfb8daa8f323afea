// Who calls a collective: a cheap id per place in the user's code, and the text behind each id.
//
// The floor of the backend knows no Python: the bindings install a provider that looks at the
// calling thread.
//
// Threads: all functions from any thread; currentCallSite() takes no lock.
// Errors:  none; an unknown place is 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace reft {

// Returns 0 if there is no place to name. Must not block and must not take the GIL.
using CallSiteProvider = uint32_t (*)() noexcept;

void setCallSiteProvider(CallSiteProvider provider) noexcept;

namespace call_site_detail {
extern std::atomic<CallSiteProvider> provider;
}

inline uint32_t currentCallSite() noexcept {
  const CallSiteProvider provide = call_site_detail::provider.load(std::memory_order_relaxed);
  return provide == nullptr ? 0 : provide();
}

// True if the text of `id` is known already: a few loads.
bool callSiteKnown(uint32_t id) noexcept;
// "train.py:88 load_batch"; the first text of an id stays. It goes to the op log of the process.
void nameCallSite(uint32_t id, std::string_view text) noexcept;

}  // namespace reft
