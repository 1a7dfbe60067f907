// Attributes by name, from a model's node or from a C call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace onnxtrain {

class AttributeSource {
 public:
  virtual ~AttributeSource() = default;

  // Returns the attribute or the given default; throws std::invalid_argument if there is neither.
  virtual double number(const char* name, std::optional<double> otherwise = std::nullopt) const = 0;
  virtual std::string text(const char* name, std::optional<std::string> otherwise = std::nullopt) const = 0;
  // Empty if the attribute is missing.
  virtual std::vector<std::int64_t> integers(const char* name) const = 0;
};

}  // namespace onnxtrain
