#include "intercept/base/cupti_api.h"

#include "intercept/base/dynamic_library.h"

namespace reft {

namespace {

CuptiApi load() {
  CuptiApi api;
#ifdef REFT_WITHOUT_CUPTI
  const DynamicLibrary library = DynamicLibrary::absent("built with REFT_WITH_CUPTI=OFF");
#else
  const DynamicLibrary library = DynamicLibrary::open({"libcupti.so.13", "libcupti.so.12", "libcupti.so"});
#endif
#define REFT_CUPTI_FIND(member, symbol, arguments) \
  api.member = reinterpret_cast<decltype(api.member)>(library.find(symbol));
  REFT_CUPTI_FUNCTIONS(REFT_CUPTI_FIND)
#undef REFT_CUPTI_FIND
  if (!library) {
    api.why = library.why();
  } else if (api.getVersion == nullptr || api.getVersion(&api.version) != 0) {
    api.version = 0;
    api.why = "cuptiGetVersion does not answer";
  }
  return api;
}

}  // namespace

const CuptiApi& cuptiApi() {
  static const CuptiApi* api = new CuptiApi(load());
  return *api;
}

}  // namespace reft
