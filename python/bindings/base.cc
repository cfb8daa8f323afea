#include "python/bindings/base.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

#include "hang_detect/rank/last_words.h"
#include "intercept/base/clock.h"
#include "intercept/base/env.h"
#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "intercept/base/log.h"
#include "intercept/base/unique_fd.h"
#include "intercept/link/agent_start.h"
#include "intercept/link/wire.h"
#include "intercept/nccl_profiler/plugin.h"
#include "intercept/record/op_log.h"

namespace py = pybind11;

namespace reft {

namespace {

// The name of each class is the same in Python; the base says which builtin it also is.
void bindErrors(py::module_& module) {
  const py::handle base = py::register_exception<Error>(module, "Error");
  const auto both = [&](PyObject* builtin) {
    return py::make_tuple(base, py::reinterpret_borrow<py::object>(builtin));
  };
  py::register_exception<InvalidArgument>(module, "InvalidArgument", both(PyExc_ValueError));
  py::register_exception<Unavailable>(module, "Unavailable", base);
  py::register_exception<Timeout>(module, "Timeout", both(PyExc_TimeoutError));
  py::register_exception<PeerFailure>(module, "PeerFailure", base);
  py::register_exception<Corruption>(module, "Corruption", base);
  py::register_exception<SystemError>(module, "SystemError", both(PyExc_OSError));
}

py::dict environmentDict() {
  const Env env = Env::parse();
  py::dict result;
  for (const EnvRow& row : Env::table()) {
    const std::string member = row.member;
    switch (row.kind) {
      case EnvRow::kFlag: result[row.member] = env.flag(member); break;
      case EnvRow::kInt:
      case EnvRow::kBytes: result[row.member] = env.integer(member); break;
      case EnvRow::kSeconds: result[row.member] = env.seconds(member); break;
      case EnvRow::kChoice:
      case EnvRow::kText: result[row.member] = env.text(member); break;
    }
  }
  return result;
}

FaultPoint faultPointNamed(const std::string& name) {
#define REFT_FAULT_NAMED(point) \
  if (name == #point) {         \
    return FaultPoint::point;   \
  }
  REFT_FAULT_POINTS(REFT_FAULT_NAMED)
#undef REFT_FAULT_NAMED
  throw InvalidArgument("fault point", name, "a name of REFT_FAULT_POINTS");
}

}  // namespace

// Only the exit status tells a clean end from `raise SystemExit(3)`; the interpreter is gone by
// then.
struct Leaving {
  pid_t process = 0;
  UniqueFd connection;
  int64_t since_ns = 0;
  std::string error_file;  // of torchrun, for a failure; "": it is not to be written
};

void sayBye(int status, void* argument) {
  const auto* leaving = static_cast<const Leaving*>(argument);
  if (leaving->process != ::getpid()) {
    return;
  }
  if (status != 0) {
    writeErrorFile(leaving->error_file, "exit code " + std::to_string(status), "",
                   static_cast<int64_t>(::time(nullptr)));
  }
  if (!leaving->connection) {
    return;
  }
  try {
    if (status == 0) {
      wire::sendFrame(leaving->connection.get(), wire::Type::kBye, "{}");
    } else {
      wire::sendFrame(leaving->connection.get(), wire::Type::kLastWords,
                      exitWords(status, leaving->since_ns));
    }
  } catch (const Error&) {
    // The agent is gone, and nothing else waits for this message.
  }
}

void byeAtExit(AgentClient& client, const std::string& error_file) {
  static auto* leaving = new Leaving;  // stays until the process is gone
  if (leaving->process != ::getpid()) {
    leaving->process = ::getpid();
    ::on_exit(&sayBye, leaving);
  }
  leaving->connection = client.connection();
  // Before its peers lose their connections to it.
  leaving->since_ns = SteadyClock::instance().nowNs();
  client.send(wire::Type::kLastWords, leavingWords(leaving->since_ns));
  leaving->error_file = error_file;
}

py::str textOf(std::string_view bytes) {
  PyObject* const text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::str>(text);
}

void bindBase(py::module_& module) {
  bindErrors(module);
  module.def("environment", &environmentDict,
             "Parsed REFT_* values by member name. Raises InvalidArgument.");
  module.def("env_unknown", &Env::unknown,
             "(name, nearest known name or '') of each unknown REFT_* name.");
  module.def(
      "log_debug", [](const std::string& text) { logDebug("python", text); }, py::arg("text"),
      "Writes to the log `reft.python`, whose level REFT_LOG sets.");
  module.def("configure_faults", &configureFaults, py::arg("spec"), py::arg("rank"));
  module.def(
      "fault_point",
      [](const std::string& name, int64_t step) { faultPoint(faultPointNamed(name), step); },
      py::arg("name"), py::arg("step"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "arm_nccl_profiler",
      [](bool kernels) {
        switch (armNcclProfiler(kernels)) {
          case NcclArming::kArmed: return "";
          case NcclArming::kTaken: return "NCCL_PROFILER_PLUGIN names another plugin";
          case NcclArming::kNoPath: break;
        }
        return "the path of libreft_intercept.so is unknown, or longer than NCCL takes";
      },
      py::arg("kernels"));
  module.def(
      "log_step",
      [](uint32_t group, uint32_t step) {
        OpLog::Op op;
        op.kind = OpKind::kStep;
        op.group = group;
        op.seq = step;
        OpLog& log = processOpLog();
        log.markDone(log.begin(op));
        setFaultStep(step);
      },
      py::arg("group"), py::arg("step"), "Marks a step boundary in the op log.");

  py::class_<AgentClient, std::shared_ptr<AgentClient>>(module, "AgentClient")
      .def(py::init([](std::string path, std::string hello, int64_t timeout_ms,
                       std::vector<std::string> agent_argv) {
             AgentClient::Options options;
             options.socket_path = std::move(path);
             options.hello = std::move(hello);
             options.connect_timeout = std::chrono::milliseconds(timeout_ms);
             if (!agent_argv.empty()) {
               options.start_agent = [argv = std::move(agent_argv), timeout_ms] {
                 startAgent(argv, std::chrono::milliseconds(timeout_ms));
               };
             }
             return std::shared_ptr<AgentClient>(new AgentClient(std::move(options)),
                                                 [](AgentClient* client) {
                                                   // The destructor joins a thread; nobody may wait
                                                   // for it with the GIL held.
                                                   if (PyGILState_Check()) {
                                                     const py::gil_scoped_release release;
                                                     delete client;
                                                   } else {
                                                     delete client;
                                                   }
                                                 });
           }),
           py::arg("socket_path"), py::arg("hello"), py::arg("timeout_ms"),
           py::arg("agent_argv") = std::vector<std::string>{},
           py::call_guard<py::gil_scoped_release>())
      .def(
          "send",
          [](AgentClient& self, int type, const std::string& payload) {
            return self.send(static_cast<wire::Type>(type), payload);
          },
          py::arg("type"), py::arg("payload"), py::call_guard<py::gil_scoped_release>(),
          "Sends a message that has no answer; false if the agent is not connected.")
      .def(
          "keep_saying",
          [](AgentClient& self, int type, const std::string& payload) {
            self.keepSaying(static_cast<wire::Type>(type), payload);
          },
          py::arg("type"), py::arg("payload"), py::call_guard<py::gil_scoped_release>(),
          "Sends a message that has no answer, and the newest one of its type again to an agent "
          "that takes the place of this one.")
      .def("bye_at_exit", &byeAtExit, py::arg("error_file") = "",
           "Tells the agent that this rank ended cleanly, if the process then ends with exit "
           "status 0; else it tells the status, and writes torchrun's error file.")
      .def("close", &AgentClient::close, py::call_guard<py::gil_scoped_release>(),
           "Leaves the agent for good, whatever still refers to this object.")
      .def_property_readonly("connected", &AgentClient::connected)
      .def_property_readonly("welcome", &AgentClient::welcome)
      .def(
          "request",
          [](AgentClient& self, int type, const std::string& payload, int answer,
             int64_t timeout_ms) {
            wire::Frame frame;
            {
              const py::gil_scoped_release release;
              frame = self.request(static_cast<wire::Type>(type), payload,
                                   static_cast<wire::Type>(answer),
                                   std::chrono::milliseconds(timeout_ms));
            }
            return py::make_tuple(frame.payload, frame.fd.release());
          },
          py::arg("type"), py::arg("payload"), py::arg("answer"), py::arg("timeout_ms") = 10000,
          "(payload, descriptor or -1) of the answer; the caller closes the descriptor.");
}

}  // namespace reft
