#include "operators/fused_node.h"

#include "operators/known_shape.h"
#include "sizes.h"

namespace onnxtrain {

void infer_shapes(const OrtApi* api, const Signature& signature, OrtShapeInferContext* context) {
  if (signature.like.empty() || signature.like[0] < 0) return;
  OrtTensorTypeAndShapeInfo* info = nullptr;  // owned by the runtime
  const auto index = static_cast<std::size_t>(signature.like[0]);
  require(api, ort::ShapeInferContext_GetInputTypeShape::call(api, context, index, &info));
  if (is_known_shape(api, info)) require(api, ort::ShapeInferContext_SetOutputTypeShape::call(api, context, 0, info));
}

Inputs::Inputs(const Signature& signature, const Call& call, const std::vector<Tensor>* constants)
    : signature_(signature), constants_(constants), tensors_(call.input_count()) {
  for (std::size_t index = 0; index < tensors_.size(); ++index) {
    if (is_constant(index)) continue;
    if (!call.has_input(index)) {
      if (index >= signature.required_inputs) continue;
      throw std::invalid_argument(label(index) + " is missing, and is required.");
    }
    call.input(index, tensors_[index]);
  }
}

std::string Inputs::label(std::size_t index) const {
  return std::string("input ") + std::to_string(index) + " (" + signature_.inputs[index] + ")";
}

ElementType Inputs::element_type(std::size_t index) const {
  const int type = (*this)[index].type;
  if (type == ort::kTypeFloat) return kFloat;
  if (type == ort::kTypeDouble) return kDouble;
  throw std::invalid_argument(label(index) + " has type " + type_name(type) + ", and must be float or double.");
}

void Inputs::require_type(std::size_t index, int type) const {
  if ((*this)[index].type == type) return;
  throw std::invalid_argument(label(index) + " has type " + type_name((*this)[index].type) + ", and must be " +
                              type_name(type) + ".");
}

void Inputs::require_same_type(std::size_t index, std::size_t other) const {
  if ((*this)[index].type == (*this)[other].type) return;
  throw std::invalid_argument(label(index) + " has type " + type_name((*this)[index].type) + " and " + label(other) +
                              " has type " + type_name((*this)[other].type) + ": they must have one type.");
}

void Inputs::require_same_shape(std::size_t index, std::size_t other) const {
  if ((*this)[index].shape == (*this)[other].shape) return;
  throw std::invalid_argument(label(index) + " has shape " + text_of((*this)[index].shape) + " and " + label(other) +
                              " has shape " + text_of((*this)[other].shape) + ": they must have one shape.");
}

void Inputs::require_shape(std::size_t index, const std::vector<std::int64_t>& shape) const {
  if ((*this)[index].shape == shape) return;
  throw std::invalid_argument(label(index) + " has shape " + text_of((*this)[index].shape) + ", and must have shape " +
                              text_of(shape) + ".");
}

std::vector<std::int64_t> Inputs::sizes(std::size_t index) const {
  const auto* numbers = static_cast<const std::int64_t*>((*this)[index].data);
  std::vector<std::int64_t> sizes(numbers, numbers + (*this)[index].count());
  for (const std::int64_t size : sizes) {
    if (size < 0) throw std::invalid_argument(label(index) + " is " + text_of(sizes) + ": no size may be negative.");
  }
  return sizes;
}

std::string type_name(int type) {
  switch (type) {
    case ort::kTypeFloat:
      return "float";
    case ort::kTypeDouble:
      return "double";
    case ort::kTypeUint8:
      return "uint8";
    case ort::kTypeUint16:
      return "uint16";
    case ort::kTypeInt64:
      return "int64";
    case ort::kTypeBool:
      return "bool";
    case ort::kTypeFloat16:
      return "float16";
    case ort::kTypeBfloat16:
      return "bfloat16";
    default:
      return "number " + std::to_string(type) + " of ONNX's TensorProto";
  }
}

}  // namespace onnxtrain
