// Products with small matrices that stay the same along the chain: packed once, so that each step streams through them.
#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace gpssm {

enum class Shape { kDense, kLower, kUpper };

// Rows of a matrix in blocks that share the loads of the vector they multiply. What a triangle leaves out is never read.
template <typename T>
class Packed {
 public:
  static constexpr int kRows = 8;

  Packed(const T* matrix, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, Shape shape) {
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t last = std::min<int64_t>(row + kRows, rows);
      begins_.push_back(shape == Shape::kUpper ? row : 0);
      ends_.push_back(shape == Shape::kLower ? last : columns);
      for (int64_t column = begins_.back(); column < ends_.back(); ++column) {
        for (int64_t r = row; r < row + kRows; ++r) {
          const bool is_in = r < rows && (shape == Shape::kDense || (shape == Shape::kLower ? column <= r : column >= r));
          entries_.push_back(is_in ? matrix[r * row_stride + column * column_stride] : T(0));
        }
      }
    }
  }

  // The product with `in`; `out` has room for whole blocks of rows.
  void Multiply(const Vector<T>* in, Vector<T>* out) const {
    const T* entry = entries_.data();
    for (size_t block = 0; block < begins_.size(); ++block) {
      Vector<T> sums[kRows] = {};
      for (int64_t column = begins_[block]; column < ends_[block]; ++column, entry += kRows) {
        const Vector<T> x = in[column];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r] += entry[r] * x;
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) out[block * kRows + r] = sums[r];
    }
  }

 private:
  std::vector<int64_t> begins_, ends_;
  std::vector<T> entries_;
};

inline int64_t RoundUp(int64_t size) { return (size + 7) / 8 * 8; }

// sum[i, j] += sum over slots and lanes of left[slot, i] right[slot, j], of which the lower triangle alone when `is_lower`.
// Both hold whole blocks of rows, of which those beyond the matrix are computed and dropped.
template <typename T>
void AddOuterProducts(const Vector<T>* left, int64_t left_stride, int64_t num_left, const Vector<T>* right, int64_t right_stride,
                      int64_t num_right, int64_t num_slots, bool is_lower, T* sum) {
  constexpr int kLeft = 4, kRight = kBytes == 64 ? 4 : 2;
  for (int64_t i = 0; i < num_left; i += kLeft) {
    const int64_t end = is_lower ? std::min<int64_t>(i + kLeft, num_right) : num_right;
    for (int64_t j = 0; j < end; j += kRight) {
      Vector<T> sums[kLeft][kRight] = {};
      for (int64_t slot = 0; slot < num_slots; ++slot) {
        const Vector<T>*a = left + slot * left_stride + i, *b = right + slot * right_stride + j;
#pragma GCC unroll 4
        for (int r = 0; r < kLeft; ++r) {
#pragma GCC unroll 4
          for (int c = 0; c < kRight; ++c) sums[r][c] += a[r] * b[c];
        }
      }
      for (int r = 0; r < kLeft && i + r < num_left; ++r) {
        for (int c = 0; c < kRight && j + c < num_right; ++c) sum[(i + r) * num_right + j + c] += Sum<T>(sums[r][c]);
      }
    }
  }
}

}  // namespace gpssm
