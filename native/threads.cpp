#include "threads.h"

#if !defined(_WIN32)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "tuning.h"

namespace onnxtrain {
namespace {

// More threads than cores are never used, however many a caller requests.
std::size_t most_threads() {
  static const std::size_t most = std::max(1u, std::thread::hardware_concurrency()) * std::size_t{4};
  return most;
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Windows has no fork: the process is the same for as long as the library is loaded.
inline long this_process() {
#if defined(_WIN32)
  return 0;
#else
  return static_cast<long>(getpid());
#endif
}

class Helpers {
 public:
  // The helpers of this process: a fork has none of its parent's threads and starts new ones.
  static Helpers& of_process() {
    static std::mutex guard;
    static Helpers* helpers = nullptr;
    static long owner = 0;
    const std::lock_guard<std::mutex> lock(guard);
    if (helpers == nullptr || owner != this_process()) {
      helpers = new Helpers;  // never deleted: its threads live as long as the process
      owner = this_process();
    }
    return *helpers;
  }

  void run(int wanted, std::size_t total, const std::function<void(std::size_t)>& task) {
    const std::unique_lock<std::mutex> mine(one_call_, std::try_to_lock);
    if (wanted == 0 || !mine.owns_lock()) {
      for (std::size_t t = 0; t < total; ++t) task(t);
      return;
    }
    Job job{task, total};
    {
      const std::lock_guard<std::mutex> lock(state_);
      start(wanted);
      job_ = &job;
      places_ = wanted;
      ++calls_;
    }
    if (sleeping_ > 0) wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(state_);
    job_ = nullptr;  // late helpers find no job
    done_.wait(lock, [&] { return working_ == 0; });
  }

 private:
  struct Job {
    const std::function<void(std::size_t)>& task;
    std::size_t total;
    std::atomic<std::size_t> next{0};

    void work() {
      for (std::size_t t = next++; t < total; t = next++) task(t);
    }
  };

  void start(int wanted) {
    for (; started_ < wanted; ++started_) {
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads available: the existing ones do the work
      }
    }
  }

  void help() {
    std::uint64_t seen = 0;
    for (;;) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(tuning::kPatience);
      while (calls_.load() == seen && std::chrono::steady_clock::now() < end) pause();
      std::unique_lock<std::mutex> lock(state_);
      if (calls_ == seen) {
        ++sleeping_;
        wake_.wait(lock, [&] { return calls_ != seen; });
        --sleeping_;
      }
      seen = calls_;
      if (job_ == nullptr || places_ == 0) continue;
      --places_;
      ++working_;
      Job& job = *job_;
      lock.unlock();
      job.work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex one_call_;
  std::mutex state_;
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<int> sleeping_{0};
  Job* job_ = nullptr;
  int started_ = 0, places_ = 0, working_ = 0;
};

}  // namespace

ParallelFor parallel_for(int threads) {
  return [threads](std::size_t total, const std::function<void(std::size_t)>& task) {
    const std::size_t most = std::min(static_cast<std::size_t>(std::max(threads, 1)), most_threads());
    Helpers::of_process().run(static_cast<int>(std::max<std::size_t>(std::min(most, total), 1)) - 1, total, task);
  };
}

}  // namespace onnxtrain
