extern "C" __attribute__((visibility("default"))) int next_number() {
  return 2;
}
