// Temporary buffers of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "checked.h"

namespace onnxtrain {

// Source of memory.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* take(std::size_t bytes) const = 0;  // null, or throws, if out of memory
  virtual void give_back(void* data) const = 0;
};

// Memory aligned to a cache line, uninitialized.
class Buffer {
 public:
  // Aligned here rather than by the allocator: glibc before 2.38 does not reuse freed aligned blocks for the next
  // buffer of the same size, and grows. From the heap if `memory` is null.
  explicit Buffer(std::size_t bytes, const Memory* memory = nullptr)
      : data_(taken(checked_sum(bytes, kAlignment), memory), Free{memory}) {
    if (data_ == nullptr) {
      throw std::runtime_error("its " + std::to_string(bytes) +
                               " bytes of scratch memory cannot be allocated: free memory, or use smaller tensors.");
    }
  }

  template <typename T>
  T* as() const {
    const auto address = reinterpret_cast<std::uintptr_t>(data_.get());
    return reinterpret_cast<T*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Free {
    const Memory* memory;
    void operator()(void* data) const { memory == nullptr ? ::operator delete(data) : memory->give_back(data); }
  };
  static void* taken(std::size_t bytes, const Memory* memory) {
    return memory == nullptr ? ::operator new(bytes, std::nothrow) : memory->take(bytes);
  }
  std::unique_ptr<void, Free> data_;
};

// A pool of equal buffers that tasks borrow: as many as run concurrently.
class BufferPool {
 public:
  explicit BufferPool(std::size_t bytes) : bytes_(bytes) {}

  // Calls work(buffer).
  template <typename Work>
  void lend(Work work) {
    std::unique_ptr<Buffer> buffer;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        buffer = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (buffer == nullptr) buffer = std::make_unique<Buffer>(bytes_);
    work(*buffer);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(buffer));
  }

 private:
  std::size_t bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> free_;
};

}  // namespace onnxtrain
