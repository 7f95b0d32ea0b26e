// ONNX Runtime in C++: decode over shared caches, bound once and written in place.
//
//   posexport export --encoding rope --causal --kv-cache shared --form contrib --target ort -o block.onnx
//   ort_decode block.onnx                         made-up states, norms on stdout
//   ort_decode block.onnx states.f32 outputs.f32  raw fp32 rows [tokens, hidden] in and out
//
// The first half of the tokens comes as one prompt, the rest one by one. fp32, encodings of one axis, batch 1, without
// --padding-mask. Caches have room for all tokens, or a fixed number of places if exported with --max-seq.

#include <onnxruntime_cxx_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Shape = std::vector<int64_t>;

int64_t size_of(const Shape& shape) {
  int64_t size = 1;
  for (int64_t dim : shape) size *= dim;
  return size;
}

class Decoder {
 public:
  explicit Decoder(const std::string& model)
      : session_(env_, std::basic_string<ORTCHAR_T>(model.begin(), model.end()).c_str(), Ort::SessionOptions{}),
        binding_(session_),
        memory_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)) {
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      const std::string name = session_.GetInputNameAllocated(i, allocator).get();
      const auto info = session_.GetInputTypeInfo(i);
      const auto tensor = info.GetTensorTypeAndShapeInfo();
      shapes_[name] = tensor.GetShape();
      const auto type = tensor.GetElementType();
      if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        throw std::runtime_error("input " + name + " is neither fp32 nor int64: export with --dtype fp32");
    }
    if (!shapes_.count("write_indices") || !shapes_.count("hidden_states"))
      throw std::runtime_error(model + " has no shared caches: export it with --causal --kv-cache shared");
    if (shapes_.count("attention_mask"))
      throw std::runtime_error(model + " takes an attention_mask, which one sequence needs not: drop --padding-mask");
  }

  int64_t hidden() const { return shapes_.at("hidden_states").back(); }

  // Empty caches with room for so many tokens, or for the model's fixed number of places.
  void start(int64_t room) {
    room_ = room;
    length_ = 0;
    for (const auto& [name, shape] : shapes_) {
      if (name.rfind("past_", 0) != 0) continue;  // [batch, heads, places, head_dim]
      if (shape[2] > 0) room_ = shape[2];
      const Shape cache{1, shape[1], room_, shape[3]};
      std::vector<float>& buffer = caches_[name];
      buffer.assign(size_of(cache), 0.0f);
      // One buffer is the cache that goes in and the cache that comes out.
      binding_.BindInput(name.c_str(), tensor(buffer, cache));
      binding_.BindOutput(("present_" + name.substr(5)).c_str(), tensor(buffer, cache));
    }
  }

  // `states` holds rows [tokens, hidden]; the output of the same shape goes to `output`.
  void feed(std::vector<float> states, float* output) {
    const int64_t count = static_cast<int64_t>(states.size()) / hidden();
    if (length_ + count > room_)
      throw std::runtime_error(std::to_string(length_ + count) + " tokens don't fit into caches of " +
                               std::to_string(room_) + " places");
    std::vector<int64_t> positions(count), place{length_};
    for (int64_t i = 0; i < count; ++i) positions[i] = length_ + i;
    const Shape rows{1, count, hidden()};
    binding_.BindInput("hidden_states", tensor(states, rows));
    if (shapes_.count("position_ids")) {
      // A file with consecutive positions takes the first of them.
      const int64_t given = shapes_["position_ids"][1] == 1 ? 1 : count;
      binding_.BindInput("position_ids", tensor(positions, {1, given}));
    }
    binding_.BindInput("write_indices", tensor(place, {1}));
    binding_.BindOutput("output", Ort::Value::CreateTensor<float>(memory_, output, states.size(), rows.data(), 3));
    session_.Run(Ort::RunOptions{}, binding_);
    length_ += count;
  }

 private:
  template <typename T>
  Ort::Value tensor(std::vector<T>& data, const Shape& shape) {
    return Ort::Value::CreateTensor<T>(memory_, data.data(), data.size(), shape.data(), shape.size());
  }

  Ort::Env env_{ORT_LOGGING_LEVEL_WARNING, "ort_decode"};
  Ort::Session session_;
  Ort::IoBinding binding_;
  Ort::MemoryInfo memory_;
  std::map<std::string, Shape> shapes_;
  std::map<std::string, std::vector<float>> caches_;
  int64_t room_ = 0, length_ = 0;
};

std::vector<float> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error("can't read " + path);
  std::vector<float> values(static_cast<size_t>(file.tellg()) / sizeof(float));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), values.size() * sizeof(float));
  return values;
}

int run(int argc, char** argv) {
  Decoder decoder(argv[1]);
  const int64_t hidden = decoder.hidden();
  std::vector<float> states = argc == 4 ? read(argv[2]) : std::vector<float>(24 * hidden);
  for (size_t i = 0; argc != 4 && i < states.size(); ++i) states[i] = std::sin(static_cast<float>(i));
  if (states.empty() || states.size() % hidden) throw std::runtime_error("states are not rows of the hidden size");
  const int64_t tokens = static_cast<int64_t>(states.size()) / hidden, prompt = (tokens + 1) / 2;
  std::vector<float> outputs(states.size());
  decoder.start(tokens);
  decoder.feed({states.begin(), states.begin() + prompt * hidden}, outputs.data());
  for (int64_t at = prompt; at < tokens; ++at) {
    float* output = outputs.data() + at * hidden;
    decoder.feed({states.begin() + at * hidden, states.begin() + (at + 1) * hidden}, output);
    double sum = 0;
    for (int64_t i = 0; i < hidden; ++i) sum += static_cast<double>(output[i]) * output[i];
    std::printf("token %lld: output of norm %.6f\n", static_cast<long long>(at), std::sqrt(sum));
  }
  if (argc == 4) {
    std::ofstream file(argv[3], std::ios::binary);
    file.write(reinterpret_cast<const char*>(outputs.data()), outputs.size() * sizeof(float));
    if (!file.flush()) throw std::runtime_error(std::string("can't write ") + argv[3]);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "usage: ort_decode block.onnx [states.f32 outputs.f32]\n");
    return 2;
  }
#ifndef _WIN32
  setenv("ORT_DISABLE_TELEMETRY", "1", 1);  // before the first Ort::Env, which otherwise writes files and sends them
#endif
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {  // Ort::Exception is one
    std::fprintf(stderr, "Error: %s\n", error.what());
    return 2;
  }
}
