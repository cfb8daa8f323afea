#include "intercept/base/nccl_api.h"

#include "intercept/base/dynamic_library.h"

namespace reft {

namespace {

NcclApi load() {
  NcclApi api;
#ifdef REFT_WITHOUT_NCCL
  const DynamicLibrary library = DynamicLibrary::absent("built with REFT_WITH_NCCL=OFF");
#else
  const DynamicLibrary library = DynamicLibrary::open({"libnccl.so.2"});
#endif
#define REFT_NCCL_FIND(member, symbol, result, arguments) \
  api.member = reinterpret_cast<decltype(api.member)>(library.find(symbol));
  REFT_NCCL_FUNCTIONS(REFT_NCCL_FIND)
#undef REFT_NCCL_FIND
  if (!library) {
    api.why = library.why();
  } else if (api.getVersion == nullptr || api.getVersion(&api.version) != 0) {
    api.version = 0;
    api.why = "ncclGetVersion does not answer";
  }
  return api;
}

}  // namespace

const NcclApi& ncclApi() {
  static const NcclApi* api = new NcclApi(load());
  return *api;
}

}  // namespace reft
