// What makes a process a daemon: its directories, its session, the pipe to who started it.
//
// Threads: before any thread is started. Errors: SystemError, Unavailable.
#pragma once

#include <string>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

// Makes <run_dir>, <run_dir>/<job> and <run_dir>/<job>/node-<n> with mode 0700. Throws Unavailable
// if one is a link, belongs to somebody else, or may be entered or replaced by others.
void makeDirectories(const std::string& run_dir, const std::string& job, int node);

// Double fork, own session, working directory /, standard input from nowhere, stderr to `log_path`,
// all other descriptors but stdout closed. The first parent waits until stdout's reader may rely on
// the daemon, then exits with its status: so returns only in the daemon, with the pipe that ready()
// needs.
UniqueFd daemonise(const std::string& log_path);
// Tells the waiting parent the exit status and prints `line` on stdout, which is detached then.
void ready(UniqueFd parent, int status, const std::string& line);

}  // namespace reft::agent
