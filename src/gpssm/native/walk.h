// One chain for a few trajectories at once: what is known of f at a state, what is proposed from it, and the way there and back.
#pragma once

#include <vector>

#include "problem.h"

namespace gpssm {

// k and dk / dr² at one squared distance r².
template <typename T, Kernel kind>
inline void Covariance(Vector<T> squared, T variance, T mixture, Vector<T>* k, Vector<T>* slope, Vector<T>* mixture_slope) {
  constexpr T kSmallest = T(1e-36);  // as kernels.py has it
  if constexpr (kind == Kernel::kSquaredExponential) {
    *k = variance * ExpOfNegative<T>(squared * T(-0.5));
    *slope = *k * T(-0.5);
  } else if constexpr (kind == Kernel::kRationalQuadratic) {
    const Vector<T> base = 1 + squared / (2 * mixture), log = Log<T>(base);
    *k = variance * ExpOfNegative<T>(-mixture * log);
    *slope = *k / base * T(-0.5);
    *mixture_slope = *k * ((base - 1) / base - log);
  } else {
    const auto is_apart = squared > kSmallest;
    const Vector<T> zero = {}, bounded = is_apart ? squared : Same<T>(kSmallest);
    constexpr T kFactor = kind == Kernel::kMatern12 ? 1 : kind == Kernel::kMatern32 ? 3 : 5;
    const Vector<T> scaled = SquareRoot<T>(kFactor * (squared != squared ? squared : bounded));
    const Vector<T> decay = variance * ExpOfNegative<T>(-scaled);
    Vector<T> s;
    if constexpr (kind == Kernel::kMatern12) *k = decay, s = decay / scaled * T(-0.5);
    if constexpr (kind == Kernel::kMatern32) *k = (1 + scaled) * decay, s = decay * T(-1.5);
    if constexpr (kind == Kernel::kMatern52) {
      *k = (1 + scaled + scaled * scaled * T(1.0 / 3)) * decay;
      s = (1 + scaled) * decay * T(-5.0 / 6);
    }
    *slope = is_apart ? s : zero;
  }
}

template <typename T>
class Walk {
  using V = Vector<T>;

 public:
  Walk(const Sizes& z, const Inputs<T>& in, const Matrices<T>& matrices)
      : z(z), in(in), matrices(matrices), state(z.states), noise(z.states), point(z.inputs), scaled(z.groups * z.inputs),
        covariances(z.groups * z.stride()), slopes(z.groups * z.stride()), mixture_slopes(z.groups * z.stride()),
        weights(z.groups * z.stride()), explained(z.states * z.stride()), values(z.states * z.stride()), residual(z.groups),
        is_clamped(z.groups), cosines(z.groups * z.waves), sines(z.groups * z.waves),
        residual_waves(z.groups * z.feature_stride()), feature_weights(z.states * z.feature_stride()), power(z.groups),
        magnitude(z.groups), wave(z.states), mean(z.states), variance(z.states), proposed(z.states), chol(z.states * z.states) {}

  // What belongs to trajectories `sample` ... `sample + count - 1` of a sequence.
  void Enter(int64_t sequence, int64_t sample, int count) {
    this->sequence = sequence, this->count = count;
    path = sequence * z.samples + sample;
    for (int64_t d = 0; d < z.states; ++d) {
      state[d] = Gather(in[kFirst] + path * z.states + d, z.states, count);
      for (int64_t m = 0; m < z.inducing; ++m) {
        const T* first = in[kValues] + (path * z.states + d) * z.inducing + m;
        values[d * z.stride() + m] = Gather(first, z.states * z.inducing, count);
      }
      for (int64_t j = 0; j < z.features(); ++j) {
        const T* first = in[kFeatureWeights] + (path * z.states + d) * z.features() + j;
        feature_weights[d * z.feature_stride() + j] = Gather(first, z.states * z.features(), count);
      }
    }
  }

  bool IsReal(int64_t step) const { return in.is_real[sequence * z.steps + step]; }
  int64_t Row(int64_t step) const { return sequence * z.steps + step; }

  // The mean and variance of f at `state`, with all that leads to them.
  void Look(int64_t step) {
    const T* control = in[kControls] + Row(step) * z.controls();
    for (int64_t i = 0; i < z.inputs; ++i) point[i] = i < z.states ? state[i] : Same<T>(control[i - z.states]);
    for (int64_t g = 0; g < z.groups; ++g) {
      switch (static_cast<Kernel>(z.kernels[g])) {
        case Kernel::kSquaredExponential: Measure<Kernel::kSquaredExponential>(g); break;
        case Kernel::kMatern12: Measure<Kernel::kMatern12>(g); break;
        case Kernel::kMatern32: Measure<Kernel::kMatern32>(g); break;
        case Kernel::kMatern52: Measure<Kernel::kMatern52>(g); break;
        case Kernel::kRationalQuadratic: Measure<Kernel::kRationalQuadratic>(g); break;
      }
      V* a = &weights[g * z.stride()];
      matrices.whitener[g].Multiply(&covariances[g * z.stride()], a);
      V power = {};
      for (int64_t m = 0; m < z.inducing; ++m) power += a[m] * a[m];
      const T prior = in[kVariance][g];
      const V left = prior - power, smallest = Same<T>(Lanes<T>::kEpsilon * prior);
      is_clamped[g] = left < smallest ? Same<T>(1) : V{};
      residual[g] = left < smallest ? smallest : left;
      if (z.waves) Oscillate(g);
    }
    for (int64_t d = 0; d < z.states; ++d) {
      const V* a = &weights[Group(d) * z.stride()];
      V expected = Same<T>(in[kMeanOffset][d]);
      for (int64_t i = 0; i < z.inputs; ++i) expected += in[kMeanMatrix][d * z.inputs + i] * point[i];
      for (int64_t m = 0; m < z.inducing; ++m) expected += a[m] * values[d * z.stride() + m];
      mean[d] = expected, variance[d] = residual[Group(d)];
      if (z.waves) {
        const V *waves = &residual_waves[Group(d) * z.feature_stride()], *w = &feature_weights[d * z.feature_stride()];
        wave[d] = V{}, variance[d] = V{};
        for (int64_t j = 0; j < z.features(); ++j) wave[d] += waves[j] * w[j];
        mean[d] += magnitude[Group(d)] * wave[d];
      }
      if (z.is_marginal) {
        V* e = &explained[d * z.stride()];
        matrices.chol_transposed[d].Multiply(a, e);
        for (int64_t m = 0; m < z.inducing; ++m) variance[d] += e[m] * e[m];
      }
    }
  }

  // The mean and factor of the next state's distribution, from `mean` and `variance`.
  void Propose(int64_t step) {
    const int64_t size = z.states;
    const T *gain = in[kGain] + Row(step) * z.square(), *offset = in[kOffset] + Row(step) * size;
    const T* scale = in[kScale] + Row(step) * z.square();
    const std::vector<V>& base = z.proposal == Proposal::kState ? state : mean;
    for (int64_t i = 0; i < size; ++i) {
      proposed[i] = Same<T>(offset[i]);
      if (!z.is_full) {
        proposed[i] += gain[i] * base[i];
        chol[i] = z.is_spread() ? SquareRoot<T>(scale[i] + gain[i] * gain[i] * variance[i]) : Same<T>(scale[i]);
        continue;
      }
      for (int64_t j = 0; j < size; ++j) {
        proposed[i] += gain[i * size + j] * base[j];
        chol[i * size + j] = Same<T>(scale[i * size + j]);
        if (!z.is_spread() || j > i) continue;
        for (int64_t k = 0; k < size; ++k) chol[i * size + j] += gain[i * size + k] * gain[j * size + k] * variance[k];
      }
    }
    if (z.is_full && z.is_spread()) Factorise();
  }

  // What the step adds to the divergence, beyond what S alone determines.
  V Divergence(int64_t step) const {
    const T *precision = in[kPrecision], *weight = in[kWeight] + Row(step) * z.states;
    V total = {};
    for (int64_t d = 0; d < z.states; ++d) {
      const V difference = proposed[d] - mean[d];
      total += T(0.5) * (precision[d] * difference * difference + weight[d] * variance[d]);
      if (z.proposal == Proposal::kMean) total -= Log<T>(chol[Diagonal(d)]);
    }
    return total;
  }

  void Move(int64_t step) {
    LoadNoise(step);
    for (int64_t i = 0; i < z.states; ++i) {
      state[i] = proposed[i];
      if (!z.is_full) state[i] += chol[i] * noise[i];
      const int64_t end = !z.is_full ? 0 : z.is_spread() ? i + 1 : z.states;
      for (int64_t j = 0; j < end; ++j) state[i] += chol[i * z.states + j] * noise[j];
    }
  }

  // From the first state to the last; `states` is [sequence, sample, step + 1, state] and `divergence` [sequence, sample].
  void Forward(T* states, T* divergence) {
    V total = {};
    StoreState(states, 0);
    for (int64_t step = 0; step < z.steps; ++step) {
      if (IsReal(step)) {
        Look(step);
        Propose(step);
        total += Divergence(step);
        Move(step);
      }
      StoreState(states, step + 1);
    }
    Scatter(total, divergence + path, 1, count);
  }

  void LoadNoise(int64_t step) {
    const T* first = in[kNoise] + (path * z.steps + step) * z.states;
    for (int64_t d = 0; d < z.states; ++d) noise[d] = Gather(first + d, z.steps * z.states, count);
  }

  void LoadState(const T* states, int64_t step) {
    const T* first = states + (path * (z.steps + 1) + step) * z.states;
    for (int64_t d = 0; d < z.states; ++d) state[d] = Gather(first + d, (z.steps + 1) * z.states, count);
  }

  int64_t Group(int64_t state) const { return z.groups == 1 ? 0 : state; }
  int64_t Diagonal(int64_t state) const { return z.is_full ? state * (z.states + 1) : state; }

  const Sizes& z;
  const Inputs<T>& in;
  const Matrices<T>& matrices;
  int64_t sequence = 0, path = 0;
  int count = 0;
  std::vector<V> state, noise, point, scaled, covariances, slopes, mixture_slopes, weights, explained, values, residual,
      is_clamped, cosines, sines, residual_waves, feature_weights, power, magnitude, wave, mean, variance, proposed, chol;

 private:
  template <Kernel kind>
  void Measure(int64_t g) {
    const T *inducing = in[kInducing] + g * z.inducing * z.inputs, *inverse = in[kInverseScales] + g * z.inputs;
    const T prior = in[kVariance][g], mixture = in[kMixture][g];
    V* u = &scaled[g * z.inputs];
    for (int64_t i = 0; i < z.inputs; ++i) u[i] = point[i] * inverse[i];
    const int64_t start = g * z.stride();
    for (int64_t m = 0; m < z.inducing; ++m) {
      V squared = {};
      for (int64_t i = 0; i < z.inputs; ++i) {
        const V apart = u[i] - inducing[m * z.inputs + i];
        squared += apart * apart;
      }
      Covariance<T, kind>(squared, prior, mixture, &covariances[start + m], &slopes[start + m], &mixture_slopes[start + m]);
    }
  }

  // The features less what the inducing inputs explain of them, and the factor that gives them the variance of the residual.
  void Oscillate(int64_t g) {
    V *c = &cosines[g * z.waves], *s = &sines[g * z.waves], *waves = &residual_waves[g * z.feature_stride()];
    matrices.at_inducing_transposed[g].Multiply(&weights[g * z.stride()], waves);
    V total = {};
    for (int64_t j = 0; j < z.waves; ++j) {
      V angle = {};
      for (int64_t i = 0; i < z.inputs; ++i) angle += in[kFrequencies][(g * z.waves + j) * z.inputs + i] * point[i];
      SineAndCosine<T>(angle, &s[j], &c[j]);
      const T amplitude = in[kAmplitudes][g * z.waves + j];
      waves[j] = amplitude * c[j] - waves[j], waves[z.waves + j] = amplitude * s[j] - waves[z.waves + j];
      total += waves[j] * waves[j] + waves[z.waves + j] * waves[z.waves + j];
    }
    const V smallest = residual[g] * T(1e-6);  // as draws.py has it
    power[g] = total;
    magnitude[g] = SquareRoot<T>(residual[g] / (total < smallest ? smallest : total));
  }

  void Factorise() {
    const int64_t size = z.states;
    for (int64_t j = 0; j < size; ++j) {
      V left = chol[j * size + j];
      for (int64_t k = 0; k < j; ++k) left -= chol[j * size + k] * chol[j * size + k];
      const V pivot = SquareRoot<T>(left), inverse = 1 / pivot;
      chol[j * size + j] = pivot;
      for (int64_t i = j + 1; i < size; ++i) {
        V rest = chol[i * size + j];
        for (int64_t k = 0; k < j; ++k) rest -= chol[i * size + k] * chol[j * size + k];
        chol[i * size + j] = rest * inverse;
      }
    }
  }

  void StoreState(T* states, int64_t step) const {
    T* first = states + (path * (z.steps + 1) + step) * z.states;
    for (int64_t d = 0; d < z.states; ++d) Scatter(state[d], first + d, (z.steps + 1) * z.states, count);
  }
};

}  // namespace gpssm
