// The recurrent kernels for one instruction set: compiled once per set, like those of matmul, with fused multiply-add.
#include "kernels/instruction_set.h"
#include "recurrent/gru_kernels.h"
#include "recurrent/lstm_kernels.h"
#include "recurrent/rnn_kernels.h"

namespace onnxtrain {

extern const RecurrentTable ONNXTRAIN_OF_SET(kRecurrent_);

namespace {

template <typename T>
constexpr RecurrentKernels<T> kKernels = {
    .packed_size = packed_size<T>,
    .pack = pack_factor<T>,
    .scratch = step_scratch<T>,
    .forward = {rnn_forward<T>, gru_forward<T>, gru_after_forward<T>, lstm_forward<T>},
    .backward = {rnn_backward<T>, gru_backward<T>, gru_after_backward<T>, lstm_backward<T>},
    .leave = {leave_gates<T>, leave_gates<T>, leave_gates_and_linear<T>, leave_gates<T>},
};

}  // namespace

const RecurrentTable ONNXTRAIN_OF_SET(kRecurrent_) = {{.single = kKernels<float>, .wide = kKernels<double>}};

}  // namespace onnxtrain
