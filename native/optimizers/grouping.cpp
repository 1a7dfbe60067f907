#include "optimizers/grouping.h"

#include <algorithm>

#include "operators/known_shape.h"
#include "optimizers/variables.h"

namespace onnxtrain {

namespace {

// Optional groups that attributes may request: masks, second states (RMSprop), and scales.
constexpr std::size_t kMostMore = 3 + kMaxStates;

// Letters of the scales of states: lower case.
std::string scales_of(const std::string& states) {
  std::string letters;
  for (const char state : states) letters += static_cast<char>(state - 'A' + 'a');
  return letters;
}

}  // namespace

bool is_scale(char letter) { return letter >= 'a'; }
char state_of(char scale) { return static_cast<char>(scale - 'a' + 'A'); }
bool has_sign(char state) { return state != 'H'; }

Grouping Grouping::of(const char* operator_name, const std::string& states) {
  return {operator_name, "XG" + states, "X" + states};
}

Grouping Grouping::fused_with(bool masks, bool scales) const {
  Grouping result = {std::string("Fused").append(operator_name), inputs, outputs, true};
  if (scales) {
    const std::string letters = scales_of(outputs.substr(1));
    result.inputs.insert(2, letters);  // states stay last, where the runtime expects them for shape inference
    result.outputs += letters;
  }
  if (masks) result.inputs.insert(2, 1, 'M');
  return result;
}

void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context) {
  std::size_t inputs = 0;
  require(api, ort::ShapeInferContext_GetInputCount::call(api, context, &inputs));
  const std::size_t tensors = inputs < grouping.scalars() ? 0 : inputs - grouping.scalars();
  const std::size_t groups = grouping.inputs.size();
  if (tensors < groups) return;  // rejected with a message when the kernel is created
  // Attributes, which may request masks and more states, are not available here. Fewer tensors than two variables need
  // belong to one variable, whose states come last and have its shape. With more, there are at least this many
  // variables, and X comes first.
  const bool one = tensors < 2 * groups;
  const std::size_t sure = one ? grouping.outputs.size() : (tensors + groups + kMostMore - 1) / (groups + kMostMore);
  for (std::size_t output = 0; output < std::min(sure, grouping.outputs.size()); ++output) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // owned by the runtime
    const std::size_t input = one && output > 0 ? inputs - 1 : grouping.scalars() + output;
    require(api, ort::ShapeInferContext_GetInputTypeShape::call(api, context, input, &info));
    if (!is_known_shape(api, info)) continue;
    require(api, ort::ShapeInferContext_SetOutputTypeShape::call(api, context, output, info));
  }
}

}  // namespace onnxtrain
