// The kernels of sparse products for one instruction set: compiled once per set, with fused multiply-add.
#include "kernels/instruction_set.h"
#include "sparse/kernels.h"
#include "sparse/tile_kernels.h"

namespace onnxtrain {

extern const SparseTable ONNXTRAIN_OF_SET(kSparse_);

#if defined(__AVX512F__)
extern const SparseTable kSparse_avx2;
inline constexpr const SparseTable* kHalf = &kSparse_avx2;
#else
inline constexpr const SparseTable* kHalf = nullptr;
#endif

const SparseTable ONNXTRAIN_OF_SET(kSparse_) = {
    .lanes = kLanes<float>,
    .half = kHalf,
    .most_vectors = most_sparse_vectors,
    .rows = sparse_rows,
    .by_lanes = multiply_lanes,
    .most_gradient_vectors = kMostGradientVectors,
    .gradients = sparse_gradients,
    .non_zeros = count_non_zeros,
    .transpose = transpose_rows,
    .pad = pad_plane,
    .split = split_plane,
    .end = end_sums,
    .end_windows = end_windows,
    .end_run = end_run,
    .end_transposed = end_transposed,
    .split_tiles = split_tiles,
    .join_tiles = join_tiles,
    .pool_tiles = pool_tiles,
};

}  // namespace onnxtrain
