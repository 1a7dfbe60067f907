// A read-only JSON parser for step graphs and safetensors: strings, integers, lists and objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace onnxtrain::json {

// A JSON value; `kind` selects the member that holds it.
struct Value {
  enum class Kind { kNull, kBoolean, kNumber, kText, kList, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<Value> items;                             // of a list
  std::vector<std::pair<std::string, Value>> members;   // of an object, in file order

  // Returns the member of an object by name, or null if it is missing.
  const Value* find(std::string_view name) const {
    for (const auto& [key, value] : members) {
      if (key == name) return &value;
    }
    return nullptr;
  }
};

// Parses one value. Throws std::runtime_error if the text is not JSON.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Value read() {
    Value result = value(0);
    skip_space();
    if (place_ != text_.size()) fail("has trailing characters");
    return result;
  }

 private:
  static constexpr int kDeepest = 64;

  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error("The JSON " + std::string(what) + " at byte " + std::to_string(place_) + ".");
  }

  void skip_space() {
    while (place_ < text_.size() && std::string_view(" \t\r\n").find(text_[place_]) != std::string_view::npos) ++place_;
  }

  char peek() {
    skip_space();
    if (place_ == text_.size()) fail("ends prematurely");
    return text_[place_];
  }

  bool accept(char wanted) {
    if (peek() != wanted) return false;
    ++place_;
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) fail("is not well formed");
  }

  bool accept_word(std::string_view word) {
    if (text_.substr(place_, word.size()) != word) return false;
    place_ += word.size();
    return true;
  }

  Value value(int depth) {
    if (depth > kDeepest) fail("is nested too deeply");
    Value result;
    switch (peek()) {
      case '{':
        result.kind = Value::Kind::kObject;
        members(result, depth);
        break;
      case '[':
        result.kind = Value::Kind::kList;
        items(result, depth);
        break;
      case '"':
        result.kind = Value::Kind::kText;
        result.text = text();
        break;
      default:
        word_or_number(result);
    }
    return result;
  }

  void members(Value& result, int depth) {
    expect('{');
    if (accept('}')) return;
    do {
      if (peek() != '"') fail("has a key that is not a string");
      std::string key = text();
      expect(':');
      result.members.emplace_back(std::move(key), value(depth + 1));
    } while (accept(','));
    expect('}');
  }

  void items(Value& result, int depth) {
    expect('[');
    if (accept(']')) return;
    do {
      result.items.push_back(value(depth + 1));
    } while (accept(','));
    expect(']');
  }

  void word_or_number(Value& result) {
    if (accept_word("null")) return;
    if (accept_word("true") || accept_word("false")) {
      result.kind = Value::Kind::kBoolean;
      result.boolean = text_[place_ - 2] == 'u';
      return;
    }
    const std::size_t end = text_.find_first_not_of("+-.0123456789eE", place_);
    const std::string digits(text_.substr(place_, end == std::string_view::npos ? end : end - place_));
    char* stop = nullptr;
    result.kind = Value::Kind::kNumber;
    result.number = std::strtod(digits.c_str(), &stop);
    if (digits.empty() || *stop != '\0') fail("has an invalid value");
    place_ += digits.size();
  }

  std::string text() {
    expect('"');
    std::string result;
    while (true) {
      if (place_ == text_.size()) fail("has an unterminated string");
      const char letter = text_[place_++];
      if (letter == '"') return result;
      if (letter == '\\') {
        escape(result);
      } else {
        result += letter;
      }
    }
  }

  void escape(std::string& result) {
    if (place_ == text_.size()) fail("has an unterminated string");
    constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const char name = text_[place_++];
    if (name == 'u') {
      std::uint32_t code = unit();
      if (code >= 0xD800 && code < 0xDC00 && accept_word("\\u")) code = 0x10000 + ((code - 0xD800) << 10) + (unit() - 0xDC00);
      append_utf8(result, code);
      return;
    }
    const std::size_t index = kNames.find(name);
    if (index == std::string_view::npos) fail("has an unknown escape sequence");
    result += kMeanings[index];
  }

  std::uint32_t unit() {
    const std::string digits(text_.substr(place_, 4));
    char* stop = nullptr;
    const unsigned long code = std::strtoul(digits.c_str(), &stop, 16);
    if (digits.size() != 4 || *stop != '\0') fail("has a \\u escape without four hexadecimal digits");
    place_ += 4;
    return static_cast<std::uint32_t>(code);
  }

  static void append_utf8(std::string& result, std::uint32_t code) {
    if (code < 0x80) {
      result += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    constexpr unsigned char kFirst[] = {0, 0xC0, 0xE0, 0xF0};
    result += static_cast<char>(kFirst[more] | (code >> (6 * more)));
    for (int index = more - 1; index >= 0; --index) result += static_cast<char>(0x80 | ((code >> (6 * index)) & 0x3F));
  }

  std::string_view text_;
  std::size_t place_ = 0;
};

inline Value read(std::string_view text) { return Reader(text).read(); }

// Formats a string as JSON.
inline std::string quoted(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      result += '\\';
      result += letter;
    } else if (code < 0x20) {
      result += std::string("\\u00") + kDigits[code >> 4] + kDigits[code & 15];
    } else {
      result += letter;
    }
  }
  return result + '"';
}

}  // namespace onnxtrain::json
