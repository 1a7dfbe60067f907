// Attention in tiles and its gradient with the tile instructions of tile_model.h.
//
// Arguments: batch, queries, keys, heads, size, value size, scale. Reads q, k, v and dy from standard input, and writes
// y, log_sum, dq, dk and dv to standard output, all floats.
#include "tile_model.h"

#define ONNXTRAIN_INSTRUCTION_SET model
#include "attention/bfloat16_kernels.cpp"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace onnxtrain;

int main(int count, char** arguments) {
  if (count != 8) return 1;
  const auto size = [&](int index) { return static_cast<std::size_t>(std::atoll(arguments[index])); };
  AttentionCall call = {};
  call.shape = {size(1), size(2), size(3), size(4), size(5), size(6)};
  call.scale = std::atof(arguments[7]);
  const AttentionShape& s = call.shape;
  const std::size_t queries = s.batch * s.queries * s.heads, keys = s.batch * s.keys * s.heads;
  std::vector<float> q(queries * s.size), k(keys * s.size), v(keys * s.value_size), dy(queries * s.value_size);
  for (std::vector<float>* input : {&q, &k, &v, &dy}) {
    if (!input->empty() && std::fread(input->data(), sizeof(float), input->size(), stdin) != input->size()) return 1;
  }
  std::vector<float> y(dy.size()), log_sum(queries), dq(q.size()), dk(k.size()), dv(v.size());
  call.q = q.data();
  call.k = k.data();
  call.v = v.data();
  call.dy = dy.data();
  call.y = y.data();
  call.log_sum = log_sum.data();
  call.dq = dq.data();
  call.dk = dk.data();
  call.dv = dv.data();
  const Bfloat16Attention& kernel = kBfloat16Attention_model;
  for (const bool gradient : {false, true}) {
    void* scratch = std::aligned_alloc(64, (kernel.scratch(call, gradient) + 63) / 64 * 64);
    for (std::size_t head = 0; head < s.batch * s.heads; ++head) {
      gradient ? kernel.gradient(call, head, scratch) : kernel.attend(call, head, 0, s.queries, scratch);
    }
    std::free(scratch);
  }
  for (const std::vector<float>* output : {&y, &log_sum, &dq, &dk, &dv}) {
    if (!output->empty()) std::fwrite(output->data(), sizeof(float), output->size(), stdout);
  }
  return 0;
}
