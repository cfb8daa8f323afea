# Compiler and linker flags of every target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Asserts stay: a wrong snapshot is worse than an aborted one.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
add_compile_options(-Wall -Wextra -fvisibility-inlines-hidden -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  add_compile_options(-Wthread-safety)
endif()
if(REFT_WERROR)
  add_compile_options(-Werror -Wno-error=deprecated-declarations)  # the next torch may deprecate what the pinned one has not
endif()
add_link_options(-Wl,--as-needed)

# What makes an error in memory harder to use; tools/check_hardening examines the binaries for it.
# The sanitizers find such errors themselves, and replace the functions that FORTIFY would check.
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)  # links programs with -pie, or with -no-pie, as POSITION_INDEPENDENT_CODE says
if(NOT REFT_SANITIZE)
  add_compile_options(-fstack-protector-strong)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-fcf-protection=full)
  endif()
  # 2 checks against sizes that the compiler knows; 3 would add code to copies of sizes known at run time only.
  add_compile_options($<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE> $<$<NOT:$<CONFIG:Debug>>:-D_FORTIFY_SOURCE=2>)
  add_link_options(-Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)
endif()

set(reft_sanitizers_address address,undefined)
set(reft_sanitizers_undefined undefined)
set(reft_sanitizers_thread thread)
if(REFT_SANITIZE)
  if(NOT DEFINED reft_sanitizers_${REFT_SANITIZE})
    message(FATAL_ERROR "REFT_SANITIZE is '${REFT_SANITIZE}'; allowed: address, undefined, thread")
  endif()
  if(REFT_WITH_TORCH)
    message(FATAL_ERROR "A sanitized build cannot load torch's libraries: add -DREFT_WITH_TORCH=OFF")
  endif()
  add_compile_options(-fsanitize=${reft_sanitizers_${REFT_SANITIZE}} -fno-sanitize-recover=all -O1)
  add_link_options(-fsanitize=${reft_sanitizers_${REFT_SANITIZE}})
  if(REFT_SANITIZE STREQUAL "address" AND CMAKE_CXX_COMPILER_ID MATCHES Clang)
    add_compile_definitions(__SANITIZE_ADDRESS__=1)  # as gcc says it
  endif()
  if(REFT_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-tsan)  # the op log's fences, which gcc's thread sanitizer does not model
  endif()
endif()

if(REFT_CCACHE)
  find_program(REFT_CCACHE_PROGRAM ccache)
  if(REFT_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${REFT_CCACHE_PROGRAM})
  endif()
endif()
