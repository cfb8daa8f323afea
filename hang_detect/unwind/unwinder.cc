#include "hang_detect/unwind/unwinder.h"

#include <cxxabi.h>
#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>

#include "hang_detect/stacks/elf_symbols.h"

#ifdef REFT_HAVE_UNWIND

#include <libunwind.h>

// Searches a table of call frame information (.eh_frame_hdr) of another process. libunwind exports
// it without a header; perf uses it in the same way.
extern "C" int _Ux86_64_dwarf_search_unwind_table(unw_addr_space_t space, unw_word_t ip,
                                                  unw_dyn_info_t* table, unw_proc_info_t* into,
                                                  int need_unwind_info, void* argument);

// Stub. libunwind calls this function to resume a thread of its own process, which an unwinder of
// other processes never does. The library that defines it also contains an unwinder for C++
// exceptions, which must not replace the compiler's in a static link.
extern "C" __attribute__((weak)) void _Ux86_64_setcontext() {
  std::abort();
}

namespace reft {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxPages = 65536;
constexpr size_t kMaxFrames = 1024;
constexpr size_t kMaxSegments = 64;
constexpr size_t kMaxDemangled = 1024;
constexpr uint8_t kDataRelativeWords =
    0x3b;  // DW_EH_PE_datarel | DW_EH_PE_sdata4: a table that can be searched
constexpr uint8_t kFourBytes = 0x03;     // DW_EH_PE_udata4
constexpr uint8_t kRelativeWord = 0x1b;  // DW_EH_PE_pcrel | DW_EH_PE_sdata4
constexpr const char* kEvalFunction = "_PyEval_EvalFrameDefault";

// A mapped file.
struct Image {
  std::string path;
  uint64_t inode = 0;
  uint64_t begin = 0, end = 0;
  bool known = false;          // the header has been read
  uint64_t bias = 0;           // memory - file
  uint64_t table = 0;          // .eh_frame_hdr; 0 = no searchable table
  uint64_t table_entries = 0;  // 8 bytes each
};

struct RawFrame {
  uint64_t address = 0;    // address of the instruction
  uint64_t procedure = 0;  // start of the function; 0 = unknown
  Image* image = nullptr;
};

struct RawStack {
  std::vector<RawFrame> frames;
  bool complete = false;
  std::string problem;
};

std::string demangled(const std::string& name) {
  if (name.rfind("_Z", 0) != 0) {
    return name;
  }
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 && text != nullptr ? text : name;
  std::free(text);  // __cxa_demangle allocates with malloc
  if (result.size() > kMaxDemangled) {
    result.resize(kMaxDemangled);
    result += "...";
  }
  return result;
}

}  // namespace

bool builtWithUnwinder() {
  return true;
}

class Unwinder::Space {
 public:
  Space(int pid, std::vector<MappedRange> maps, uint64_t eval_function)
      : pid_(pid), maps_(std::move(maps)), eval_function_(eval_function), memory_(pid) {
    for (const MappedRange& range : maps_) {
      if (range.path.empty()) {
        continue;
      }
      if (!images_.empty() && images_.back().path == range.path &&
          images_.back().inode == range.inode && range.offset != 0) {
        images_.back().end = range.end;
      } else {
        Image image;
        image.path = range.path;
        image.inode = range.inode;
        image.begin = range.begin;
        image.end = range.end;
        images_.push_back(std::move(image));
      }
    }
    accessors_.find_proc_info = [](unw_addr_space_t, unw_word_t ip, unw_proc_info_t* info, int need,
                                   void* self) {
      return static_cast<Space*>(self)->findProcedure(ip, info, need);
    };
    // Frees nothing: the information is a few words from a pool that lives as long as the process.
    accessors_.put_unwind_info = [](unw_addr_space_t, unw_proc_info_t*, void*) {};
    accessors_.get_dyn_info_list_addr = [](unw_addr_space_t, unw_word_t*, void*) {
      return -UNW_ENOINFO;
    };
    accessors_.access_mem = [](unw_addr_space_t, unw_word_t address, unw_word_t* value, int write,
                               void* self) {
      return write == 0 && static_cast<Space*>(self)->word(address, *value) ? 0 : -UNW_EINVAL;
    };
    accessors_.access_reg = [](unw_addr_space_t, unw_regnum_t number, unw_word_t* value, int write,
                               void* self) {
      return write == 0 && static_cast<Space*>(self)->registerAt(number, *value) ? 0 : -UNW_EBADREG;
    };
    accessors_.access_fpreg = [](unw_addr_space_t, unw_regnum_t, unw_fpreg_t*, int, void*) {
      return -UNW_EBADREG;
    };
    accessors_.resume = [](unw_addr_space_t, unw_cursor_t*, void*) { return -UNW_EINVAL; };
    accessors_.get_proc_name = [](unw_addr_space_t, unw_word_t, char*, size_t, unw_word_t*, void*) {
      return -UNW_ENOINFO;
    };
    space_ = unw_create_addr_space(&accessors_, 0);
    if (space_ != nullptr) {
      unw_set_caching_policy(space_, UNW_CACHE_GLOBAL);
    }
  }
  ~Space() {
    if (space_ != nullptr) {
      unw_destroy_addr_space(space_);
    }
  }
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  RawStack unwind(const CopiedThread& thread, std::chrono::steady_clock::time_point deadline) {
    RawStack stack;
    thread_ = &thread;
    guessed_ = false;
    unw_cursor_t cursor;
    if (space_ == nullptr || unw_init_remote(&cursor, space_, this) != 0) {
      stack.problem = "libunwind cannot begin";
      return stack;
    }
    bool exact = true;  // `ip` is the instruction itself, not the one after a call
    for (;;) {
      unw_word_t ip = 0;
      if (unw_get_reg(&cursor, UNW_REG_IP, &ip) != 0 || ip == 0) {
        stack.complete = !stack.frames.empty();
        break;
      }
      const uint64_t at = exact ? ip : ip - 1;
      if (!isCode(at) && !stack.frames.empty()) {
        stack.problem = "native frames end where no code is";
        break;
      }
      unw_proc_info_t procedure;
      const bool known = findProcedure(at, &procedure, 0) == 0;
      stack.frames.push_back({at, known ? procedure.start_ip : 0, imageAt(at)});
      if (stack.frames.size() == kMaxFrames) {
        stack.problem = "more than " + std::to_string(kMaxFrames) + " native frames";
        break;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        stack.problem = "there was no time for more native frames";
        break;
      }
      exact = isSignalReturn(ip) || unw_is_signal_frame(&cursor) > 0;
      const int step = unw_step(&cursor);
      if (step == 0) {
        stack.complete = true;
        break;
      }
      if (step < 0) {
        stack.problem = std::string("native frames end: ") + unw_strerror(step);
        break;
      }
    }
    // Without call frame information, libunwind follows frame pointers, which the code need not
    // have.
    if (guessed_) {
      stack.complete = false;
      if (stack.problem.empty()) {
        stack.problem = "some code does not describe its frames: native ones may be missing";
      }
    }
    return stack;
  }

  std::vector<NativeStack> named(const std::vector<RawStack>& stacks) {
    std::map<Image*, std::vector<uint64_t>> wanted;
    for (const RawStack& stack : stacks) {
      for (const RawFrame& frame : stack.frames) {
        if (frame.image != nullptr) {
          wanted[frame.image].push_back(frame.address - frame.image->bias);
        }
      }
    }
    std::map<Image*, std::map<uint64_t, ElfFunction>> names;
    for (auto& [image, addresses] : wanted) {
      names[image] = findElfFunctions(readerOf(*image), std::move(addresses));
    }
    std::vector<NativeStack> result;
    for (const RawStack& stack : stacks) {
      result.push_back({{}, stack.complete, stack.problem});
      for (const RawFrame& raw : stack.frames) {
        NativeFrame frame{"", "", raw.address,
                          eval_function_ != 0 && raw.procedure == eval_function_};
        if (raw.image != nullptr) {
          frame.object = raw.image->path;
          frame.offset = raw.address - raw.image->bias;
          const auto& of_image = names[raw.image];
          if (const auto name = of_image.find(frame.offset); name != of_image.end()) {
            const std::string& plain = name->second.name;
            // Compilers move rarely executed parts of a function into a symbol of their own,
            // "….cold".
            frame.evaluates |=
                plain == kEvalFunction || plain.rfind(std::string(kEvalFunction) + ".", 0) == 0;
            frame.function = demangled(plain);
          }
        }
        result.back().frames.push_back(std::move(frame));
      }
    }
    return result;
  }

 private:
  // `mov $15, %rax; syscall` (rt_sigreturn), to which a handler returns. libunwind does not say so
  // of code that describes its frames, as the C library's does.
  bool isSignalReturn(uint64_t ip) {
    unw_word_t first = 0;
    unw_word_t second = 0;
    return word(ip, first) && first == 0x0f0000000fc0c748 && word(ip + 8, second) &&
           (second & 0xff) == 0x05;
  }

  bool isCode(uint64_t address) const {
    const auto after =
        std::upper_bound(maps_.begin(), maps_.end(), address,
                         [](uint64_t at, const MappedRange& range) { return at < range.begin; });
    return after != maps_.begin() && std::prev(after)->executable &&
           address < std::prev(after)->end;
  }

  Image* imageAt(uint64_t address) {
    const auto after =
        std::upper_bound(images_.begin(), images_.end(), address,
                         [](uint64_t at, const Image& image) { return at < image.begin; });
    if (after == images_.begin() || address >= std::prev(after)->end) {
      return nullptr;
    }
    Image& image = *std::prev(after);
    if (!image.known) {
      image.known = true;
      readHeader(image);
    }
    return &image;
  }

  // Reads the bias and the table of call frame information, from the ELF header at the start of the
  // image in memory.
  void readHeader(Image& image) {
    image.bias = image.begin;
    Elf64_Ehdr header;
    if (!bytes(image.begin, &header, sizeof(header)) ||
        std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr) ||
        header.e_phnum > kMaxSegments) {
      return;
    }
    std::vector<Elf64_Phdr> segments(header.e_phnum);
    if (!bytes(image.begin + header.e_phoff, segments.data(),
               segments.size() * sizeof(Elf64_Phdr))) {
      return;
    }
    const auto of = [&segments](uint32_t type) {
      return std::find_if(segments.begin(), segments.end(),
                          [type](const Elf64_Phdr& s) { return s.p_type == type; });
    };
    const auto first = of(PT_LOAD);
    if (first == segments.end()) {
      return;
    }
    image.bias = image.begin - (first->p_vaddr & ~(kPage - 1));
    const auto table = of(PT_GNU_EH_FRAME);
    struct {
      uint8_t version, frame_pointer, count, table;
      int32_t frame;
      uint32_t entries;
    } head{};
    if (table == segments.end() || !bytes(image.bias + table->p_vaddr, &head, sizeof(head)) ||
        head.version != 1 || head.frame_pointer != kRelativeWord || head.count != kFourBytes ||
        head.table != kDataRelativeWords) {
      return;
    }
    image.table = image.bias + table->p_vaddr;
    image.table_entries = head.entries;
  }

  // Returns a reader of the file on disk, if it is the file in memory. The reader of any other
  // image fails, except for the vDSO, which it reads from memory.
  ReadAt readerOf(const Image& image) {
    std::vector<uint8_t> here(sizeof(Elf64_Ehdr)), there(here.size());
    auto file = std::make_shared<UniqueFd>(image.path[0] == '/' ? openMapped(pid_, image.path)
                                                                : UniqueFd());
    const auto read = [file](uint64_t offset, void* into, size_t count) {
      return *file && offset <= INT64_MAX &&
             ::pread(file->get(), into, count, static_cast<off_t>(offset)) ==
                 static_cast<ssize_t>(count);
    };
    // The header has the offset of the section table, so another build is very likely to differ.
    if (!bytes(image.begin, here.data(), here.size()) || !read(0, there.data(), there.size()) ||
        here != there) {
      // The vDSO has no file; its symbols are in memory.
      return [this, begin = image.begin, size = image.end - image.begin,
              vdso = image.path == "[vdso]"](uint64_t offset, void* into, size_t count) {
        return vdso && offset <= size && count <= size - offset &&
               bytes(begin + offset, into, count);
      };
    }
    return read;
  }

  int findProcedure(unw_word_t ip, unw_proc_info_t* info, int need) {
    const Image* image = imageAt(ip);
    int problem = -UNW_ENOINFO;
    if (image != nullptr && image->table != 0) {
      unw_dyn_info_t table{};
      table.format = UNW_INFO_FORMAT_REMOTE_TABLE;
      table.start_ip = image->begin;
      table.end_ip = image->end;
      table.u.rti.segbase = image->table;
      table.u.rti.table_data = image->table + 12;
      table.u.rti.table_len = image->table_entries * 8 / sizeof(unw_word_t);
      problem = _Ux86_64_dwarf_search_unwind_table(space_, ip, &table, info, need, this);
    }
    guessed_ |= problem != 0;
    return problem;
  }

  bool registerAt(unw_regnum_t number, unw_word_t& value) const {
    const user_regs_struct& now = thread_->registers;
    switch (number) {
      case UNW_X86_64_RAX: value = now.rax; return true;
      case UNW_X86_64_RDX: value = now.rdx; return true;
      case UNW_X86_64_RCX: value = now.rcx; return true;
      case UNW_X86_64_RBX: value = now.rbx; return true;
      case UNW_X86_64_RSI: value = now.rsi; return true;
      case UNW_X86_64_RDI: value = now.rdi; return true;
      case UNW_X86_64_RBP: value = now.rbp; return true;
      case UNW_X86_64_RSP: value = now.rsp; return true;
      case UNW_X86_64_R8: value = now.r8; return true;
      case UNW_X86_64_R9: value = now.r9; return true;
      case UNW_X86_64_R10: value = now.r10; return true;
      case UNW_X86_64_R11: value = now.r11; return true;
      case UNW_X86_64_R12: value = now.r12; return true;
      case UNW_X86_64_R13: value = now.r13; return true;
      case UNW_X86_64_R14: value = now.r14; return true;
      case UNW_X86_64_R15: value = now.r15; return true;
      case UNW_X86_64_RIP: value = now.rip; return true;
      default: return false;
    }
  }

  // Reads a word of the copied stack, as it was when the thread was held. Other words come from
  // memory.
  bool word(uint64_t address, unw_word_t& value) {
    const auto& stack = thread_->stack;
    if (address >= thread_->stack_begin && stack.size() >= sizeof(value) &&
        address - thread_->stack_begin <= stack.size() - sizeof(value)) {
      std::memcpy(&value, stack.data() + (address - thread_->stack_begin), sizeof(value));
      return true;
    }
    return bytes(address, &value, sizeof(value));
  }

  // Caches pages: code and its call frame information do not change, and other threads' stacks are
  // not read.
  bool bytes(uint64_t address, void* into, size_t count) {
    auto* to = static_cast<uint8_t*>(into);
    while (count > 0) {
      const std::vector<uint8_t>* page = pageAt(address & ~(kPage - 1));
      if (page == nullptr) {
        return false;
      }
      const size_t offset = address & (kPage - 1);
      const size_t part = std::min(count, kPage - offset);
      std::memcpy(to, page->data() + offset, part);
      to += part;
      address += part;
      count -= part;
    }
    return true;
  }

  const std::vector<uint8_t>* pageAt(uint64_t address) {
    if (const auto known = pages_.find(address); known != pages_.end()) {
      return known->second.empty() ? nullptr : &known->second;
    }
    if (pages_.size() >= kMaxPages) {
      return nullptr;
    }
    std::vector<uint8_t>& page = pages_[address];
    page.resize(kPage);
    if (!memory_.read(address, page.data(), kPage)) {
      page.clear();
      return nullptr;
    }
    return &page;
  }

  int pid_;
  std::vector<MappedRange> maps_;
  std::vector<Image> images_;
  uint64_t eval_function_;
  ProcessMemory memory_;
  std::map<uint64_t, std::vector<uint8_t>> pages_;  // empty: not readable
  unw_accessors_t accessors_{};
  unw_addr_space_t space_ = nullptr;
  const CopiedThread* thread_ = nullptr;
  bool guessed_ = false;
};

Unwinder::Unwinder(int pid, std::vector<MappedRange> maps, uint64_t eval_function)
    : space_(std::make_unique<Space>(pid, std::move(maps), eval_function)) {}

std::vector<NativeStack> Unwinder::unwind(const std::vector<CopiedThread>& threads,
                                          std::chrono::steady_clock::time_point deadline) {
  std::vector<RawStack> stacks;
  stacks.reserve(threads.size());
  for (const CopiedThread& thread : threads) {
    stacks.push_back(thread.problem.empty() ? space_->unwind(thread, deadline)
                                            : RawStack{{}, false, thread.problem});
  }
  return space_->named(stacks);
}

}  // namespace reft

#else

namespace reft {

bool builtWithUnwinder() {
  return false;
}

class Unwinder::Space {};

Unwinder::Unwinder(int, std::vector<MappedRange>, uint64_t) {}

std::vector<NativeStack> Unwinder::unwind(const std::vector<CopiedThread>& threads,
                                          std::chrono::steady_clock::time_point) {
  return std::vector<NativeStack>(threads.size());
}

}  // namespace reft

#endif

namespace reft {

Unwinder::~Unwinder() = default;

}  // namespace reft
