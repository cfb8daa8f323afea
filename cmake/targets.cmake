# What the folders' CMakeLists.txt share.
include(GNUInstallDirs)

if(REFT_INSTALL_IN_PLACE)
  set(REFT_PACKAGE_DIR ${CMAKE_SOURCE_DIR}/python/reft)
else()
  set(REFT_PACKAGE_DIR reft)
endif()

# Sources below the named rooms of the calling folder, or below the folder; a new file is picked up by the next build.
function(reft_sources variable)
  set(patterns)
  foreach(room ${ARGN})
    list(APPEND patterns ${CMAKE_CURRENT_SOURCE_DIR}/${room}/*.cc)
  endforeach()
  if(NOT patterns)
    set(patterns ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  endif()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${patterns})
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# Sources as position-independent objects (for libreft.so) and as a static library (for the agent and the tests).
function(reft_folder_library name)
  add_library(${name}_objects OBJECT ${ARGN})
  target_link_libraries(${name}_objects PUBLIC reft_intercept reft_third_party)
  add_library(${name} STATIC $<TARGET_OBJECTS:${name}_objects>)
  target_link_libraries(${name} PUBLIC reft_intercept reft_third_party)
endfunction()

# Compiles `size` sources of a target as one: parsing torch's headers, or JSON's, takes longer than most sources.
function(reft_batch target size)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${REFT_BATCH} UNITY_BUILD_BATCH_SIZE ${size})
endfunction()

# Only reft's own names leave a shared library: what is header-only stays inside.
function(reft_hide_third_party target)
  target_link_options(${target} PRIVATE -Wl,--version-script=${CMAKE_SOURCE_DIR}/intercept/exports.map)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${CMAKE_SOURCE_DIR}/intercept/exports.map)
endfunction()
