// Reads and checks the attributes of an update rule.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "attributes.h"
#include "optimizers/rule.h"

namespace onnxtrain {

// "'a', 'b' or 'c'".
inline std::string listed(const char* const (&words)[kMostVariants]) {
  std::string text;
  for (int i = 0; i < kMostVariants && words[i] != nullptr; ++i) {
    const bool last = i + 1 == kMostVariants || words[i + 1] == nullptr;
    text.append(i == 0 ? "'" : last ? " or '" : ", '").append(words[i]).append("'");
  }
  return text;
}

template <typename Attributes>
void read(const AttributeOf<Attributes>& attribute, const AttributeSource& source, Attributes& values) {
  if (attribute.number != nullptr) {
    double& value = values.*attribute.number;
    value = source.number(attribute.name, attribute.required ? std::nullopt : std::optional(value));
    return;
  }
  if (attribute.sizes != nullptr) {
    AxisSizes& sizes = values.*attribute.sizes;
    for (const std::int64_t size : source.integers(attribute.name)) {
      if (sizes.axes == kMostAxes) {
        throw std::invalid_argument(std::string(attribute.name) + " has more than " + std::to_string(kMostAxes) +
                                    " sizes: the kernels know no variables of more axes.");
      }
      if (size < 1) {
        throw std::invalid_argument(std::string(attribute.name) + " has the size " + std::to_string(size) +
                                    ": each must be 1 or more.");
      }
      sizes.sizes[sizes.axes++] = size;
    }
    return;
  }
  int& word_index = values.*attribute.word;
  const std::string word = source.text(
      attribute.name, attribute.required ? std::nullopt : std::optional<std::string>(attribute.words[word_index]));
  for (word_index = 0; word_index < kMostVariants && attribute.words[word_index] != nullptr; ++word_index) {
    if (word == attribute.words[word_index]) return;
  }
  throw std::invalid_argument(std::string(attribute.name) + " is '" + word + "': it must be " +
                              listed(attribute.words) + ".");
}

template <typename Rule>
typename Rule::Attributes attributes_of(const AttributeSource& source) {
  typename Rule::Attributes attributes;
  for (const auto& attribute : Rule::kAttributes) read(attribute, source, attributes);
  if constexpr (requires { Rule::check(attributes); }) Rule::check(attributes);
  return attributes;
}

}  // namespace onnxtrain
