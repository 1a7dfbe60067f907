// The update rules as calls: attributes, learning rate R and update count T become scalars in float64, and the kernels
// run over all variables together. Nothing here knows ONNX Runtime; a wrong attribute is a std::invalid_argument.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "optimizers/variables.h"

namespace onnxtrain {

struct AdagradAttributes {
  double decay_factor = 0.0, epsilon = 1e-6f, norm_coefficient = 0.0;
};

struct AdamAttributes {
  double alpha = 0.9f, beta = 0.999f, epsilon = 1e-6f, norm_coefficient = 0.0, norm_coefficient_post = 0.0;
};

struct MomentumAttributes {
  double alpha = 0.0, beta = 0.0, norm_coefficient = 0.0;
  bool nesterov = false;
};

struct SsgdAttributes {
  Measure measure = kLogSum;
  bool l1 = false;
  double epsilon = 0.01f, p = 0.5, regularization = 0.0, alpha = 0.0, norm_coefficient = 0.0, max_scale = 0.0;

  void check() const;
};

// The names that the attributes `mode`, `measure` and `reweighting` take.
bool nesterov_from(const std::string& mode);
Measure measure_from(const std::string& name);
bool l1_from(const std::string& reweighting);

void run_adagrad(const AdagradAttributes& attributes, double R, std::int64_t T, const std::vector<Variable>& variables,
                 const ParallelFor& parallel_for);
void run_adam(const AdamAttributes& attributes, double R, std::int64_t T, const std::vector<Variable>& variables,
              const ParallelFor& parallel_for);
void run_momentum(const MomentumAttributes& attributes, double R, std::int64_t T,
                  const std::vector<Variable>& variables, const ParallelFor& parallel_for);
void run_ssgd(const SsgdAttributes& attributes, double R, const std::vector<Variable>& variables,
              const ParallelFor& parallel_for);

}  // namespace onnxtrain
