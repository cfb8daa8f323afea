// Stacks read from a process that holds anything: the bytes are its memory, repeated over all
// addresses, so that pointers always lead somewhere and lists bite their tails. The first byte
// chooses the version. They are also read as an ELF file.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "hang_detect/stacks/elf_symbols.h"
#include "hang_detect/stacks/python_memory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) {
    return 0;
  }
  const int choice = data[0];
  ++data;
  --size;
  uint64_t reads = 0;
  const reft::ReadMemory memory = [&](uint64_t address, void* into, size_t bytes) {
    if (++reads > 2'000'000 || bytes > (64u << 20)) {
      std::abort();  // it does not end
    }
    for (size_t i = 0; i < bytes; ++i) {
      static_cast<uint8_t*>(into)[i] = data[(address + i) % size];
    }
    return choice < 250 || address % 7 != 0;
  };
  reft::PythonLayout layout = *reft::pythonLayout(choice % 2 == 0 ? 11 : 12);
  if (choice % 3 == 0) {
    std::string problem;
    if (const auto own = reft::readPythonLayout(memory, 1, problem)) {
      layout = *own;
    } else if (problem.empty()) {
      std::abort();
    }
  }
  // The type of whatever lies at 1 is what counts as code: some of it then is.
  uint64_t code_type = 0;
  memory(1 + layout.object_type, &code_type, sizeof(code_type));
  const auto read = reft::readPythonThreads(memory, layout, 1, code_type);
  if (read.threads.size() > 1024) {
    std::abort();
  }
  for (const auto& thread : read.threads) {
    for (const auto& frame : thread.frames) {
      if (frame.line < 0 || frame.file.find('\n') != std::string::npos) {
        std::abort();
      }
    }
  }
  reft::findElfSymbols(
      [&](uint64_t offset, void* into, size_t bytes) {
        if (offset > size || bytes > size - offset) {
          return false;
        }
        std::memcpy(into, data + offset, bytes);
        return true;
      },
      {"_PyRuntime", "Py_Version"});
  return 0;
}
