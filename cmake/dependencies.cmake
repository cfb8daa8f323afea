# Libraries from the distribution. Each that is missing stops the configuration with the package that brings it.
find_package(Threads REQUIRED)

# Sets `variable` to the folder of a header; one that is absent is named together with its Debian package.
function(reft_header variable header package)
  find_path(${variable} ${header})
  if(NOT ${variable})
    message(FATAL_ERROR "${header} not found: install ${package} (tools/dev build does), or set -D${variable}=<folder>")
  endif()
endfunction()

reft_header(REFT_SPDLOG_INCLUDE spdlog/spdlog.h libspdlog-dev)
reft_header(REFT_FMT_INCLUDE fmt/format.h libfmt-dev)
reft_header(REFT_XXHASH_INCLUDE xxhash.h libxxhash-dev)
reft_header(REFT_JSON_INCLUDE nlohmann/json.hpp nlohmann-json3-dev)

# Header-only use: no version of spdlog, fmt or xxhash is imported from, or exported to, the process that loads reft.
add_library(reft_third_party INTERFACE)
target_include_directories(reft_third_party SYSTEM INTERFACE ${REFT_XXHASH_INCLUDE} ${REFT_JSON_INCLUDE})
target_compile_definitions(reft_third_party INTERFACE XXH_INLINE_ALL)
add_library(reft_spdlog INTERFACE)
target_include_directories(reft_spdlog SYSTEM INTERFACE ${REFT_SPDLOG_INCLUDE} ${REFT_FMT_INCLUDE})
target_compile_definitions(reft_spdlog INTERFACE SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)

# SHA-256, out of OpenSSL's archive: four of its objects. A shared libcrypto would have to be that of the machine that runs reft,
# and Python may have loaded another one.
find_path(REFT_OPENSSL_INCLUDE openssl/sha.h)
find_library(REFT_CRYPTO_ARCHIVE libcrypto.a)
find_library(REFT_SSL_ARCHIVE libssl.a)
if(NOT REFT_OPENSSL_INCLUDE OR NOT REFT_CRYPTO_ARCHIVE OR NOT REFT_SSL_ARCHIVE)
  message(FATAL_ERROR "openssl/sha.h, libcrypto.a or libssl.a not found: install libssl-dev (tools/dev build does)")
endif()
add_library(reft_crypto INTERFACE)
target_include_directories(reft_crypto SYSTEM INTERFACE ${REFT_OPENSSL_INCLUDE})
target_link_libraries(reft_crypto INTERFACE ${REFT_CRYPTO_ARCHIVE})
# TLS between agents, for reft-agent alone. The whole of OpenSSL comes along: it is a process of reft's own.
add_library(reft_tls INTERFACE)
target_include_directories(reft_tls SYSTEM INTERFACE ${REFT_OPENSSL_INCLUDE})
target_link_libraries(reft_tls INTERFACE ${REFT_SSL_ARCHIVE} ${REFT_CRYPTO_ARCHIVE} Threads::Threads ${CMAKE_DL_LIBS})

# libunwind, for native frames of other processes. Tests link what is there; reft-unwind has a static copy where there is one, so
# that it starts on machines that have no libunwind.
add_library(reft_unwind INTERFACE)
set(REFT_UNWIND_STATIC "")
if(NOT REFT_WITH_UNWIND STREQUAL "OFF")
  find_path(REFT_UNWIND_INCLUDE libunwind-x86_64.h)
  find_library(REFT_UNWIND_LIBRARY unwind-x86_64)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND REFT_UNWIND_INCLUDE AND REFT_UNWIND_LIBRARY)
    target_link_libraries(reft_unwind INTERFACE ${REFT_UNWIND_LIBRARY})
    find_library(REFT_UNWIND_ARCHIVE libunwind-x86_64.a)
    find_library(REFT_LZMA_ARCHIVE liblzma.a)  # libunwind's symbol names need it
    if(REFT_UNWIND_ARCHIVE AND REFT_LZMA_ARCHIVE AND NOT REFT_SANITIZE)
      set(REFT_UNWIND_STATIC ${REFT_UNWIND_ARCHIVE} ${REFT_LZMA_ARCHIVE})
    endif()
    set(REFT_HAVE_UNWIND ON)
  elseif(REFT_WITH_UNWIND STREQUAL "ON")
    message(FATAL_ERROR "REFT_WITH_UNWIND=ON, but libunwind for x86-64 is not found: install libunwind-dev, or use AUTO")
  endif()
endif()
