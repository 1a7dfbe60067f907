// Trains an exported step graph from C++ and prints the loss of every step.
//
//   onnxtrain export model.onnx --loss softmax_cross_entropy --step-graph step.onnx --states states.safetensors
//   ln -sf "$(python -c "import glob, onnxruntime as o; print(*glob.glob(o.__path__[0] + '/capi/libonnxruntime.so.*'))")" libonnxruntime.so.1
//   g++ -std=c++17 -O2 -Iinclude examples/train.cpp -o train libonnxruntime.so.1 -Wl,-rpath,'$ORIGIN'
//   ./train step.onnx states.safetensors batch.safetensors 0.01 20 trained.safetensors
//   onnxtrain import-states model.onnx trained.safetensors -o tuned.onnx
//
// The batch has a tensor for every input of the model and for the target. The second line links the library of
// onnxruntime's Python package to the name that the loader looks for. A graph exported with --kernels needs the
// operator library as one more argument of ./train:
//
//   python -c "import onnxtrain; print(onnxtrain.custom_ops_library())"

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "onnxtrain/step.hpp"

int main(int count, char** arguments) {
  if (count < 7) {
    std::fprintf(stderr, "usage: train GRAPH STATES BATCH LEARNING_RATE STEPS RESULT [OPERATORS]\n");
    return 2;
  }
  try {
    onnxtrain::Options options;
    options.threads = 1;
    if (count > 7) options.kernels = arguments[7];
    onnxtrain::StepGraph graph(arguments[1], arguments[2], options);
    const float learning_rate = std::strtof(arguments[4], nullptr);
    for (int step = 0; step < std::atoi(arguments[5]); ++step) {
      std::printf("%.17g\n", graph.step(onnxtrain::read_safetensors(arguments[3]), learning_rate));
    }
    graph.save(arguments[6]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
