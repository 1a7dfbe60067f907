// Runs the conformance suite on ONNX Runtime's C API, by the protocol of run.py:
//
//   ln -s "$(python -c 'import pathlib, onnxruntime as o; print(next(pathlib.Path(o.__file__).parent.glob("capi/libonnxruntime.so.*")))')" libonnxruntime.so.1
//   g++ -std=c++17 -O1 -I include conformance/run.cpp libonnxruntime.so.1 -Wl,-rpath,. -o run_suite
//   python conformance/run.py FOLDER --command ./run_suite
//
// For another runtime, replace the class Runtime.
#include <cmath>
#include <iostream>
#include <optional>
#include <sstream>

#include "onnxtrain/json.hpp"
#include "onnxtrain/ort.hpp"
#include "onnxtrain/tensor.hpp"

namespace {

using onnxtrain::Error;
using onnxtrain::Tensor;
namespace ort = onnxtrain::ort;
namespace json = onnxtrain::json;
using Path = std::filesystem::path;

struct Named {
  std::string name;
  Tensor tensor;
};

std::uint64_t varint(std::string_view bytes, std::size_t& at) {
  std::uint64_t value = 0;
  for (int shift = 0; at < bytes.size() && shift < 64; shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes[at++]);
    value |= static_cast<std::uint64_t>(byte & 127) << shift;
    if (byte < 128) return value;
  }
  throw Error("a tensor of the data set is cut off");
}

// Reads a TensorProto that holds raw data, as write.py writes it: dims 1, data_type 2, name 8, raw_data 9.
Named read_tensor(const Path& path) {
  const std::string content = onnxtrain::read_file(path);
  const std::string_view bytes = content;
  std::vector<std::int64_t> shape;
  int type = 0;
  std::string name;
  std::string_view raw;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::uint64_t key = varint(bytes, at), value = varint(bytes, at);
    const std::uint64_t field = key >> 3, wire = key & 7;
    if (wire == 0) {
      if (field == 1) shape.push_back(static_cast<std::int64_t>(value));
      if (field == 2) type = static_cast<int>(value);
      continue;
    }
    if (wire != 2 || value > bytes.size() - at) throw Error("'" + path.string() + "' is no tensor with raw data");
    const std::string_view part = bytes.substr(at, value);
    at += value;
    if (field == 1) {
      for (std::size_t place = 0; place < part.size();) shape.push_back(static_cast<std::int64_t>(varint(part, place)));
    }
    if (field == 8) name = part;
    if (field == 9) raw = part;
  }
  Named found{name, Tensor(type, shape)};
  if (raw.size() != found.tensor.bytes()) throw Error("'" + path.string() + "' has data of another size than its shape");
  std::memcpy(found.tensor.data(), raw.data(), raw.size());
  return found;
}

std::vector<Named> read_tensors(const Path& data, const char* prefix) {
  std::vector<Named> found;
  for (int index = 0;; ++index) {
    const Path path = data / (prefix + std::to_string(index) + ".pb");
    if (!std::filesystem::exists(path)) return found;
    found.push_back(read_tensor(path));
  }
}

// A model on ONNX Runtime's CPU provider. Outputs are bound to tensors of the expected types and shapes.
class Runtime {
 public:
  explicit Runtime(const Path& model) : api_(ort::table(OrtGetApiBase())), env_(api_), memory_(api_), session_(api_) {
    check(ort::CreateEnv::call(api_, 4, "conformance", env_.out()));
    check(ort::CreateCpuMemoryInfo::call(api_, 0, 0, memory_.out()));
    ort::SessionOptions settings(api_);
    check(ort::CreateSessionOptions::call(api_, settings.out()));
    check(ort::SetIntraOpNumThreads::call(api_, settings.get(), 1));
    const std::string bytes = onnxtrain::read_file(model);
    check(ort::CreateSessionFromArray::call(api_, env_.get(), bytes.data(), bytes.size(), settings.get(), session_.out()));
  }

  void run(const std::vector<Named>& inputs, std::vector<Named>& outputs) {
    ort::IoBinding binding(api_);
    check(ort::CreateIoBinding::call(api_, session_.get(), binding.out()));
    std::vector<ort::Value> values;
    for (const Named& input : inputs) {
      values.push_back(value_of(input.tensor));
      check(ort::BindInput::call(api_, binding.get(), input.name.c_str(), values.back().get()));
    }
    for (Named& output : outputs) {
      values.push_back(value_of(output.tensor));
      check(ort::BindOutput::call(api_, binding.get(), output.name.c_str(), values.back().get()));
    }
    check(ort::RunWithBinding::call(api_, session_.get(), nullptr, binding.get()));
  }

 private:
  void check(OrtStatus* status) const { ort::check(api_, status); }

  ort::Value value_of(const Tensor& tensor) const {
    ort::Value value(api_);
    check(ort::CreateTensorWithData::call(api_, memory_.get(), const_cast<void*>(tensor.data()), tensor.bytes(),
                                          tensor.shape().data(), tensor.shape().size(), tensor.type(), value.out()));
    return value;
  }

  const OrtApi* api_;
  ort::Env env_;
  ort::MemoryInfo memory_;
  ort::Session session_;
};

double element(const Tensor& tensor, std::size_t index) {
  switch (tensor.type()) {
    case 1: return static_cast<const float*>(tensor.data())[index];
    case 2: case 9: return static_cast<const std::uint8_t*>(tensor.data())[index];
    case 3: return static_cast<const std::int8_t*>(tensor.data())[index];
    case 6: return static_cast<const std::int32_t*>(tensor.data())[index];
    case 7: return static_cast<double>(static_cast<const std::int64_t*>(tensor.data())[index]);
    case 11: return static_cast<const double*>(tensor.data())[index];
    default: throw Error("the element type " + std::to_string(tensor.type()) + " is not compared");
  }
}

// Says how an output differs from the expected one; nothing where it agrees.
std::string compare(const Tensor& found, const Tensor& expected, double rtol, double atol) {
  const std::size_t count = expected.bytes() / onnxtrain::element_type(expected.type()).size;
  for (std::size_t index = 0; index < count; ++index) {
    const double value = element(found, index), wanted = element(expected, index);
    const bool close = std::abs(value - wanted) <= atol + rtol * std::abs(wanted);
    if (close || value == wanted || (std::isnan(value) && std::isnan(wanted))) continue;
    std::ostringstream text;
    text << "is " << value << " at " << index << ", not " << wanted;
    return text.str();
  }
  return "";
}

std::string refused(const std::exception& error) {
  std::string text = error.what();
  for (char& letter : text) letter = letter == '\n' ? ' ' : letter;
  return "refused " + text.substr(0, 300);
}

// Runs all data sets of a case; from the second on, outputs of the runtime itself replace inputs.
std::string run_case(const Path& folder) {
  if (folder.parent_path().filename() == "training_info") return "refused the runtime does not read training_info";
  const json::Value about = json::read(onnxtrain::read_file(folder / "data.json"));
  std::optional<Runtime> runtime;
  try {
    runtime.emplace(folder / "model.onnx");
  } catch (const std::exception& error) {
    return refused(error);
  }
  std::map<std::string, Tensor> fed;
  for (int number = 0; number < static_cast<int>(about.find("data_sets")->number); ++number) {
    const Path data = folder / ("test_data_set_" + std::to_string(number));
    std::vector<Named> inputs = read_tensors(data, "input_"), expected = read_tensors(data, "output_"), outputs;
    for (Named& input : inputs) {
      if (const auto found = fed.find(input.name); found != fed.end()) input.tensor = found->second.copy();
    }
    for (const Named& wanted : expected) {
      outputs.push_back({wanted.name, Tensor(wanted.tensor.type(), wanted.tensor.shape())});
    }
    try {
      runtime->run(inputs, outputs);
    } catch (const std::exception& error) {
      return refused(error);
    }
    for (std::size_t index = 0; index < expected.size(); ++index) {
      const std::string difference = compare(outputs[index].tensor, expected[index].tensor, about.find("rtol")->number,
                                             about.find("atol")->number);
      if (!difference.empty()) {
        return "wrong " + expected[index].name + " of data set " + std::to_string(number) + " " + difference;
      }
    }
    for (const auto& [output, input] : about.find("feedback")->members) {
      for (const Named& found : outputs) {
        if (found.name == output) fed[input.text] = found.tensor.copy();
      }
    }
  }
  return "passed";
}

}  // namespace

int main() {
  using GetVersion = const char* (*)();
  const char* version = reinterpret_cast<const GetVersion*>(OrtGetApiBase())[1]();
  std::cout << "RUNTIME onnxruntime-c++ " << version << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << "RESULT " << run_case(line) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "RESULT " << refused(error) << std::endl;
    }
  }
}
