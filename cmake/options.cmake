# Everything that a builder may choose. `cmake -LH build` prints this list.
option(REFT_WITH_TORCH "Build the c10d backend and the Python module (needs a Python that has torch)" ON)
option(REFT_BUILD_TESTS "Build the C++ tests (needs GoogleTest)" OFF)
option(REFT_FUZZ "Build the fuzz targets of tests/fuzz (needs clang)" OFF)
option(REFT_WERROR "Warnings are errors" OFF)
option(REFT_CCACHE "Compile through ccache where there is one" ON)
option(REFT_BATCH "Compile sources in batches: a cold build in half the time; a change compiles its whole batch" ON)
option(REFT_INSTALL_IN_PLACE "Install into python/reft of the source tree (editable installs)" OFF)
set(REFT_PYTHON "" CACHE FILEPATH "Python that has torch; default: the one that CMake finds")
set(REFT_SANITIZE "" CACHE STRING "address (with undefined), undefined, thread, or empty")
set_property(CACHE REFT_SANITIZE PROPERTY STRINGS "" address undefined thread)
# The table of CUDA's functions is filled by dlopen at run time, so nothing of CUDA is needed to build; OFF leaves it empty for good.
option(REFT_WITH_CUDA "Look for a CUDA driver at run time" ON)
# `reft stack --native` needs libunwind: AUTO uses it where it is found, ON stops the configuration where it is not.
set(REFT_WITH_UNWIND AUTO CACHE STRING "AUTO, ON or OFF")
set_property(CACHE REFT_WITH_UNWIND PROPERTY STRINGS AUTO ON OFF)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
