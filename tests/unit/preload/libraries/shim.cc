// A library that wraps a driver function under its own name. Tests open copies of the file: each is
// a function of its own. One build of it gives the name the version VERSIONED_1.
#define API extern "C" __attribute__((visibility("default")))

extern "C" {
__attribute__((visibility("default"))) int shim_result = 0;
}
API int cuGraphLaunch(void* /*executable*/, void* /*stream*/) {
  return shim_result;
}
