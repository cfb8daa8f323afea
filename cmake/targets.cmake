# What the folders' CMakeLists.txt share.
include(GNUInstallDirs)

if(REFT_INSTALL_IN_PLACE)
  set(REFT_PACKAGE_DIR ${CMAKE_SOURCE_DIR}/python/reft)
else()
  set(REFT_PACKAGE_DIR reft)
endif()

# Sources of the calling folder and below it; a new file is picked up by the next build.
function(reft_sources variable)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# One folder as position-independent objects (for libreft.so) and as a static library (for the agent and the tests).
function(reft_folder_library name)
  reft_sources(sources)
  if(NOT sources)
    set(sources ${CMAKE_SOURCE_DIR}/cmake/empty.cc)
  endif()
  add_library(${name}_objects OBJECT ${sources})
  target_link_libraries(${name}_objects PUBLIC reft_intercept reft_third_party reft_uring)
  add_library(${name} STATIC $<TARGET_OBJECTS:${name}_objects>)
  target_link_libraries(${name} PUBLIC reft_intercept reft_third_party reft_uring)
endfunction()

# Only reft's own names leave a shared library: what is header-only stays inside.
function(reft_hide_third_party target)
  target_link_options(${target} PRIVATE -Wl,--version-script=${CMAKE_SOURCE_DIR}/intercept/exports.map)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${CMAKE_SOURCE_DIR}/intercept/exports.map)
endfunction()
