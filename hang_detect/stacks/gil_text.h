// The thread that holds the GIL of a process, and which threads wait for it, as lines of a stack
// text for parseStacks():
//
//   GIL held by 0x00007f33c0d6e6c0
//   GIL held by 0x00007f33c0d6e6c0, awaited by 0x00007f33c7d0b740
//
// The second form, one line for each waiter: a thread waits for the GIL, and the holder did not
// release it in a tenth of a second, asleep or running. Bytecode would have released it; C code
// need not.
//
// The address on which a thread sleeps (/proc/<pid>/task/<tid>/syscall) shows that it waits for the
// GIL. Where that file cannot be read, only the holder is known.
//
// Threads: re-entrant. Takes up to 150 ms if a thread waits for the GIL, and 20 ms for each that
// runs.
// Errors:  none: an unknown holder has no line.
#pragma once

#include <string>

#include "hang_detect/stacks/python_memory.h"

namespace reft {

// `now`: the threads that `reader`, of process `pid`, has just read.
std::string gilText(int pid, PythonReader& reader, const PythonThreads& now);

}  // namespace reft
