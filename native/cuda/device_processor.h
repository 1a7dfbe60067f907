// Implements device.h on the CPU, blocks and threads one after the other. Included by it only.
#pragma once

#include <memory>

#define ONNXTRAIN_DEVICE
#define ONNXTRAIN_SHARED

namespace onnxtrain::cuda {

using Stream = void*;

struct Block {
  unsigned index;

  template <typename Work>
  void each_thread(Work work) const {
    for (unsigned thread = 0; thread < kThreads; ++thread) work(thread);
  }
};

template <typename Kernel>
void launch(const Kernel& kernel, unsigned blocks, Stream) {
  static_assert(sizeof(Kernel) <= kMostArguments);
  for (unsigned block = 0; block < blocks; ++block) kernel(Block{block});
}

class Scratch {
 public:
  Scratch(std::size_t bytes, Stream) : data_(new unsigned char[bytes]) {}
  void* data() const { return data_.get(); }

 private:
  std::unique_ptr<unsigned char[]> data_;
};

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const void*) {}
};

}  // namespace onnxtrain::cuda
