// The system's libzstd, found when it is first needed: nothing to compile against, and without it Arrow decodes.
#pragma once

#include <dlfcn.h>

#include <cstddef>

namespace recmill {

class Zstd {
 public:
  static const Zstd& get() {
    static const Zstd found;
    return found;
  }
  bool is_there() const { return create_ && free_ && decompress_; }

  // One for each thread; ends with it.
  class Context {
   public:
    Context() : context_(get().is_there() ? get().create_() : nullptr) {}
    ~Context() {
      if (context_) get().free_(context_);
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Whether exactly `size` bytes came out.
    bool decompress(const void* stored, size_t stored_size, void* out, size_t size) {
      return context_ && get().decompress_(context_, out, size, stored, stored_size) == size;
    }

   private:
    void* context_;
  };

 private:
  // Names and types of zstd's stable interface, the same since 1.0. An error is a size no page has.
  Zstd() {
    void* library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    create_ = reinterpret_cast<void* (*)()>(dlsym(library, "ZSTD_createDCtx"));
    free_ = reinterpret_cast<size_t (*)(void*)>(dlsym(library, "ZSTD_freeDCtx"));
    decompress_ = reinterpret_cast<size_t (*)(void*, void*, size_t, const void*, size_t)>(
        dlsym(library, "ZSTD_decompressDCtx"));
  }

  void* (*create_)() = nullptr;
  size_t (*free_)(void*) = nullptr;
  size_t (*decompress_)(void*, void*, size_t, const void*, size_t) = nullptr;
};

}  // namespace recmill
