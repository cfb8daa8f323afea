#include "hang_detect/stacks/elf_symbols.h"

#include <elf.h>

#include <algorithm>
#include <climits>
#include <cstring>

namespace reft {

namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kMaxSegments = 256;
constexpr size_t kMaxSections = 4096;
constexpr uint64_t kMaxSymbols = 1u << 20;
constexpr uint64_t kMaxNames = 64u << 20;
constexpr size_t kChunk = 1024;               // symbols
constexpr uint64_t kMaxFunctions = 8u << 20;  // in a file; only the wanted ones are kept
constexpr size_t kMaxNamesOfOne = 16;
constexpr size_t kMaxName = 4096;

void symbolsOf(const ReadAt& read, const Elf64_Shdr& table, const Elf64_Shdr& names_section,
               const std::vector<std::string_view>& names, ElfSymbols& found) {
  if (table.sh_entsize != sizeof(Elf64_Sym) || names_section.sh_size > kMaxNames ||
      names_section.sh_size == 0) {
    return;
  }
  // Read the last bytes first, so that a size beyond the file's end allocates nothing.
  char last = 0;
  if (!read(names_section.sh_offset + names_section.sh_size - 1, &last, 1)) {
    return;
  }
  std::string text(names_section.sh_size, '\0');
  if (!read(names_section.sh_offset, text.data(), text.size())) {
    return;
  }
  const uint64_t count = std::min(table.sh_size / sizeof(Elf64_Sym), kMaxSymbols);
  std::vector<Elf64_Sym> symbols(kChunk);
  for (uint64_t first = 0; first < count && found.value.size() < names.size(); first += kChunk) {
    const auto some = static_cast<size_t>(std::min<uint64_t>(kChunk, count - first));
    if (!read(table.sh_offset + first * sizeof(Elf64_Sym), symbols.data(),
              some * sizeof(Elf64_Sym))) {
      return;
    }
    for (size_t i = 0; i < some; ++i) {
      if (symbols[i].st_shndx == SHN_UNDEF || symbols[i].st_name >= text.size()) {
        continue;
      }
      const std::string_view name = text.c_str() + symbols[i].st_name;
      if (std::find(names.begin(), names.end(), name) != names.end()) {
        found.value.emplace(name, symbols[i].st_value);
      }
    }
  }
}

// Rank of a name for display; the smallest wins.
int plainness(const char* name, unsigned binding) {
  const std::string_view text = name;
  const auto underscores = static_cast<int>(std::min(text.find_first_not_of('_'), text.size()));
  return underscores * 4 + (binding == STB_GLOBAL ? 0 : binding == STB_WEAK ? 1 : 2);
}

struct Candidate {
  uint64_t begin = 0;
  uint32_t name = 0;
  unsigned binding = 0;
};

// Adds functions of one table for those of `addresses` (sorted) that lack one.
void functionsOf(const ReadAt& read, const Elf64_Shdr& table, const Elf64_Shdr& names_section,
                 const std::vector<uint64_t>& addresses, std::map<uint64_t, ElfFunction>& found) {
  if (table.sh_entsize != sizeof(Elf64_Sym)) {
    return;
  }
  std::map<uint64_t, std::vector<Candidate>> candidates;
  const uint64_t count = std::min(table.sh_size / sizeof(Elf64_Sym), kMaxFunctions);
  std::vector<Elf64_Sym> symbols(kChunk);
  for (uint64_t first = 0; first < count; first += kChunk) {
    const auto some = static_cast<size_t>(std::min<uint64_t>(kChunk, count - first));
    if (!read(table.sh_offset + first * sizeof(Elf64_Sym), symbols.data(),
              some * sizeof(Elf64_Sym))) {
      break;
    }
    for (size_t i = 0; i < some; ++i) {
      const Elf64_Sym& symbol = symbols[i];
      const unsigned type = ELF64_ST_TYPE(symbol.st_info);
      if (symbol.st_shndx == SHN_UNDEF ||
          (type != STT_FUNC && type != STT_GNU_IFUNC && type != STT_NOTYPE) ||
          symbol.st_size > UINT64_MAX - symbol.st_value) {
        continue;
      }
      auto at = std::lower_bound(addresses.begin(), addresses.end(), symbol.st_value);
      for (; at != addresses.end() && *at < symbol.st_value + symbol.st_size; ++at) {
        auto& names = candidates[*at];
        if (names.size() < kMaxNamesOfOne) {
          names.push_back({symbol.st_value, symbol.st_name,
                           static_cast<unsigned>(ELF64_ST_BIND(symbol.st_info))});
        }
      }
    }
  }
  for (const auto& [address, names] : candidates) {
    if (found.count(address) != 0) {
      continue;
    }
    int best = INT_MAX;
    for (const Candidate& candidate : names) {
      char name[kMaxName + 1] = "";
      if (candidate.name >= names_section.sh_size) {
        continue;
      }
      // A read gets all bytes or none, and the table may end earlier.
      const auto bytes = std::min<uint64_t>(kMaxName, names_section.sh_size - candidate.name);
      if (!read(names_section.sh_offset + candidate.name, name, bytes) || name[0] == '\0') {
        continue;
      }
      if (const int score = plainness(name, candidate.binding); score < best) {
        best = score;
        found[address] = {name, candidate.begin};
      }
    }
  }
}

// False if the file is not a 64-bit little-endian ELF file.
bool readHeader(const ReadAt& read, Elf64_Ehdr& header) {
  return read(0, &header, sizeof(header)) && std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
         header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_ident[EI_DATA] == ELFDATA2LSB &&
         (header.e_type == ET_EXEC || header.e_type == ET_DYN) &&
         header.e_phentsize == sizeof(Elf64_Phdr) && header.e_phnum <= kMaxSegments &&
         header.e_shentsize == sizeof(Elf64_Shdr) && header.e_shnum <= kMaxSections;
}

}  // namespace

std::map<uint64_t, ElfFunction> findElfFunctions(const ReadAt& read,
                                                 std::vector<uint64_t> addresses) {
  std::map<uint64_t, ElfFunction> found;
  Elf64_Ehdr header;
  if (!readHeader(read, header)) {
    return found;
  }
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  if (!read(header.e_shoff, sections.data(), sections.size() * sizeof(Elf64_Shdr))) {
    return found;
  }
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  for (const uint32_t kind :
       {SHT_SYMTAB, SHT_DYNSYM}) {  // a file that is not stripped has all symbols in the first
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type == kind && section.sh_link < sections.size() &&
          found.size() < addresses.size()) {
        functionsOf(read, section, sections[section.sh_link], addresses, found);
      }
    }
  }
  return found;
}

std::optional<ElfSymbols> findElfSymbols(const ReadAt& read,
                                         const std::vector<std::string_view>& names) {
  Elf64_Ehdr header;
  if (!readHeader(read, header)) {
    return std::nullopt;
  }
  ElfSymbols found;
  found.moves = header.e_type == ET_DYN;
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  if (!read(header.e_phoff, segments.data(), segments.size() * sizeof(Elf64_Phdr))) {
    return std::nullopt;
  }
  const auto first = std::find_if(segments.begin(), segments.end(), [](const Elf64_Phdr& segment) {
    return segment.p_type == PT_LOAD;
  });
  if (first == segments.end()) {
    return std::nullopt;
  }
  found.first_address = first->p_vaddr & ~(kPage - 1);
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  if (!read(header.e_shoff, sections.data(), sections.size() * sizeof(Elf64_Shdr))) {
    return found;
  }
  for (const uint32_t kind : {SHT_DYNSYM, SHT_SYMTAB}) {
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type == kind && section.sh_link < sections.size() &&
          found.value.size() < names.size()) {
        symbolsOf(read, section, sections[section.sh_link], names, found);
      }
    }
  }
  return found;
}

}  // namespace reft
