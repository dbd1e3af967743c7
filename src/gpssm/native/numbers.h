// Numbers that stand for one value of each of several trajectories: what reads as the arithmetic of one trajectory is that of as
// many as a vector register holds.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace gpssm {

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif

template <typename T>
struct Lanes;
template <>
struct Lanes<double> {
  static constexpr int kCount = kBytes / 8, kMantissa = 52, kBias = 1023, kTaylor = 13, kAtanh = 11, kWave = 8;
  static constexpr double kRound = 0x1.8p52, kSmallestExponent = -707.0, kEpsilon = 0x1p-52;
  typedef double Vector __attribute__((vector_size(kBytes)));
  typedef int64_t Bits __attribute__((vector_size(kBytes)));
  typedef int64_t Integer;
};
template <>
struct Lanes<float> {
  static constexpr int kCount = kBytes / 4, kMantissa = 23, kBias = 127, kTaylor = 7, kAtanh = 5, kWave = 4;
  static constexpr float kRound = 0x1.8p23f, kSmallestExponent = -86.0f, kEpsilon = 0x1p-23f;
  typedef float Vector __attribute__((vector_size(kBytes)));
  typedef int32_t Bits __attribute__((vector_size(kBytes)));
  typedef int32_t Integer;
};
template <typename T>
using Vector = typename Lanes<T>::Vector;

template <typename T>
inline Vector<T> Same(T value) {
  return Vector<T>{} + value;
}

// The sum over trajectories, half by half.
template <typename T>
inline T Sum(Vector<T> x) {
  typedef T Half __attribute__((vector_size(kBytes / 2)));
  typedef T Quarter __attribute__((vector_size(kBytes / 4)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  T total = 0;
  for (int lane = 0; lane < Lanes<T>::kCount / 4; ++lane) total += quarter[lane];
  return total;
}

template <typename T>
inline Vector<T> SquareRoot(Vector<T> x) {
  T lanes[Lanes<T>::kCount];
  std::memcpy(lanes, &x, sizeof(x));
  for (T& lane : lanes) lane = std::sqrt(lane);
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}

// exp of a number that is not positive, to within rounding: 2^n exp(r) with |r| <= log(2) / 2 and a Taylor series for exp(r).
// Below the range of the type it is the smallest number there; a NaN stays one.
template <typename T>
inline Vector<T> ExpOfNegative(Vector<T> x) {
  using L = Lanes<T>;
  constexpr T kLogTwo = T(0.69314718055994530942), kHigh = sizeof(T) == 8 ? T(0x1.62e42feep-1) : T(0x1.62ep-1);
  constexpr T kLow = T(0.69314718055994530942L - (long double)kHigh);
  x = x < L::kSmallestExponent ? Same<T>(L::kSmallestExponent) : x;
  Vector<T> shifted = x * (1 / kLogTwo) + L::kRound;  // the last bits of its mantissa are the integer n
  Vector<T> n = shifted - L::kRound;
  Vector<T> r = (x - n * kHigh) - n * kLow;
  static constexpr T kInverseFactorials[] = {1.0,           1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
                                             1.0 / 120,     1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                             1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  Vector<T> series = Same<T>(kInverseFactorials[L::kTaylor]);
  for (int i = L::kTaylor - 1; i >= 0; --i) series = series * r + kInverseFactorials[i];
  typename L::Bits bits = ((typename L::Bits)shifted << L::kMantissa) + (typename L::Integer(L::kBias) << L::kMantissa);
  return series * (Vector<T>)bits;
}

// log of a positive number; of any other, NaN. The mantissa m lies in [sqrt(1/2), sqrt(2)) and log(m) = 2 atanh((m - 1) / (m + 1)).
template <typename T>
inline Vector<T> Log(Vector<T> x) {
  using L = Lanes<T>;
  using Bits = typename L::Bits;
  const Bits root_half = (Bits)Same<T>(T(0.70710678118654752440));
  Bits offset = (Bits)x - root_half;
  Bits exponent = offset >> L::kMantissa;  // arithmetic, so it may be negative
  Vector<T> m = (Vector<T>)((Bits)x - (exponent << L::kMantissa));
  Vector<T> e = (Vector<T>)(exponent + (Bits)Same<T>(L::kRound)) - L::kRound;
  Vector<T> s = (m - 1) / (m + 1), square = s * s, series = Same<T>(T(1.0) / (2 * L::kAtanh + 1));
  for (int i = L::kAtanh - 1; i >= 0; --i) series = series * square + T(1.0) / (2 * i + 1);
  Vector<T> result = 2 * s * series + e * T(0.69314718055994530942);
  return x > 0 ? result : Same<T>(T(NAN));
}

// Sine and cosine, to within rounding while |x| is below some hundred thousand: the distance to the nearest multiple of pi / 2, in
// three parts whose products with small integers are exact, and Taylor series.
template <typename T>
inline void SineAndCosine(Vector<T> x, Vector<T>* sine, Vector<T>* cosine) {
  using L = Lanes<T>;
  using Bits = typename L::Bits;
  constexpr bool kIsDouble = sizeof(T) == 8;
  constexpr T kFirst = kIsDouble ? T(0x1.921fb544p0) : T(0x1.92p0), kSecond = kIsDouble ? T(0x1.0b4611a6p-34) : T(0x1.fb4p-12);
  constexpr T kThird = kIsDouble ? T(0x1.3198a2e037073p-69) : T(0x1.4442d2p-24);
  const Vector<T> shifted = x * T(0.63661977236758134308) + L::kRound;  // the last bits of its mantissa are the integer n
  const Vector<T> n = shifted - L::kRound, r = ((x - n * kFirst) - n * kSecond) - n * kThird, square = r * r;
  Vector<T> odd = Same<T>(1), even = Same<T>(1);  // sin(r) / r and cos(r), from the last term of the series to the first
  for (int i = L::kWave; i > 0; --i) {
    odd = 1 - odd * square * T(1.0 / (2 * i * (2 * i + 1)));
    even = 1 - even * square * T(1.0 / (2 * i * (2 * i - 1)));
  }
  odd *= r;
  constexpr int kToSign = 8 * sizeof(T) - 2;
  const Bits quadrant = (Bits)shifted, is_swapped = -(quadrant & 1);
  *sine = (Vector<T>)((Bits)(is_swapped ? even : odd) ^ ((quadrant & 2) << kToSign));
  *cosine = (Vector<T>)((Bits)(is_swapped ? odd : even) ^ (((quadrant + 1) & 2) << kToSign));
}

// One number of each of `kCount` trajectories that lie `stride` apart; beyond the last one it is repeated.
template <typename T>
inline Vector<T> Gather(const T* first, int64_t stride, int count) {
  Vector<T> x = {};
  for (int lane = 0; lane < Lanes<T>::kCount; ++lane) x[lane] = first[(lane < count ? lane : count - 1) * stride];
  return x;
}

template <typename T>
inline void Scatter(Vector<T> x, T* first, int64_t stride, int count) {
  for (int lane = 0; lane < count; ++lane) first[lane * stride] = x[lane];
}

}  // namespace gpssm
