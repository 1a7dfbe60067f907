// Work in rounds: each has the same parts, and begins when the previous one has ended.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "tuning.h"

namespace onnxtrain {

// Shared by workers that each call `work` once. Any number of them, at least one, completes everything, even one after
// the other: a part belongs to the first worker that claims it, and no worker waits for an unclaimed one. A worker
// claims the same part in every round if it can, to keep its data in the core's cache.
class Rounds {
 public:
  Rounds(std::size_t rounds, std::size_t parts) : rounds_(rounds), parts_(parts), taken_(new Counter[parts]) {}

  // Calls do_part(round, part), which must not throw.
  template <typename DoPart>
  void work(std::size_t worker, DoPart do_part) {
    for (std::size_t round = 0; round < rounds_; ++round) {
      for (std::size_t i = 0; i < parts_; ++i) {
        const std::size_t part = (worker + i) % parts_;
        std::size_t expected = round;
        if (!taken_[part].value.compare_exchange_strong(expected, round + 1)) continue;
        do_part(round, part);
        done_.value.fetch_add(1, std::memory_order_release);
      }
      for (std::size_t polls = 0; done_.value.load(std::memory_order_acquire) < (round + 1) * parts_; ++polls) {
        if (polls < tuning::kPolls) {
#if defined(__x86_64__) || defined(__i386__)
          __builtin_ia32_pause();
#endif
        } else {
          std::this_thread::yield();  // there may be more threads than cores
        }
      }
    }
  }

 private:
  struct alignas(64) Counter {
    std::atomic<std::size_t> value{0};
  };

  std::size_t rounds_, parts_;
  std::unique_ptr<Counter[]> taken_;  // per part, the number of rounds in which it was claimed
  Counter done_;                      // completed parts of all rounds
};

}  // namespace onnxtrain
