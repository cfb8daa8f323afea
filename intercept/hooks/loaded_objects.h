// Symbols of loaded objects, read from their own tables in memory.
//
// The library that replaces dlsym cannot ask dlsym for the real one. What is here walks the list of
// loaded objects and reads their hash tables. It allocates nothing, and neither errno nor the text
// of dlerror() changes.
//
// Threads: any. Errors: nullptr for what is
// not found, and for a symbol whose address only a resolver knows (IFUNC).
#pragma once

#include <cstddef>

namespace reft::hooks {

// Not strcmp: sanitizers replace it, and call dlsym before they know the real one.
bool equal(const char* a, const char* b);

// In the first object, in the order of loading, after the one that holds this code.
void* nextDefinition(const char* symbol);
// The same for a symbol of the C library, at any time: it calls no function of another library. The
// objects up to the C library are never unloaded, so that it takes no lock either.
void* earlyDefinition(const char* symbol);

// In the object that holds `address`: sets found[i] for each symbols[i] that is not nullptr.
void definitionsInObjectOf(const void* address, const char* const* symbols, void** found,
                           size_t count);

}  // namespace reft::hooks
