// Prints the environment table for tools/gen_env_docs: one row a line, fields separated by tabs.
// Needs the header alone.
#include <cstdio>

#include "intercept/base/env.h"

int main() {
#define REFT_ENV_PRINT(member, name, kind, default_text, allowed, sentence) \
  std::printf("%s\t%s\t%s\t%s\t%s\n", name, #kind, default_text, allowed, sentence);
  REFT_ENV_TABLE(REFT_ENV_PRINT)
#undef REFT_ENV_PRINT
}
