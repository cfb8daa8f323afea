// A launch that does nothing, under its own name and under one that has no hook.
extern "C" __attribute__((visibility("default"))) int cuLaunchKernel(void*, unsigned, unsigned,
                                                                     unsigned, unsigned, unsigned,
                                                                     unsigned, unsigned, void*,
                                                                     void**, void**) {
  return 0;
}
extern "C" __attribute__((visibility("default"), alias("cuLaunchKernel"))) int launch_without_hook(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
    void**);
