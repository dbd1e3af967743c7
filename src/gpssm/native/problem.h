// What a chain is handed, where each array lies, and the accumulators of its gradient.
#pragma once

#include <cstdint>
#include <vector>

#include "products.h"

namespace gpssm {

enum class Proposal : int64_t { kState, kMean, kValue, kFreshValue };
enum class Kernel : int64_t { kSquaredExponential, kMatern12, kMatern32, kMatern52, kRationalQuadratic };

struct Sizes {
  int64_t sequences, samples, steps, states, inputs, groups, inducing, waves;  // waves: 0 unless f is drawn as a function
  Proposal proposal;
  bool is_full;      // gain and scale are matrices, not their diagonals
  bool is_marginal;  // v is integrated out with the covariance of q(v)
  const int64_t* kernels;

  int64_t controls() const { return inputs - states; }
  int64_t square() const { return is_full ? states * states : states; }
  bool is_spread() const { return proposal == Proposal::kMean || proposal == Proposal::kFreshValue; }
  int64_t features() const { return 2 * waves; }  // cosines, then sines
  int64_t feature_stride() const { return RoundUp(features()) + 1; }
  int64_t stride() const { return RoundUp(inducing) + 1; }  // of a row of numbers, so that rows do not fall on the same cache lines
};

// Differentiable arrays in the order in which they are handed over. Those of the model come first, then those of a sequence's
// steps, then those of a trajectory.
enum Array {
  kWhitener,      // [group, inducing, inducing], lower
  kInducing,      // [group, inducing, input], in units of the lengthscales
  kInverseScales, // [group, input]
  kVariance,      // [group]
  kMixture,       // [group], of rational quadratics
  kMeanMatrix,    // [state, input]
  kMeanOffset,    // [state]
  kPrecision,     // [state], 1 / Q
  kCholInducing,  // [state, inducing, inducing], or nothing
  kFrequencies,   // [group, wave, input], or nothing
  kAmplitudes,    // [group, wave], or nothing
  kAtInducing,    // [group, inducing, feature]: the whitener times the features of the inducing inputs, or nothing
  kControls,      // [sequence, step, control]
  kGain,          // [sequence, step, square]
  kOffset,        // [sequence, step, state]
  kScale,         // [sequence, step, square]: the covariance S where f's variance joins it, else its factor
  kWeight,        // [sequence, step, state]: what a unit of f's variance adds to twice the divergence
  kFirst,         // [sequence, sample, state]
  kNoise,         // [sequence, sample, step, state]
  kValues,        // [sequence, sample, state, inducing]
  kFeatureWeights, // [sequence, sample, state, feature], or nothing
  kNumArrays,
  kNumShared = kFirst
};

inline int64_t SizeOf(const Sizes& z, int array) {
  const int64_t rows = z.sequences * z.steps, paths = z.sequences * z.samples;
  switch (array) {
    case kWhitener: return z.groups * z.inducing * z.inducing;
    case kInducing: return z.groups * z.inducing * z.inputs;
    case kInverseScales: return z.groups * z.inputs;
    case kVariance: case kMixture: return z.groups;
    case kMeanMatrix: return z.states * z.inputs;
    case kMeanOffset: case kPrecision: return z.states;
    case kCholInducing: return z.is_marginal ? z.states * z.inducing * z.inducing : 0;
    case kFrequencies: return z.groups * z.waves * z.inputs;
    case kAmplitudes: return z.groups * z.waves;
    case kAtInducing: return z.groups * z.inducing * z.features();
    case kControls: return rows * z.controls();
    case kGain: case kScale: return rows * z.square();
    case kOffset: case kWeight: return rows * z.states;
    case kFirst: return paths * z.states;
    case kNoise: return paths * z.steps * z.states;
    case kFeatureWeights: return paths * z.states * z.features();
    default: return paths * z.states * z.inducing;
  }
}

template <typename T>
struct Inputs {
  const T* arrays[kNumArrays];
  const bool* is_real;  // [sequence, step]
  const T* operator[](int array) const { return arrays[array]; }
};

// The matrices that stay the same along the chain, packed for the products of both directions.
template <typename T>
struct Matrices {
  std::vector<Packed<T>> whitener, whitener_transposed, chol, chol_transposed, at_inducing, at_inducing_transposed;

  Matrices(const Sizes& z, const Inputs<T>& in) {
    const int64_t size = z.inducing, step = size * size;
    for (int64_t g = 0; g < z.groups; ++g) {
      whitener.emplace_back(in[kWhitener] + g * step, size, size, size, 1, Shape::kLower);
      whitener_transposed.emplace_back(in[kWhitener] + g * step, size, size, 1, size, Shape::kUpper);
    }
    for (int64_t d = 0; d < (z.is_marginal ? z.states : 0); ++d) {
      chol.emplace_back(in[kCholInducing] + d * step, size, size, size, 1, Shape::kDense);
      chol_transposed.emplace_back(in[kCholInducing] + d * step, size, size, 1, size, Shape::kDense);
    }
    const int64_t features = z.features();
    for (int64_t g = 0; g < (z.waves ? z.groups : 0); ++g) {
      const T* matrix = in[kAtInducing] + g * size * features;
      at_inducing.emplace_back(matrix, size, features, features, 1, Shape::kDense);
      at_inducing_transposed.emplace_back(matrix, features, size, 1, features, Shape::kDense);
    }
  }
};

}  // namespace gpssm
