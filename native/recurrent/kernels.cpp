// The kernels of recurrent operators for one instruction set: compiled like those of products, once per set, with fused
// multiplications and additions.
#include "../kernels/kernel_table.h"

#include "../kernels/elementwise.h"
#include "../kernels/transcendental.h"

#include "cells.h"

#define ONNXTRAIN_JOIN_(a, b) a##b
#define ONNXTRAIN_JOIN(a, b) ONNXTRAIN_JOIN_(a, b)

namespace onnxtrain {

extern const RecurrentTable ONNXTRAIN_JOIN(kRecurrent_, ONNXTRAIN_INSTRUCTION_SET);

#define ONNXTRAIN_CELLS(T)                                                       \
  {                                                                              \
    packed_size<T>, pack_factor<T>, step_scratch<T>,                             \
        {rnn_forward<T>, gru_forward<T>, gru_after_forward<T>, lstm_forward<T>}, \
        {rnn_backward<T>, gru_backward<T>, gru_after_backward<T>, lstm_backward<T>}, \
        {leave_gates<T>, leave_gates<T>, leave_gates_and_linear<T>, leave_gates<T>} \
  }

const RecurrentTable ONNXTRAIN_JOIN(kRecurrent_, ONNXTRAIN_INSTRUCTION_SET) = {
    {ONNXTRAIN_CELLS(float), ONNXTRAIN_CELLS(double)},
};

}  // namespace onnxtrain
