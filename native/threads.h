// Threads for callers outside of ONNX Runtime, whose operators use its own pool instead.
#pragma once

#include "parallel.h"

namespace onnxtrain {

// Shares tasks among the caller and up to `threads` - 1 helpers. Helpers are started at the first call that needs them
// and kept; between calls they spin briefly, then sleep. If another call uses them, or none can be started, the caller
// does all the work.
ParallelFor parallel_for(int threads);

}  // namespace onnxtrain
