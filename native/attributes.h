// Attributes by name, wherever they come from: a node of a model, or a call from C.
#pragma once

#include <optional>
#include <string>

namespace onnxtrain {

class AttributeSource {
 public:
  virtual ~AttributeSource() = default;

  // The attribute; without one what `otherwise` says; a std::invalid_argument where there is neither.
  virtual double number(const char* name, std::optional<double> otherwise = std::nullopt) const = 0;
  virtual std::string text(const char* name, std::optional<std::string> otherwise = std::nullopt) const = 0;
};

}  // namespace onnxtrain
