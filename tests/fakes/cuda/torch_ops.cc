// What kernels compute, for torch on the stand-in: each ATen operator that has a CUDA and a CPU
// kernel gets, for CUDA tensors, a host body that runs the CPU kernel on the device's memory when
// the stream comes to it. Results are those of the CPU, bit for bit.
//
// An operator that writes its arguments (in place, out=, foreach) is enqueued at once. One that
// makes new tensors is enqueued if its shapes can be told without the data (its Meta kernel); else
// the host waits for the stream, as for an operator with data-dependent shapes. Random operators
// stay torch's own, whose kernels do nothing here: they draw no numbers.
//
// Loaded after torch (autoload/). Threads: any. Errors: an operator that fails on the stream ends
// the process, saying which.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <string>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/control.h"
#include "tests/fakes/cuda/device.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

void* streamOf(c10::Device device) {
  reft::fake::machine().use();  // torch's own threads may have no context yet
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStreamNativeHandle(guard.getStream(device));
}

void check(reft::fake::Result result) {
  TORCH_CHECK(result == reft::fake::kSuccess, "fake CUDA: ", reft::fake::textOf(result));
}

// As the launchers of torch's compilers do: a function of the driver by name, and a kernel of a
// name.
void launch(const std::string& name, void* stream, reft::fake::Work work) {
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void*, void**, void**);
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  static const auto function = reinterpret_cast<Launch>(::dlsym(driver, "cuLaunchKernel"));
  static std::mutex mutex;
  static auto* const names = new std::set<std::string>;
  const void* handle = nullptr;
  {
    const std::lock_guard lock(mutex);
    handle = &*names->insert(name).first;
  }
  fake_cuda_add_kernel(handle, name.c_str());
  void* arguments[] = {&work};
  check(function(const_cast<void*>(handle), 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

// The same elements as a CPU tensor, in the memory that the stand-in works in.
at::Tensor hostView(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  // An empty tensor may have no memory.
  void* const at = tensor.numel() == 0
                       ? nullptr
                       : reft::fake::machine().memory().shadow(tensor.const_data_ptr());
  at::Tensor view = at::from_blob(at, tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU).requires_grad(false));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor metaView(const at::Tensor& tensor) {
  return !tensor.defined()
             ? tensor
             : at::empty_strided(tensor.sizes(), tensor.strides(),
                                 tensor.options().device(at::kMeta).requires_grad(false));
}

// Replaces the tensors in an argument.
template <typename Change>
IValue mapped(const IValue& value, Change change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor.has_value() ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <typename Change>
Stack mappedAll(const Stack& arguments, Change change, c10::Device to) {
  Stack result;
  for (const IValue& value : arguments) {
    result.push_back(value.isDevice() && value.toDevice().is_cuda() ? IValue(to)
                                                                    : mapped(value, change));
  }
  return result;
}

c10::Device deviceOf(const Stack& arguments) {
  std::optional<c10::Device> found;
  for (const IValue& value : arguments) {
    mapped(value, [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) {
        found = tensor.device();
      }
      return tensor;
    });
  }
  TORCH_CHECK(found.has_value(), "fake CUDA: no tensor on a device");
  return *found;
}

void runOnHost(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void enqueue(const c10::OperatorHandle& op, c10::Device device, Stack stack,
             std::vector<at::Tensor> results) {
  auto work = [op, stack = std::move(stack), results = std::move(results)]() mutable {
    try {
      runOnHost(op, stack);
      size_t next = 0;
      for (const IValue& value : results.empty() ? Stack() : stack) {
        mapped(value, [&](const at::Tensor& made) {
          if (next < results.size() && results[next].defined() && made.defined()) {
            results[next].copy_(made);
          }
          ++next;
          return made;
        });
      }
    } catch (const std::exception& error) {
      std::cerr << "fake CUDA: " << op.operator_name() << ": " << error.what() << std::endl;
      std::abort();
    }
  };
  launch(op.operator_name().name, streamOf(device), std::move(work));
}

bool writesArguments(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

at::Tensor emptyOn(c10::Device device, const at::Tensor& like) {
  return !like.defined()
             ? like
             : at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

void hostBody(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()),
                        stack->end());
  const c10::Device device = deviceOf(arguments);
  const c10::DeviceGuard guard(device);
  Stack outputs;
  if (writesArguments(schema)) {
    // out= arguments are made as large as they have to be.
    if (schema.returns().size() == 1 &&
        op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      Stack shapes = mappedAll(arguments, metaView, c10::Device(at::kMeta));
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && schema.arguments()[i].is_out() &&
            arguments[i].isTensor() && arguments[i].toTensor().numel() == 0) {
          op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
          arguments[i].toTensor().resize_(shapes.back().toTensor().sizes());
          break;
        }
      }
    }
    for (const c10::Argument& result : schema.returns()) {
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && result.alias_info() != nullptr && alias->isWrite() &&
            alias->beforeSets() == result.alias_info()->beforeSets()) {
          outputs.push_back(arguments[i]);
          break;
        }
      }
    }
    enqueue(op, device, mappedAll(arguments, hostView, c10::Device(at::kCPU)), {});
  } else {
    std::optional<Stack> shapes;
    if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      try {
        const at::AutoDispatchBelowADInplaceOrView guard;
        Stack asked = mappedAll(arguments, metaView, c10::Device(at::kMeta));
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &asked);
        shapes = std::move(asked);
      } catch (const std::exception&) {
        shapes.reset();  // depends on the data
      }
    }
    std::vector<at::Tensor> results;
    if (shapes.has_value()) {
      for (const IValue& value : *shapes) {
        outputs.push_back(
            mapped(value, [&](const at::Tensor& shape) { return emptyOn(device, shape); }));
        mapped(outputs.back(), [&](const at::Tensor& made) {
          results.push_back(hostView(made));
          return made;
        });
      }
      enqueue(op, device, mappedAll(arguments, hostView, c10::Device(at::kCPU)),
              std::move(results));
    } else {
      check(reft::fake::machine().synchronizeStream(streamOf(device)));
      Stack done = mappedAll(arguments, hostView, c10::Device(at::kCPU));
      runOnHost(op, done);
      for (const IValue& value : done) {
        outputs.push_back(mapped(value, [&](const at::Tensor& made) {
          at::Tensor there = emptyOn(device, made);
          if (there.defined()) {
            hostView(there).copy_(made);
          }
          return there;
        }));
      }
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (IValue& value : outputs) {
    stack->push_back(std::move(value));
  }
}

// Between CUDA tensors of one device; everything else is a copy that torch makes of the runtime's.
at::Tensor& copyBetween(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.is_cuda() && from.is_cuda() && self.device() == from.device()) {
    const at::Tensor to = hostView(self);
    const at::Tensor source = hostView(from);
    const c10::DeviceGuard guard(
        self.device());  // the default stream is that of the current device
    launch("aten::copy_", streamOf(self.device()), [to, source] { to.copy_(source); });
    return self;
  }
  return at::native::copy_(self, from, non_blocking);
}

// Memory, views, and what torch asks of the device itself.
const std::set<std::string> kTorchsOwn = {
    "aten::empty",
    "aten::empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::record_stream",
    "aten::_local_scalar_dense",
    "aten::is_set_to",
    "aten::_fused_sdp_choice",
    "aten::copy_",
    "aten::_copy_from_and_resize",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::_resize_output_",
};

bool isView(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool takesTensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

bool getsHostBody(const c10::OperatorHandle& op) {
  return op.operator_name().name.rfind("aten::", 0) == 0 &&
         kTorchsOwn.count(op.operator_name().name) == 0 &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasTag(at::Tag::nondeterministic_seeded) && !isView(op.schema()) &&
         takesTensors(op.schema());
}

// torch warns when a kernel is replaced; that is what is meant here.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

int install() {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static torch::Library* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("copy_", &copyBetween);
  int count = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (op.has_value() && op->hasSchema() && getsHostBody(*op)) {
      const std::string full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library->impl(full.substr(std::string("aten::").size()).c_str(),
                    torch::CppFunction::makeFromBoxedFunction<&hostBody>());
      ++count;
    }
  }
  return count;
}

const int kInstalled = install();

}  // namespace

// How many operators have a host body.
extern "C" __attribute__((visibility("default"))) int fake_cuda_operators() {
  return kInstalled;
}
