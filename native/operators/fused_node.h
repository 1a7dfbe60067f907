// Shared code of the operators of domain onnxtrain that are not optimizers: fixed lists of inputs and outputs, some
// optional.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_table.h"
#include "operators/runtime.h"

namespace onnxtrain {

// Signature of an operator. Inputs and outputs beyond the required ones are optional.
struct Signature {
  const char* name;
  std::vector<const char*> inputs;
  std::size_t required_inputs;
  std::size_t outputs;
  // Per output, the index of an input with the same element type and shape; -1 for none.
  std::vector<int> like;
  // Pairs of an input and an output that may share a buffer if nothing else reads the input afterwards.
  std::vector<std::pair<int, int>> in_place;
  // Element types of the leading inputs; the others share any one type with the outputs.
  std::vector<int> types = {};
};

// Infers types and shapes of the outputs that are like an input, while the runtime loads a model. Only of the first
// output: the runtime does not report how many outputs a node has, and crashes at one too many.
void infer_shapes(const OrtApi* api, const Signature& signature, OrtShapeInferContext* context);

// One node of a model. A subclass has a `static const Signature kSignature`, takes `const Attributes&` in its
// constructor, and computes. Messages need not name the operator: the caller adds it.
class FusedNode {
 public:
  FusedNode() = default;
  virtual ~FusedNode() = default;
  FusedNode(const FusedNode&) = delete;
  FusedNode& operator=(const FusedNode&) = delete;

  virtual void compute(const Call& call) const = 0;
};

// The inputs of one call, with the checks that all operators share.
class Inputs {
 public:
  // `constants` are those that are the same in every call, read when the node was made; null for none, else one for each
  // input of the signature, with an undefined type for one that is read now.
  Inputs(const Signature& signature, const Call& call, const std::vector<Tensor>* constants = nullptr);

  bool has(std::size_t index) const {
    return index < tensors_.size() && (*this)[index].type != ort::kTypeUndefined;
  }
  const Tensor& operator[](std::size_t index) const { return is_constant(index) ? (*constants_)[index] : tensors_[index]; }

  // Element type of input `index`; rejects types other than float and double.
  ElementType element_type(std::size_t index) const;
  // Rejects an input of another type, by ONNX's number.
  void require_type(std::size_t index, int type) const;
  // Rejects inputs of different types, or of different shapes.
  void require_same_type(std::size_t index, std::size_t other) const;
  void require_same_shape(std::size_t index, std::size_t other) const;
  void require_shape(std::size_t index, const std::vector<std::int64_t>& shape) const;
  // The int64 sizes in input `index`; rejects negative ones.
  std::vector<std::int64_t> sizes(std::size_t index) const;

 private:
  std::string label(std::size_t index) const;
  bool is_constant(std::size_t index) const {
    return constants_ != nullptr && (*constants_)[index].type != ort::kTypeUndefined;
  }

  const Signature& signature_;
  const std::vector<Tensor>* constants_;
  std::vector<Tensor> tensors_;
};

// Name of a tensor's element type in messages.
std::string type_name(int type);

}  // namespace onnxtrain
