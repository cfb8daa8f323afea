# Targets torch::base (c10, torch_cpu) and torch::python (torch_python), from what Python says about its torch.
#
# find_package(Torch) is avoided: with a CUDA build of torch it demands the CUDA toolkit, and its definitions make
# headers include gloo's and NCCL's, which the wheel does not carry.
if(REFT_PYTHON)
  set(Python3_EXECUTABLE ${REFT_PYTHON})
elseif(Python_EXECUTABLE AND NOT Python3_EXECUTABLE)
  set(Python3_EXECUTABLE ${Python_EXECUTABLE})
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)

# Asks Python for its torch, without backends that extend it: an older reft may be one.
function(reft_ask_for_torch)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env ${ARGN} TORCH_DEVICE_BACKEND_AUTOLOAD=0 ${Python3_EXECUTABLE} -c
      "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, int(torch.compiled_with_cxx11_abi()), sep=';')"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE error RESULT_VARIABLE result)
  set(reft_torch "${answer}" PARENT_SCOPE)
  set(reft_torch_error "${error}" PARENT_SCOPE)
  set(reft_torch_result "${result}" PARENT_SCOPE)
endfunction()
reft_ask_for_torch()
if(NOT reft_torch_result EQUAL 0)
  # pip builds in an isolated environment, which it makes by PYTHONPATH: look into the one that reft is installed into.
  reft_ask_for_torch(--unset=PYTHONPATH --unset=PYTHONNOUSERSITE)
endif()
if(NOT reft_torch_result EQUAL 0)
  message(FATAL_ERROR "${Python3_EXECUTABLE} cannot import torch, for which reft is compiled. Install torch first; with uv or "
    "`python -m build`, whose isolated builds hide it, add --no-build-isolation. Else set -DREFT_PYTHON to a Python that has torch, "
    "or build without it (-DREFT_WITH_TORCH=OFF)\n${reft_torch_error}")
endif()
list(GET reft_torch 0 REFT_TORCH_DIR)
list(GET reft_torch 1 REFT_TORCH_VERSION)
list(GET reft_torch 2 REFT_TORCH_ABI)
message(STATUS "torch ${REFT_TORCH_VERSION} in ${REFT_TORCH_DIR}")
if(REFT_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${REFT_TORCH_VERSION} is too old: reft needs 2.11 or newer")
endif()

function(reft_torch_library name)
  add_library(torch::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(torch::${name} PROPERTIES
    IMPORTED_LOCATION ${REFT_TORCH_DIR}/lib/lib${name}.so IMPORTED_NO_SONAME OFF)
endfunction()
foreach(name c10 torch_cpu torch_python)
  reft_torch_library(${name})
endforeach()

# torch's headers come first: the pybind11 among them must be the one that is used. They are found through a link in the build
# tree: objects of the same torch in another virtual environment have the same command then, and ccache finds them.
add_library(reft_torch INTERFACE)
file(CREATE_LINK ${REFT_TORCH_DIR}/include ${CMAKE_BINARY_DIR}/torch-include SYMBOLIC)
target_include_directories(reft_torch SYSTEM INTERFACE
  ${CMAKE_BINARY_DIR}/torch-include ${CMAKE_BINARY_DIR}/torch-include/torch/csrc/api/include)
target_compile_definitions(reft_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${REFT_TORCH_ABI} USE_DISTRIBUTED)
target_link_libraries(reft_torch INTERFACE torch::c10 torch::torch_cpu)
add_library(reft_torch_python INTERFACE)
target_link_libraries(reft_torch_python INTERFACE torch::torch_python reft_torch)
