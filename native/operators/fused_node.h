// What the operators of domain onnxtrain share that are no optimizers: a fixed list of inputs and outputs, of which some
// may be left out.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_table.h"
#include "operators/runtime.h"

namespace onnxtrain {

// How an operator looks from outside. Inputs and outputs that follow the required ones may be left out.
struct Signature {
  const char* name;
  std::vector<const char*> inputs;
  std::size_t required_inputs;
  std::size_t outputs;
  // Per output, the input whose element type and shape it has; -1 where it is another's.
  std::vector<int> like;
  // Pairs of an input and an output that may share a buffer, where nothing else reads the input afterwards.
  std::vector<std::pair<int, int>> in_place;
  // Element types of the first inputs; those that follow may be of any type, which is that of the outputs, too.
  std::vector<int> types = {};
};

// Tells the runtime types and shapes of the outputs that are like an input, while it loads a model. Only that of the
// first: the runtime does not say how many outputs a node has, and crashes at one too many.
void infer_shapes(const OrtApi* api, const Signature& signature, OrtShapeInferContext* context);

// One node of a model. A subclass has a `static const Signature kSignature`, reads its attributes in its constructor,
// which takes `const Attributes&`, and computes. Messages need not name the operator: the caller adds it.
class FusedNode {
 public:
  FusedNode() = default;
  virtual ~FusedNode() = default;
  FusedNode(const FusedNode&) = delete;
  FusedNode& operator=(const FusedNode&) = delete;

  virtual void compute(const Call& call) const = 0;
};

// The inputs of one call, read and checked as far as all operators need it.
class Inputs {
 public:
  Inputs(const Signature& signature, const Call& call);

  bool has(std::size_t index) const { return index < tensors_.size() && tensors_[index].type != ort::kTypeUndefined; }
  const Tensor& operator[](std::size_t index) const { return tensors_[index]; }

  // The element type of input `index`; refuses what is neither float nor double.
  ElementType element_type(std::size_t index) const;
  // Refuses inputs that differ in type, or in shape.
  void require_same_type(std::size_t index, std::size_t other) const;
  void require_same_shape(std::size_t index, std::size_t other) const;
  void require_shape(std::size_t index, const std::vector<std::int64_t>& shape) const;
  // The numbers in input `index`, int64, which are sizes; refuses negative ones.
  std::vector<std::int64_t> sizes(std::size_t index) const;

 private:
  std::string label(std::size_t index) const;

  const Signature& signature_;
  std::vector<Tensor> tensors_;
};

// How messages name a tensor's element type.
std::string type_name(int type);

}  // namespace onnxtrain
