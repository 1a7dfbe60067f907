// Kernels of transforms for one instruction set, as in kernels/kernels.cpp.
#include "transforms/fourier_kernels.h"
#include "transforms/grid_sample_kernels.h"
#include "kernels/instruction_set.h"
#include "transforms/table.h"

namespace onnxtrain {

extern const TransformTable ONNXTRAIN_OF_SET(kTransforms_);

const TransformTable ONNXTRAIN_OF_SET(kTransforms_) = {
    .grid_sample = {grid_sample<float>, grid_sample<double>},
    .grid_sample_gradient = {grid_sample_gradient<float>, grid_sample_gradient<double>},
    .fourier = {fourier<float>, fourier<double>},
};

}  // namespace onnxtrain
