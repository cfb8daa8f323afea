#include "python/bindings/moments.h"

#include <ATen/TensorIterator.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "python/rank/live_tensors.h"
#include "snapshot/protect/moments.h"

namespace py = pybind11;

namespace reft {

namespace {

using Tensors = std::vector<at::Tensor>;

// Numbers that one thread advances at a time: with their square and gradient, they fit the cache.
constexpr int64_t kPart = int64_t{1} << 15;

bool isPlain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == c10::kStrided &&
         !at::isTensorSubclassLike(tensor) && tensor.has_storage() && !tensor.is_neg() &&
         tensor.is_non_overlapping_and_dense() && (tensor.numel() == 0 || fitsStorage(tensor));
}

// Whether the numbers of all of them lie in host memory in the same order, without gaps.
bool lieAlike(const Tensors& tensors) {
  if (tensors.empty()) {
    return false;
  }
  const at::Tensor& first = tensors.front();
  if (!isPlain(first) ||
      (first.scalar_type() != at::kFloat && first.scalar_type() != at::kDouble)) {
    return false;
  }
  return std::all_of(tensors.begin() + 1, tensors.end(), [&first](const at::Tensor& tensor) {
    return isPlain(tensor) && tensor.scalar_type() == first.scalar_type() &&
           tensor.sizes() == first.sizes() &&
           (tensor.strides() == first.strides() ||
            (tensor.is_contiguous() && first.is_contiguous()));
  });
}

// The tensors of all parameters: one list for each of them, or none.
struct Lists {
  const Tensors& gradients;
  const Tensors& parameters;
  const Tensors& means;
  const Tensors& squares;
  const Tensors& most;

  void check() const {
    for (const Tensors* const list : {&parameters, &means, &squares, &most}) {
      if (!list->empty() && list->size() != gradients.size()) {
        throw InvalidArgument("tensors", std::to_string(list->size()),
                              "one for each gradient, or none");
      }
    }
    for (size_t k = 0; k < gradients.size(); ++k) {
      Tensors one = {gradients[k]};
      for (const Tensors* const list : {&parameters, &means, &squares, &most}) {
        if (!list->empty()) {
          one.push_back((*list)[k]);
        }
      }
      if (!lieAlike(one)) {
        throw InvalidArgument("tensors", "of parameter " + std::to_string(k),
                              "float or double, in host memory, and all of one layout");
      }
    }
  }

  template <typename T>
  Moments<T> at(size_t k, int64_t from) const {
    Moments<T> found;
    found.gradient = gradients[k].const_data_ptr<T>() + from;
    found.parameter = parameters.empty() ? nullptr : parameters[k].const_data_ptr<T>() + from;
    found.mean = means[k].mutable_data_ptr<T>() + from;
    found.square = squares.empty() ? nullptr : squares[k].mutable_data_ptr<T>() + from;
    found.most = most.empty() ? nullptr : most[k].mutable_data_ptr<T>() + from;
    found.count = static_cast<size_t>(std::min(kPart, gradients[k].numel() - from));
    return found;
  }

  // As an op of torch that writes them: snapshots compare the version counters.
  void bumpVersions() const {
    for (const Tensors* const list : {&means, &squares, &most}) {
      for (const at::Tensor& tensor : *list) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
};

// Calls `advanceOne` with the moments of each part; it returns whether something is left to do for
// them. Returns the parameters of which one did.
template <typename AdvanceOne>
std::vector<size_t> advanceAll(const Lists& lists, const AdvanceOne& advanceOne) {
  struct Part {
    size_t parameter;
    int64_t from;
  };
  std::vector<Part> parts;
  for (size_t k = 0; k < lists.gradients.size(); ++k) {
    for (int64_t from = 0; from < lists.gradients[k].numel(); from += kPart) {
      parts.push_back({k, from});
    }
  }
  if (parts.empty()) {
    return {};
  }
  // An iterator of torch's over one byte for each part shares them among torch's own threads.
  at::Tensor unfinished = at::zeros(static_cast<int64_t>(parts.size()), at::kByte);
  auto* const first = unfinished.mutable_data_ptr<uint8_t>();
  auto iterator = at::TensorIterator::nullary_op(unfinished);
  iterator.for_each(
      [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
        for (int64_t row = 0; row < outer; ++row) {
          const char* const bytes = data[0] + row * strides[1];
          const auto begin = static_cast<size_t>(reinterpret_cast<const uint8_t*>(bytes) - first);
          for (size_t i = begin; i < begin + static_cast<size_t>(inner); ++i) {
            const auto [k, from] = parts[i];
            first[i] = lists.gradients[k].scalar_type() == at::kFloat
                           ? advanceOne(lists.at<float>(k, from))
                           : advanceOne(lists.at<double>(k, from));
          }
        }
      },
      1);
  std::vector<size_t> found;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (first[i] != 0 && (found.empty() || found.back() != parts[i].parameter)) {
      found.push_back(parts[i].parameter);
    }
  }
  return found;
}

std::vector<size_t> advanceAdam(const Tensors& gradients, const Tensors& parameters,
                                const Tensors& means, const Tensors& squares, const Tensors& most,
                                const AdamStep& step) {
  const Lists lists{gradients, parameters, means, squares, most};
  lists.check();
  if (means.size() != gradients.size() || squares.size() != gradients.size() ||
      (step.decay != 0 && parameters.size() != gradients.size())) {
    throw InvalidArgument("tensors", "missing", "those that the step needs");
  }
  std::vector<size_t> incomplete;
  {
    const py::gil_scoped_release without_gil;
    incomplete = advanceAll(lists, [&step](const auto& moments) { return advance(step, moments); });
  }
  lists.bumpVersions();
  return incomplete;
}

void advanceMomentum(const Tensors& gradients, const Tensors& parameters, const Tensors& buffers,
                     const MomentumStep& step) {
  const Tensors none;
  const Lists lists{gradients, parameters, buffers, none, none};
  lists.check();
  if (buffers.size() != gradients.size() ||
      (step.decay != 0 && parameters.size() != gradients.size())) {
    throw InvalidArgument("tensors", "missing", "those that the step needs");
  }
  {
    const py::gil_scoped_release without_gil;
    advanceAll(lists, [&step](const auto& moments) {
      advance(step, moments);
      return false;
    });
  }
  lists.bumpVersions();
}

}  // namespace

void bindMoments(py::module_& module) {
  module.def("lie_alike", &lieAlike, py::arg("tensors"));
  module.def(
      "advance_adam",
      [](const Tensors& gradients, const Tensors& parameters, const Tensors& means,
         const Tensors& squares, const Tensors& most, double mean_weight, double square_factor,
         double square_weight, double decay, bool maximize) {
        return advanceAdam(gradients, parameters, means, squares, most,
                           {mean_weight, square_factor, square_weight, decay, maximize});
      },
      py::arg("gradients"), py::arg("parameters"), py::arg("means"), py::arg("squares"),
      py::arg("most"), py::arg("mean_weight"), py::arg("square_factor"), py::arg("square_weight"),
      py::arg("decay"), py::arg("maximize"));
  module.def(
      "advance_momentum",
      [](const Tensors& gradients, const Tensors& parameters, const Tensors& buffers,
         double momentum, double gradient_weight, double decay, bool maximize) {
        advanceMomentum(gradients, parameters, buffers,
                        {momentum, gradient_weight, decay, maximize});
      },
      py::arg("gradients"), py::arg("parameters"), py::arg("buffers"), py::arg("momentum"),
      py::arg("gradient_weight"), py::arg("decay"), py::arg("maximize"));
}

}  // namespace reft
