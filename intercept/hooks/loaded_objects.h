// Symbols of loaded objects, read from their own tables in memory.
//
// The library that replaces dlsym cannot ask dlsym for the real one. What is here asks nobody: it
// walks the list of loaded objects and reads their hash tables. It allocates nothing, and neither
// errno nor the text of dlerror() changes.
//
// Threads: any; dl_iterate_phdr() holds the loader's lock meanwhile. Errors: nullptr for what is
// not found, and for a symbol whose address only a resolver knows (IFUNC).
#pragma once

#include <cstddef>

namespace reft::hooks {

// In the first object, in the order of loading, after the one that holds this code.
void* nextDefinition(const char* symbol);

// In the object that holds `address`: sets found[i] for each symbols[i] that is not nullptr.
void definitionsBeside(const void* address, const char* const* symbols, void** found, size_t count);

}  // namespace reft::hooks
