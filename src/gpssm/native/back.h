// The gradient of a chain. Its states are all that the way forward leaves behind: each step is computed again on the way back.
#pragma once

#include <algorithm>
#include <vector>

#include "walk.h"

namespace gpssm {

// Sums of what trajectories add to the gradient of arrays that they share; one for each worker, added up in a fixed order.
template <typename T>
struct Sums {
  std::vector<T> arrays[kNumShared];

  explicit Sums(const Sizes& z) {
    for (int array = 0; array < kNumShared; ++array) arrays[array].assign(SizeOf(z, array), T(0));
  }
  T* operator[](int array) { return arrays[array].data(); }
};

// Pairs of vectors whose outer products, summed over steps, are the gradient of a matrix: added a few dozen steps at a time, so
// that no step has a product of its own for it.
template <typename T>
class Pairs {
  using V = Vector<T>;

 public:
  Pairs(int64_t num_left, int64_t num_right, int64_t num_slots, bool is_lower)
      : num_left(num_left), num_right(num_right), left_stride(RoundUp(num_left) + 1), right_stride(RoundUp(num_right) + 1),
        num_slots(num_slots), is_lower(is_lower), left(left_stride * num_slots), right(right_stride * num_slots) {}

  V* Left(int64_t slot) { return &left[slot * left_stride]; }
  V* Right(int64_t slot) { return &right[slot * right_stride]; }

  void AddTo(T* sum, int64_t num_filled) const {
    AddOuterProducts<T>(left.data(), left_stride, num_left, right.data(), right_stride, num_right, num_filled, is_lower, sum);
  }

 private:
  int64_t num_left, num_right, left_stride, right_stride, num_slots;
  bool is_lower;
  std::vector<V> left, right;
};

template <typename T>
class Back {
  using V = Vector<T>;

 public:
  Back(const Sizes& z, const Inputs<T>& in, const Matrices<T>& matrices, Sums<T>& sums)
      : z(z), in(in), walk(z, in, matrices), matrices(matrices), sums(sums), num_slots(Slots(z)),
        to_state(z.states), to_point(z.inputs), to_mean(z.states), to_variance(z.states), to_chol(z.states * z.states), to_residual(z.groups),
        to_weights(z.groups * z.stride()), to_covariances(z.groups * z.stride()), to_explained(z.stride()), to_values(z.states * z.stride()),
        to_feature_weights(z.states * z.feature_stride()), to_explained_waves(z.stride()) {
    for (int64_t g = 0; g < z.groups; ++g) {
      whitener.emplace_back(z.inducing, z.inducing, num_slots, true);
      distances.emplace_back(z.inducing, z.inputs + 1, num_slots, false);
    }
    for (int64_t d = 0; d < (z.is_marginal ? z.states : 0); ++d) chol.emplace_back(z.inducing, z.inducing, num_slots, false);
    for (int64_t g = 0; g < (z.waves ? z.groups : 0); ++g) {
      at_inducing.emplace_back(z.inducing, z.features(), num_slots, false);
      frequencies.emplace_back(z.waves, z.inputs, num_slots, false);
    }
    inducing_sums.resize(z.groups * z.inducing * (z.inputs + 1));
  }

  // The gradient along the trajectories that begin with `sample`: what is shared is summed, what is theirs is written.
  void Along(int64_t sequence, int64_t sample, int count, const T* states, const T* from_states, const T* from_divergence,
             T* const* own) {
    walk.Enter(sequence, sample, count);
    is_here = V{};
    for (int lane = 0; lane < count; ++lane) is_here[lane] = T(1);
    const V divergence = is_here * Gather(from_divergence + walk.path, 1, count);
    std::fill(to_values.begin(), to_values.end(), V{});
    std::fill(to_feature_weights.begin(), to_feature_weights.end(), V{});
    for (int64_t d = 0; d < z.states; ++d) to_state[d] = FromState(from_states, z.steps, d);
    for (int64_t step = z.steps - 1; step >= 0; --step) {
      if (walk.IsReal(step)) {
        walk.LoadState(states, step);
        walk.LoadNoise(step);
        walk.Look(step);
        walk.Propose(step);
        StepBack(step, divergence, own[kNoise - kNumShared]);
      }
      for (int64_t d = 0; d < z.states; ++d) to_state[d] += FromState(from_states, step, d);
    }
    for (int64_t d = 0; d < z.states; ++d) {
      Scatter(to_state[d], own[kFirst - kNumShared] + walk.path * z.states + d, z.states, count);
      for (int64_t m = 0; m < z.inducing; ++m) {
        T* first = own[kValues - kNumShared] + (walk.path * z.states + d) * z.inducing + m;
        Scatter(to_values[d * z.stride() + m], first, z.states * z.inducing, count);
      }
      for (int64_t j = 0; j < z.features(); ++j) {
        T* first = own[kFeatureWeights - kNumShared] + (walk.path * z.states + d) * z.features() + j;
        Scatter(to_feature_weights[d * z.feature_stride() + j], first, z.states * z.features(), count);
      }
    }
  }

  // To be called once, after the last trajectory.
  void Finish() {
    Flush();
    const int64_t width = z.inputs + 1;
    for (int64_t row = 0; row < z.groups * z.inducing; ++row) {
      for (int64_t i = 0; i < z.inputs; ++i) {
        const T z_i = in[kInducing][row * z.inputs + i];
        sums[kInducing][row * z.inputs + i] += 2 * (z_i * inducing_sums[row * width + z.inputs] - inducing_sums[row * width + i]);
      }
    }
  }

 private:
  // As many steps as let what they leave fit into a second-level cache.
  static int64_t Slots(const Sizes& z) {
    const int64_t marginal = z.is_marginal ? z.states : 0, waves = z.waves ? z.groups : 0;
    const int64_t a_step = (2 * (z.groups + marginal) * z.stride() + 2 * waves * z.feature_stride()) * kBytes;
    return std::clamp<int64_t>((int64_t(1) << 20) / a_step, 8, 64);
  }

  V FromState(const T* from_states, int64_t step, int64_t d) const {
    const T* first = from_states + (walk.path * (z.steps + 1) + step) * z.states + d;
    return is_here * Gather(first, (z.steps + 1) * z.states, walk.count);
  }

  void StepBack(int64_t step, V divergence, T* to_noise) {
    Unmove(step, to_noise);
    Unpropose(step, divergence);
    Unlook(step);
    if (++num_filled == num_slots) Flush();
  }

  // From the new state to its mean, its factor and the noise; `to_state` is then what goes to the mean.
  void Unmove(int64_t step, T* to_noise) {
    const int64_t size = z.states;
    T* first = to_noise + (walk.path * z.steps + step) * size;
    for (int64_t j = 0; j < size; ++j) {
      V total = {};
      if (!z.is_full) {
        total = walk.chol[j] * to_state[j];
        to_chol[j] = to_state[j] * walk.noise[j];
      }
      for (int64_t i = z.is_spread() ? j : 0; i < size && z.is_full; ++i) {
        total += walk.chol[i * size + j] * to_state[i];
        to_chol[i * size + j] = to_state[i] * walk.noise[j];
      }
      Scatter(total, first + j, z.steps * size, walk.count);
    }
  }

  // From the proposal and its divergence to the moments of f, the step's parameters and, where it is the base, the old state.
  void Unpropose(int64_t step, V divergence) {
    const int64_t size = z.states, row = walk.Row(step);
    const T *gain = in[kGain] + row * z.square(), *weight = in[kWeight] + row * size;
    T *to_gain = sums[kGain] + row * z.square(), *to_offset = sums[kOffset] + row * size, *to_weight = sums[kWeight] + row * size;
    for (int64_t d = 0; d < size; ++d) {
      const V difference = walk.proposed[d] - walk.mean[d], pull = divergence * in[kPrecision][d] * difference;
      sums[kPrecision][d] += Sum<T>(T(0.5) * divergence * difference * difference);
      to_weight[d] += Sum<T>(T(0.5) * divergence * walk.variance[d]);
      to_variance[d] = T(0.5) * divergence * weight[d];
      to_state[d] += pull;
      to_mean[d] = -pull;
      to_offset[d] += Sum<T>(to_state[d]);
      const int64_t diagonal = walk.Diagonal(d);
      if (z.proposal == Proposal::kMean) to_chol[diagonal] -= divergence / walk.chol[diagonal];
    }
    const bool is_state = z.proposal == Proposal::kState;
    const std::vector<V>& base = is_state ? walk.state : walk.mean;
    std::fill(to_point.begin(), to_point.end(), V{});
    std::vector<V>& to_base = is_state ? to_point : to_mean;
    for (int64_t i = 0; i < size; ++i) {
      if (!z.is_full) {
        to_gain[i] += Sum<T>(to_state[i] * base[i]);
        to_base[i] += gain[i] * to_state[i];
      }
      for (int64_t j = 0; j < size && z.is_full; ++j) {
        to_gain[i * size + j] += Sum<T>(to_state[i] * base[j]);
        to_base[j] += gain[i * size + j] * to_state[i];
      }
    }
    if (z.is_spread()) z.is_full ? Unfactorise() : UnfactoriseDiagonal();
    AddScale(row, gain, to_gain);
  }

  // From the covariance P = S + A diag(var) Aᵀ, or from a factor that f's variance does not touch.
  void AddScale(int64_t row, const T* gain, T* to_gain) {
    const int64_t size = z.states;
    T* to_scale = sums[kScale] + row * z.square();
    for (int64_t i = 0; i < size; ++i) {
      if (!z.is_full) {
        to_scale[i] += Sum<T>(to_chol[i]);
        if (!z.is_spread()) continue;
        to_gain[i] += Sum<T>(2 * gain[i] * walk.variance[i] * to_chol[i]);
        to_variance[i] += gain[i] * gain[i] * to_chol[i];
        continue;
      }
      for (int64_t j = 0; j < (z.is_spread() ? i + 1 : size); ++j) {
        const V to = to_chol[i * size + j];
        to_scale[i * size + j] += Sum<T>(to);
        for (int64_t k = 0; k < size && z.is_spread(); ++k) {
          const T through = Sum<T>(to * walk.variance[k]);
          to_gain[i * size + k] += through * gain[j * size + k];
          to_gain[j * size + k] += through * gain[i * size + k];
          to_variance[k] += gain[i * size + k] * gain[j * size + k] * to;
        }
      }
    }
  }

  void UnfactoriseDiagonal() {
    for (int64_t d = 0; d < z.states; ++d) to_chol[d] = T(0.5) * to_chol[d] / walk.chol[d];
  }

  // The reverse of `Factorise`, row by row from the last, in place: from the factor to the lower triangle of the covariance.
  void Unfactorise() {
    const int64_t size = z.states;
    const std::vector<V>& L = walk.chol;
    for (int64_t j = size - 1; j >= 0; --j) {
      const V inverse = 1 / L[j * size + j];
      for (int64_t i = size - 1; i > j; --i) {
        const V to = to_chol[i * size + j] * inverse;
        to_chol[i * size + j] = to;
        to_chol[j * size + j] -= to * L[i * size + j];
        for (int64_t k = 0; k < j; ++k) {
          to_chol[i * size + k] -= to * L[j * size + k];
          to_chol[j * size + k] -= to * L[i * size + k];
        }
      }
      const V to = T(0.5) * to_chol[j * size + j] * inverse;
      to_chol[j * size + j] = to;
      for (int64_t k = 0; k < j; ++k) to_chol[j * size + k] -= 2 * to * L[j * size + k];
    }
  }

  // From the moments of f to the state they were asked at, v and the model.
  void Unlook(int64_t step) {
    std::fill(to_weights.begin(), to_weights.end(), V{});
    std::fill(to_residual.begin(), to_residual.end(), V{});
    for (int64_t d = 0; d < z.states; ++d) {
      const int64_t start = walk.Group(d) * z.stride();
      const V *a = &walk.weights[start], *values = &walk.values[d * z.stride()];
      V *to_a = &to_weights[start], *to_v = &to_values[d * z.stride()];
      for (int64_t m = 0; m < z.inducing; ++m) {
        to_a[m] += to_mean[d] * values[m];
        to_v[m] += to_mean[d] * a[m];
      }
      sums[kMeanOffset][d] += Sum<T>(to_mean[d]);
      for (int64_t i = 0; i < z.inputs; ++i) {
        sums[kMeanMatrix][d * z.inputs + i] += Sum<T>(to_mean[d] * walk.point[i]);
        to_point[i] += in[kMeanMatrix][d * z.inputs + i] * to_mean[d];
      }
      if (z.is_marginal) Unexplain(d, a, to_a);
      if (!z.waves) to_residual[walk.Group(d)] += to_variance[d];
    }
    for (int64_t g = 0; g < (z.waves ? z.groups : 0); ++g) Unoscillate(g);
    for (int64_t g = 0; g < z.groups; ++g) Unproject(g);
    T* to_control = sums[kControls] + walk.Row(step) * z.controls();
    for (int64_t i = 0; i < z.inputs; ++i) {
      if (i < z.states) to_state[i] = to_point[i];
      else to_control[i - z.states] += Sum<T>(to_point[i]);
    }
  }

  void Unexplain(int64_t d, const V* a, V* to_a) {
    const V* e = &walk.explained[d * z.stride()];
    V *left = chol[d].Left(num_filled), *right = chol[d].Right(num_filled);
    for (int64_t m = 0; m < z.inducing; ++m) {
      left[m] = a[m];
      right[m] = 2 * to_variance[d] * e[m];
    }
    matrices.chol[d].Multiply(right, to_explained.data());
    for (int64_t m = 0; m < z.inducing; ++m) to_a[m] += to_explained[m];
  }

  // From f's values to the features' weights, what the features are made of, a and the residual's variance.
  void Unoscillate(int64_t g) {
    const int64_t stride = z.feature_stride(), first = g * z.waves;
    const V *waves = &walk.residual_waves[g * stride], *a = &walk.weights[g * z.stride()];
    V *left = at_inducing[g].Left(num_filled), *to_waves = at_inducing[g].Right(num_filled);
    V to_magnitude = {};
    std::fill(to_waves, to_waves + z.features(), V{});
    for (int64_t d = 0; d < z.states; ++d) {
      if (walk.Group(d) != g) continue;
      const V to = to_mean[d] * walk.magnitude[g], *w = &walk.feature_weights[d * stride];
      V* to_w = &to_feature_weights[d * stride];
      for (int64_t j = 0; j < z.features(); ++j) to_waves[j] += to * w[j], to_w[j] += to * waves[j];
      to_magnitude += to_mean[d] * walk.wave[d];
    }
    const V variance = walk.residual[g], half = T(0.5) * to_magnitude * walk.magnitude[g];
    const auto is_bounded = walk.power[g] < variance * T(1e-6);
    to_residual[g] += is_bounded ? V{} : half / variance;
    const V to_power = is_bounded ? V{} : -half / walk.power[g];
    for (int64_t j = 0; j < z.features(); ++j) to_waves[j] += 2 * to_power * waves[j];
    matrices.at_inducing[g].Multiply(to_waves, to_explained_waves.data());
    V* to_a = &to_weights[g * z.stride()];
    for (int64_t m = 0; m < z.inducing; ++m) left[m] = -a[m], to_a[m] -= to_explained_waves[m];
    V *to_angle = frequencies[g].Left(num_filled), *points = frequencies[g].Right(num_filled);
    for (int64_t j = 0; j < z.waves; ++j) {
      const T amplitude = in[kAmplitudes][first + j];
      const V c = walk.cosines[first + j], s = walk.sines[first + j], to_c = to_waves[j], to_s = to_waves[z.waves + j];
      sums[kAmplitudes][first + j] += Sum<T>(to_c * c + to_s * s);
      to_angle[j] = amplitude * (to_s * c - to_c * s);
      for (int64_t i = 0; i < z.inputs; ++i) to_point[i] += in[kFrequencies][(first + j) * z.inputs + i] * to_angle[j];
    }
    std::copy(walk.point.begin(), walk.point.end(), points);
  }

  void Unproject(int64_t g) {
    const V residual = to_residual[g], clamped = walk.is_clamped[g];
    const V prior = residual * (1 - clamped + clamped * Lanes<T>::kEpsilon), power = residual * (clamped - 1);
    const int64_t start = g * z.stride();
    const V *a = &walk.weights[start], *k = &walk.covariances[start], *slope = &walk.slopes[start];
    const V* mixture_slope = &walk.mixture_slopes[start];
    V *to_a = &to_weights[start], *to_k = &to_covariances[start];
    V *left = whitener[g].Left(num_filled), *right = whitener[g].Right(num_filled);
    for (int64_t m = 0; m < z.inducing; ++m) {
      to_a[m] += 2 * power * a[m];
      left[m] = to_a[m];
      right[m] = k[m];
    }
    matrices.whitener_transposed[g].Multiply(to_a, to_k);
    V *to_squared = distances[g].Left(num_filled), *points = distances[g].Right(num_filled);
    V total = {}, scaled_total = {}, mixture_total = {};
    const T* inducing = in[kInducing] + g * z.inducing * z.inputs;
    for (int64_t m = 0; m < z.inducing; ++m) {
      scaled_total += to_k[m] * k[m];
      mixture_total += to_k[m] * mixture_slope[m];
      total += to_squared[m] = to_k[m] * slope[m];
    }
    sums[kVariance][g] += Sum<T>(prior) + Sum<T>(scaled_total) / in[kVariance][g];
    sums[kMixture][g] += Sum<T>(mixture_total);
    for (int64_t i = 0; i < z.inputs; ++i) {
      const V u = walk.scaled[g * z.inputs + i];
      V along = {};
      for (int64_t m = 0; m < z.inducing; ++m) along += to_squared[m] * inducing[m * z.inputs + i];
      const V to_u = 2 * (u * total - along);
      points[i] = u;
      to_point[i] += to_u * in[kInverseScales][g * z.inputs + i];
      sums[kInverseScales][g * z.inputs + i] += Sum<T>(to_u * walk.point[i]);
    }
    points[z.inputs] = Same<T>(1);
  }

  void Flush() {
    for (int64_t g = 0; g < z.groups; ++g) {
      whitener[g].AddTo(sums[kWhitener] + g * z.inducing * z.inducing, num_filled);
      distances[g].AddTo(&inducing_sums[g * z.inducing * (z.inputs + 1)], num_filled);
    }
    for (size_t d = 0; d < chol.size(); ++d) chol[d].AddTo(sums[kCholInducing] + d * z.inducing * z.inducing, num_filled);
    for (size_t g = 0; g < at_inducing.size(); ++g) {
      at_inducing[g].AddTo(sums[kAtInducing] + g * z.inducing * z.features(), num_filled);
      frequencies[g].AddTo(sums[kFrequencies] + g * z.waves * z.inputs, num_filled);
    }
    num_filled = 0;
  }

  const Sizes& z;
  const Inputs<T>& in;
  Walk<T> walk;
  const Matrices<T>& matrices;
  Sums<T>& sums;
  int64_t num_slots, num_filled = 0;
  V is_here = {};
  std::vector<V> to_state, to_point, to_mean, to_variance, to_chol, to_residual, to_weights, to_covariances, to_explained, to_values,
      to_feature_weights, to_explained_waves;
  std::vector<Pairs<T>> whitener, distances, chol, at_inducing, frequencies;
  std::vector<T> inducing_sums;  // over steps and lanes: d r² times the scaled input, and d r² itself
};

}  // namespace gpssm
