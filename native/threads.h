// Threads for callers outside ONNX Runtime, which has a pool of its own that operators use instead.
#pragma once

#include "parallel.h"

namespace onnxtrain {

// Shares tasks among the caller and up to `threads` - 1 helpers. Helpers are started at the first call that wants them
// and kept; between calls they look for new work for a moment, then sleep. Where another call has them, or none can be
// started, the caller does its work alone.
ParallelFor parallel_for(int threads);

}  // namespace onnxtrain
