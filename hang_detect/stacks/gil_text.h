// Who holds the GIL of a process, and whether the main thread waits for it, as lines of a stack
// text (parseStacks() reads them):
//
//   GIL held by 0x00007f33c0d6e6c0
//   GIL held by 0x00007f33c0d6e6c0, awaited by 0x00007f33c7d0b740
//
// The second form: the main thread waits for it, and in a tenth of a second it was never let go,
// although its holder slept in that time or ran. Bytecode would have let go of it; C code need not.
//
// That a thread waits for the GIL is told by what it sleeps on (/proc/<pid>/task/<tid>/syscall).
// Where that cannot be read, only the holder is told.
//
// Threads: re-entrant. Takes up to 150 ms, and that only where the main thread waits for the GIL.
// Errors:  none: what is not known has no line.
#pragma once

#include <string>

#include "hang_detect/stacks/python_memory.h"

namespace reft {

// `now`: what `reader`, of process `pid`, has just read.
std::string gilText(int pid, PythonReader& reader, const PythonThreads& now);

}  // namespace reft
