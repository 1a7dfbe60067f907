// Adagrad, Adam and Momentum, element by element, in the order of operations of the ONNX operator pages.
//
// Included by kernels.cpp only. What is done to an element is plain, so that the compiler vectorises it;
// ONNXTRAIN_VECTORIZE tells it that buffers are either the same or apart, which makes every iteration independent.
#pragma once

#if defined(__clang__)
#define ONNXTRAIN_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define ONNXTRAIN_VECTORIZE _Pragma("GCC ivdep")
#else
#define ONNXTRAIN_VECTORIZE
#endif

namespace onnxtrain {
namespace {

// How far ahead of their use elements are asked for. Where they come from memory, the processor's own guesses are a
// quarter slower: square root and division fill the window of instructions in which it would see the next loads.
inline constexpr std::ptrdiff_t kAheadBytes = 2048;

template <std::size_t bytes>
inline void ask_for(const void* from) {
#pragma GCC unroll 8
  for (std::size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(from) + line + kAheadBytes);
  }
}

// Elements of a block: fewer, and the compiler sees no loop worth vectorising.
inline constexpr std::size_t kBlock = 64;

// Calls block(i) for whole blocks from i on, and element(i) for what is left; both read `streams` there.
template <typename T, std::size_t count_of_streams, typename Block, typename Element>
inline void for_each_block(std::size_t count, const T* const (&streams)[count_of_streams], Block block,
                           Element element) {
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (const T* stream : streams) ask_for<kBlock * sizeof(T)>(stream + i);
    block(i);
  }
  for (; i < count; ++i) element(i);
}

// Calls element(0) ... element(count - 1), which read `streams` at that index.
template <typename T, std::size_t count_of_streams, typename Element>
inline void for_each_element(std::size_t count, const T* const (&streams)[count_of_streams], Element element) {
  const auto block = [element](std::size_t i) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = i; j < i + kBlock; ++j) element(j);
  };
  for_each_block<T>(count, streams, block, element);
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }

template <typename T>
void adagrad(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const AdagradScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T epsilon = static_cast<T>(s.epsilon);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T* H = static_cast<const T*>(inputs[2]);
  T *X_new = static_cast<T*>(outputs[0]), *H_new = static_cast<T*>(outputs[1]);
  for_each_element<T>(count, {X, G, H}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T h = H[i] + g * g;
    H_new[i] = h;
    X_new[i] = x - rate * g / (square_root(h) + epsilon);
  });
}

template <typename T>
void adam(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const AdamScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T alpha = static_cast<T>(s.alpha), one_minus_alpha = static_cast<T>(s.one_minus_alpha);
  const T beta = static_cast<T>(s.beta), one_minus_beta = static_cast<T>(s.one_minus_beta);
  const T epsilon = static_cast<T>(s.epsilon), one_minus_post = static_cast<T>(s.one_minus_post);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T *V = static_cast<const T*>(inputs[2]), *H = static_cast<const T*>(inputs[3]);
  T *X_new = static_cast<T*>(outputs[0]), *V_new = static_cast<T*>(outputs[1]), *H_new = static_cast<T*>(outputs[2]);
  for_each_element<T>(count, {X, G, V, H}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T v = alpha * V[i] + one_minus_alpha * g;
    const T h = beta * H[i] + one_minus_beta * g * g;
    V_new[i] = v;
    H_new[i] = h;
    X_new[i] = one_minus_post * (x - rate * v / (square_root(h) + epsilon));
  });
}

template <typename T, bool nesterov>
void momentum(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const MomentumScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T alpha = static_cast<T>(s.alpha), beta = static_cast<T>(s.beta);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T* V = static_cast<const T*>(inputs[2]);
  T *X_new = static_cast<T*>(outputs[0]), *V_new = static_cast<T*>(outputs[1]);
  for_each_element<T>(count, {X, G, V}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T v = alpha * V[i] + beta * g;
    V_new[i] = v;
    X_new[i] = x - rate * (nesterov ? g + alpha * v : v);
  });
}

template <typename T>
void prepare_gradient(double factor, std::size_t count, const void* gradient, const unsigned char* mask,
                      void* prepared) {
  const T* G = static_cast<const T*>(gradient);
  T* result = static_cast<T*>(prepared);
  const T scale = static_cast<T>(factor);
  if (mask == nullptr) {
    for_each_element<T>(count, {G}, [=](std::size_t i) { result[i] = G[i] * scale; });
    return;
  }
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T g = G[i];  // read either way, so that the choice is no jump
    result[i] = (mask[i] != 0 ? g : T(0)) * scale;
  }
}

template <std::size_t arrays>
void stream_into(std::size_t count, const float* input, float* const* outputs) {
  float* first = outputs[0];
  float* second = outputs[arrays > 1 ? 1 : 0];
  float* third = outputs[arrays > 2 ? 2 : 0];
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const float value = input[i];
    first[i] += value;
    if (arrays > 1) second[i] += value;
    if (arrays > 2) third[i] += value;
  }
}

void stream(std::size_t arrays, std::size_t count, const float* input, float* const* outputs) {
  if (arrays == 1) stream_into<1>(count, input, outputs);
  if (arrays == 2) stream_into<2>(count, input, outputs);
  if (arrays == 3) stream_into<3>(count, input, outputs);
}

}  // namespace
}  // namespace onnxtrain
