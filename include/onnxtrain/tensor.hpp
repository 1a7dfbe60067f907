// Tensors in memory and in safetensors files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "onnxtrain/json.hpp"

namespace onnxtrain {

// An error with a one-sentence message.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An element type: its number in ONNX, its name in safetensors, bytes per element.
struct ElementType {
  int onnx;
  const char* name;
  std::size_t size;
};

inline constexpr ElementType kElementTypes[] = {
    {1, "F32", 4},  {2, "U8", 1},    {3, "I8", 1},   {4, "U16", 2},  {5, "I16", 2},  {6, "I32", 4},   {7, "I64", 8},
    {9, "BOOL", 1}, {10, "F16", 2},  {11, "F64", 8}, {12, "U32", 4}, {13, "U64", 8}, {16, "BF16", 2},
};

template <typename T>
constexpr int element_type_of() {
  if constexpr (std::is_same_v<T, float>) return 1;
  if constexpr (std::is_same_v<T, double>) return 11;
  if constexpr (std::is_same_v<T, std::int32_t>) return 6;
  if constexpr (std::is_same_v<T, std::int64_t>) return 7;
  if constexpr (std::is_same_v<T, bool>) return 9;
  return 0;
}

inline const ElementType& element_type(int onnx) {
  for (const ElementType& type : kElementTypes) {
    if (type.onnx == onnx) return type;
  }
  throw Error("The element type " + std::to_string(onnx) + " is not supported for the inputs of a step graph.");
}

// A dense tensor that owns its memory, aligned for SIMD.
class Tensor {
 public:
  Tensor() = default;

  Tensor(int type, std::vector<std::int64_t> shape) : type_(type), shape_(std::move(shape)) {
    std::size_t elements = 1;
    for (const std::int64_t size : shape_) {
      if (size < 0) throw Error("A tensor cannot have a dimension of size " + std::to_string(size) + ".");
      elements *= static_cast<std::size_t>(size);
    }
    bytes_ = elements * element_type(type).size;
    data_.reset(static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes_, 1), kAlignment)));
    std::memset(data_.get(), 0, bytes_);
  }

  // Makes a tensor from values; an empty shape is a scalar.
  template <typename T>
  static Tensor of(const std::vector<T>& values, std::vector<std::int64_t> shape) {
    static_assert(element_type_of<T>() != 0, "a tensor holds float, double, int32_t or int64_t");
    Tensor result(element_type_of<T>(), std::move(shape));
    if (result.bytes_ != values.size() * sizeof(T)) {
      throw Error("A tensor of shape " + result.shape_text() + " cannot hold " + std::to_string(values.size()) +
                  " values.");
    }
    std::memcpy(result.data(), values.data(), result.bytes_);
    return result;
  }

  template <typename T>
  static Tensor scalar(T value) {
    return of(std::vector<T>{value}, {});
  }

  int type() const { return type_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::size_t bytes() const { return bytes_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }

  // The elements; T must match the element type.
  template <typename T>
  T* as() {
    check<T>();
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  const T* as() const {
    check<T>();
    return reinterpret_cast<const T*>(data_.get());
  }

  Tensor copy() const {
    Tensor result(type_, shape_);
    std::memcpy(result.data(), data(), bytes_);
    return result;
  }

  std::string shape_text() const {
    std::string text = "[";
    for (const std::int64_t size : shape_) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + "]";
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };

  template <typename T>
  void check() const {
    if (element_type_of<T>() != type_) throw Error("A tensor of " + std::string(element_type(type_).name) + " was read as another type.");
  }

  int type_ = 1;
  std::vector<std::int64_t> shape_;
  std::size_t bytes_ = 0;
  std::unique_ptr<std::byte, Free> data_;
};

using Tensors = std::map<std::string, Tensor>;

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) throw Error("'" + path.string() + "' cannot be read.");
  return content;
}

namespace detail {

// Returns a JSON integer that is valid as a byte or element count.
inline std::size_t count_of(const json::Value& value) {
  if (value.kind != json::Value::Kind::kNumber || !(value.number >= 0 && value.number < 9e15)) {
    throw Error("it has an invalid size");
  }
  return static_cast<std::size_t>(value.number);
}

inline Tensor safetensor(const json::Value& entry, std::string_view data) {
  const json::Value* type = entry.find("dtype");
  const json::Value* shape = entry.find("shape");
  const json::Value* range = entry.find("data_offsets");
  if (type == nullptr || shape == nullptr || range == nullptr || range->items.size() != 2) {
    throw Error("a tensor lacks its dtype, shape or data_offsets");
  }
  std::vector<std::int64_t> sizes;
  for (const json::Value& size : shape->items) sizes.push_back(static_cast<std::int64_t>(count_of(size)));
  for (const ElementType& known : kElementTypes) {
    if (type->text != known.name) continue;
    const std::size_t begin = count_of(range->items[0]), end = count_of(range->items[1]);
    std::size_t bytes = known.size;
    for (const std::int64_t size : sizes) {
      if (size != 0 && bytes > data.size() / static_cast<std::size_t>(size)) throw Error("a tensor is larger than the file");
      bytes *= static_cast<std::size_t>(size);
    }
    if (begin > end || end > data.size() || end - begin != bytes) throw Error("a tensor lies outside of the file");
    Tensor tensor(known.onnx, sizes);
    std::memcpy(tensor.data(), data.data() + begin, bytes);
    return tensor;
  }
  throw Error("a tensor has the type '" + type->text + "'");
}

}  // namespace detail

// Reads the tensors of a safetensors file by name.
inline Tensors read_safetensors(const std::filesystem::path& path) {
  const std::string content = read_file(path);
  try {
    std::uint64_t length = 0;
    if (content.size() < sizeof length) throw Error("it is too short");
    std::memcpy(&length, content.data(), sizeof length);
    if (length > content.size() - sizeof length) throw Error("its header is longer than the file");
    const std::string_view data = std::string_view(content).substr(sizeof length + length);
    Tensors tensors;
    for (const auto& [name, entry] : json::read(std::string_view(content).substr(sizeof length, length)).members) {
      if (name != "__metadata__") tensors.emplace(name, detail::safetensor(entry, data));
    }
    return tensors;
  } catch (const std::runtime_error& error) {
    throw Error("'" + path.string() + "' is not a safetensors file of states: " + error.what());
  }
}

// Writes tensors as safetensors to a temporary file and renames it, so that the file is never incomplete.
inline void write_safetensors(const std::filesystem::path& path, const std::map<std::string, const Tensor*>& tensors) {
  std::string header = "{";
  std::size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    std::string shape = tensor->shape_text();
    header += (header.size() > 1 ? "," : "") + json::quoted(name) + ":{\"dtype\":\"" + element_type(tensor->type()).name +
              "\",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(offset) + "," +
              std::to_string(offset + tensor->bytes()) + "]}";
    offset += tensor->bytes();
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const std::filesystem::path unfinished = path.string() + ".unfinished";
  std::ofstream file(unfinished, std::ios::binary);
  const std::uint64_t length = header.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  for (const auto& [name, tensor] : tensors) {
    file.write(static_cast<const char*>(tensor->data()), static_cast<std::streamsize>(tensor->bytes()));
  }
  file.close();
  if (!file) throw Error("'" + path.string() + "' cannot be written.");
  std::filesystem::rename(unfinished, path);
}

}  // namespace onnxtrain
