#include "intercept/hooks/loaded_objects.h"

#include <elf.h>
#include <link.h>

#include <cstdint>

namespace reft::hooks {

namespace {

using Symbol = ElfW(Sym);

// The tables of one object; hash tables and versions may be absent.
class SymbolTable {
 public:
  SymbolTable(ElfW(Addr) base, const ElfW(Dyn) * dynamic) : base_(base) {
    if (dynamic != nullptr) {
      read(dynamic);
    }
  }
  explicit SymbolTable(const dl_phdr_info& object)
      : SymbolTable(object.dlpi_addr, dynamicOf(object)) {}

  void* find(const char* name) const {
    if (symbols_ == nullptr || strings_ == nullptr) {
      return nullptr;
    }
    return gnu_ != nullptr ? findGnu(name) : old_ != nullptr ? findOld(name) : nullptr;
  }

 private:
  static const ElfW(Dyn) * dynamicOf(const dl_phdr_info& object) {
    for (int i = 0; i < object.dlpi_phnum; ++i) {
      if (object.dlpi_phdr[i].p_type == PT_DYNAMIC) {
        return reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
      }
    }
    return nullptr;
  }
  // glibc relocates the addresses in place; in the vDSO, and on some machines, it does not.
  template <typename T>
  const T* at(ElfW(Addr) address) const {
    return reinterpret_cast<const T*>(address < base_ ? base_ + address : address);
  }
  void read(const ElfW(Dyn) * entry) {
    for (; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB: symbols_ = at<Symbol>(entry->d_un.d_ptr); break;
        case DT_STRTAB: strings_ = at<char>(entry->d_un.d_ptr); break;
        case DT_GNU_HASH: gnu_ = at<uint32_t>(entry->d_un.d_ptr); break;
        case DT_HASH: old_ = at<uint32_t>(entry->d_un.d_ptr); break;
        case DT_VERSYM: versions_ = at<uint16_t>(entry->d_un.d_ptr); break;
        default: break;
      }
    }
  }

  // nullptr unless the symbol is defined under that name, and in its default version.
  void* addressOf(uint32_t index, const char* name) const {
    constexpr uint16_t kHidden = 0x8000;
    const Symbol& symbol = symbols_[index];
    const unsigned type = ELF64_ST_TYPE(symbol.st_info);
    if (symbol.st_shndx == SHN_UNDEF || symbol.st_value == 0 ||
        (type != STT_FUNC && type != STT_OBJECT && type != STT_NOTYPE) ||
        (versions_ != nullptr && (versions_[index] & kHidden) != 0) ||
        !equal(strings_ + symbol.st_name, name)) {
      return nullptr;
    }
    return reinterpret_cast<void*>(base_ + symbol.st_value);
  }

  void* findGnu(const char* name) const {
    uint32_t hash = 5381;
    for (const char* c = name; *c != 0; ++c) {
      hash = hash * 33 + static_cast<unsigned char>(*c);
    }
    const uint32_t buckets = gnu_[0];
    const uint32_t first = gnu_[1];
    const uint32_t words = gnu_[2];
    const uint32_t shift = gnu_[3];
    constexpr unsigned kBits = 8 * sizeof(ElfW(Addr));
    const auto* const bloom = reinterpret_cast<const ElfW(Addr)*>(gnu_ + 4);
    const auto* const bucket = reinterpret_cast<const uint32_t*>(bloom + words);
    const uint32_t* const chain = bucket + buckets;
    if (buckets == 0 || words == 0) {
      return nullptr;
    }
    const ElfW(Addr) word = bloom[(hash / kBits) % words];
    if (((word >> (hash % kBits)) & (word >> ((hash >> shift) % kBits)) & 1) == 0) {
      return nullptr;
    }
    uint32_t index = bucket[hash % buckets];
    if (index < first) {
      return nullptr;
    }
    for (;; ++index) {
      const uint32_t entry = chain[index - first];
      if ((entry | 1) == (hash | 1)) {
        if (void* const found = addressOf(index, name)) {
          return found;
        }
      }
      if ((entry & 1) != 0) {  // the last of its bucket
        return nullptr;
      }
    }
  }

  void* findOld(const char* name) const {
    const uint32_t count = old_[1];
    for (uint32_t index = 1; index < count; ++index) {
      if (void* const found = addressOf(index, name)) {
        return found;
      }
    }
    return nullptr;
  }

  const ElfW(Addr) base_;
  const Symbol* symbols_ = nullptr;
  const char* strings_ = nullptr;
  const uint32_t* gnu_ = nullptr;
  const uint32_t* old_ = nullptr;
  const uint16_t* versions_ = nullptr;
};

bool holds(const dl_phdr_info& object, const void* address) {
  const auto at = reinterpret_cast<ElfW(Addr)>(address);
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& segment = object.dlpi_phdr[i];
    const ElfW(Addr) begin = object.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && at >= begin && at - begin < segment.p_memsz) {
      return true;
    }
  }
  return false;
}

struct Search {
  const void* address = nullptr;
  const char* const* symbols = nullptr;
  void** found = nullptr;
  size_t count = 0;
  bool passed = false;  // the object that holds `address`
};

int visitNext(dl_phdr_info* object, size_t /*bytes*/, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  if (!search.passed) {
    search.passed = holds(*object, search.address);
    return 0;
  }
  *search.found = SymbolTable(*object).find(*search.symbols);
  return *search.found != nullptr ? 1 : 0;
}

int visitBeside(dl_phdr_info* object, size_t /*bytes*/, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  if (!holds(*object, search.address)) {
    return 0;
  }
  const SymbolTable table(*object);
  for (size_t i = 0; i < search.count; ++i) {
    if (search.symbols[i] != nullptr) {
      search.found[i] = table.find(search.symbols[i]);
    }
  }
  return 1;
}

}  // namespace

bool equal(const char* a, const char* b) {
  while (*a == *b && *a != 0) {
    ++a;
    ++b;
  }
  return *a == *b;
}

void* earlyDefinition(const char* symbol) {
  bool passed = false;  // this library
  for (const link_map* object = _r_debug.r_map; object != nullptr; object = object->l_next) {
    if (passed) {
      if (void* const found = SymbolTable(object->l_addr, object->l_ld).find(symbol)) {
        return found;
      }
    }
    passed = passed || object->l_ld == _DYNAMIC;
  }
  return nullptr;
}

void* nextDefinition(const char* symbol) {
  void* found = nullptr;
  Search search{reinterpret_cast<const void*>(&visitNext), &symbol, &found, 1, false};
  ::dl_iterate_phdr(visitNext, &search);
  return found;
}

void definitionsInObjectOf(const void* address, const char* const* symbols, void** found,
                           size_t count) {
  Search search{address, symbols, found, count, false};
  ::dl_iterate_phdr(visitBeside, &search);
}

}  // namespace reft::hooks
