// The two functions that XLA calls: a chain for many trajectories, and its gradient.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>

#include "back.h"
#include "xla/ffi/api/ffi.h"

namespace gpssm {
namespace {

namespace ffi = xla::ffi;

struct Failure {
  std::string message;
};

// Everything one call works on. The leading axes of every array, if any, number independent problems.
struct Call {
  Sizes sizes;
  int64_t problems = 1;
  ffi::DataType type = ffi::DataType::F64;
};

int64_t Product(ffi::AnyBuffer::Dimensions dims, size_t begin, size_t end) {
  return std::accumulate(dims.begin() + begin, dims.begin() + end, int64_t(1), std::multiplies<int64_t>());
}

ffi::AnyBuffer Argument(ffi::RemainingArgs args, size_t index) {
  auto found = args.get<ffi::AnyBuffer>(index);
  if (found.has_error()) throw Failure{found.error().message()};
  return *found;
}

ffi::AnyBuffer Answer(ffi::RemainingRets rets, size_t index) {
  auto found = rets.get<ffi::AnyBuffer>(index);
  if (found.has_error()) throw Failure{found.error().message()};
  return **found;
}

void Expect(ffi::AnyBuffer buffer, int64_t count, ffi::DataType type, const std::string& name) {
  if (static_cast<int64_t>(buffer.element_count()) != count || buffer.element_type() != type) {
    throw Failure{"the chain expected " + std::to_string(count) + " numbers of its type for " + name + ", but got " +
                  std::to_string(buffer.element_count())};
  }
}

Call Read(ffi::RemainingArgs args, int64_t proposal, ffi::Span<const int64_t> kernels) {
  const auto noise = Argument(args, kNoise).dimensions(), mean = Argument(args, kMeanMatrix).dimensions();
  const size_t leading = noise.size() - 4;
  Call call;
  call.type = Argument(args, kNoise).element_type();
  call.problems = Product(noise, 0, leading);
  Sizes& z = call.sizes;
  z.sequences = noise[leading], z.samples = noise[leading + 1], z.steps = noise[leading + 2], z.states = noise[leading + 3];
  z.inputs = mean.back();
  z.groups = Argument(args, kVariance).dimensions().back();
  z.inducing = Argument(args, kValues).dimensions().back();
  z.waves = Argument(args, kFeatureWeights).dimensions().back() / 2;
  z.proposal = static_cast<Proposal>(proposal);
  z.is_full = Argument(args, kGain).dimensions().size() == leading + 4;
  z.is_marginal = Argument(args, kCholInducing).element_count() > 0;
  z.kernels = kernels.begin();
  if (static_cast<int64_t>(kernels.size()) != z.groups) throw Failure{"the chain expected one kernel a group"};
  for (int array = 0; array < kNumArrays; ++array) {
    Expect(Argument(args, array), call.problems * SizeOf(z, array), call.type, "argument " + std::to_string(array));
  }
  Expect(Argument(args, kNumArrays), call.problems * z.sequences * z.steps, ffi::DataType::PRED, "is_real");
  return call;
}

template <typename T>
Inputs<T> InputsOf(ffi::RemainingArgs args, const Call& call, int64_t problem) {
  Inputs<T> in;
  for (int array = 0; array < kNumArrays; ++array) {
    in.arrays[array] = static_cast<const T*>(Argument(args, array).untyped_data()) + problem * SizeOf(call.sizes, array);
  }
  const auto* is_real = static_cast<const bool*>(Argument(args, kNumArrays).untyped_data());
  in.is_real = is_real + problem * call.sizes.sequences * call.sizes.steps;
  return in;
}

// Calls `work(0)` ... `work(count - 1)`, some of them in other threads. The caller works too, and waits only for what has begun:
// it may itself stand in a thread of the pool.
void InParallel(ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& work) {
  struct Progress {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable changed;
  };
  auto progress = std::make_shared<Progress>();
  auto run = [progress, count, &work] {
    for (int64_t index; (index = progress->next.fetch_add(1)) < count;) {
      work(index);
      std::lock_guard<std::mutex> lock(progress->mutex);
      if (++progress->done == count) progress->changed.notify_all();
    }
  };
  const int64_t helpers = std::min(count, pool.num_threads()) - 1;
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule(std::function<void()>(run));
  run();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->changed.wait(lock, [&] { return progress->done == count; });
}

// A sequence and some of its samples, as many as a vector holds.
template <typename T>
struct Task {
  int64_t sequence, sample;
  int count;

  static int64_t Blocks(const Sizes& z) { return (z.samples + Lanes<T>::kCount - 1) / Lanes<T>::kCount; }
  static int64_t Number(const Sizes& z) { return z.sequences * Blocks(z); }
  Task(const Sizes& z, int64_t index) : sequence(index / Blocks(z)), sample(index % Blocks(z) * Lanes<T>::kCount) {
    count = static_cast<int>(std::min<int64_t>(Lanes<T>::kCount, z.samples - sample));
  }
};

template <typename T>
void Forward(const Call& call, ffi::ThreadPool& pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Sizes& z = call.sizes;
  const int64_t tasks = Task<T>::Number(z), paths = z.sequences * z.samples;
  auto* states = static_cast<T*>(Answer(rets, 0).untyped_data());
  auto* divergence = static_cast<T*>(Answer(rets, 1).untyped_data());
  for (int64_t problem = 0; problem < call.problems; ++problem) {
    const Inputs<T> in = InputsOf<T>(args, call, problem);
    const Matrices<T> matrices(z, in);
    InParallel(pool, tasks, [&](int64_t index) {
      const Task<T> task(z, index);
      Walk<T> walk(z, in, matrices);
      walk.Enter(task.sequence, task.sample, task.count);
      walk.Forward(states + problem * paths * (z.steps + 1) * z.states, divergence + problem * paths);
    });
  }
}

template <typename T>
void Backward(const Call& call, ffi::ThreadPool& pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Sizes& z = call.sizes;
  const int64_t tasks = Task<T>::Number(z), paths = z.sequences * z.samples, num_states = paths * (z.steps + 1) * z.states;
  const auto* states = static_cast<const T*>(Argument(args, kNumArrays + 1).untyped_data());
  const auto* from_states = static_cast<const T*>(Argument(args, kNumArrays + 2).untyped_data());
  const auto* from_divergence = static_cast<const T*>(Argument(args, kNumArrays + 3).untyped_data());
  const int64_t workers = std::max<int64_t>(1, std::min(tasks, pool.num_threads()));
  for (int64_t problem = 0; problem < call.problems; ++problem) {
    const Inputs<T> in = InputsOf<T>(args, call, problem);
    const Matrices<T> matrices(z, in);
    T* own[kNumArrays - kNumShared];
    for (int array = kNumShared; array < kNumArrays; ++array) {
      T* first = static_cast<T*>(Answer(rets, array).untyped_data()) + problem * SizeOf(z, array);
      std::fill(first, first + SizeOf(z, array), T(0));
      own[array - kNumShared] = first;
    }
    std::vector<std::unique_ptr<Sums<T>>> sums(workers);
    InParallel(pool, workers, [&](int64_t worker) {  // each takes every so-manieth task, so that sums do not depend on chance
      sums[worker] = std::make_unique<Sums<T>>(z);
      Back<T> back(z, in, matrices, *sums[worker]);
      for (int64_t index = worker; index < tasks; index += workers) {
        const Task<T> task(z, index);
        back.Along(task.sequence, task.sample, task.count, states + problem * num_states, from_states + problem * num_states,
                   from_divergence + problem * paths, own);
      }
      back.Finish();
    });
    for (int array = 0; array < kNumShared; ++array) {
      T* total = static_cast<T*>(Answer(rets, array).untyped_data()) + problem * SizeOf(z, array);
      for (int64_t i = 0; i < SizeOf(z, array); ++i) {
        total[i] = 0;
        for (auto& part : sums) total[i] += (*part)[array][i];
      }
    }
  }
}

template <bool is_backward>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t proposal,
               ffi::Span<const int64_t> kernels) {
  try {
    const Call call = Read(args, proposal, kernels);
    const Sizes& z = call.sizes;
    const int64_t paths = call.problems * z.sequences * z.samples, num_states = paths * (z.steps + 1) * z.states;
    if (is_backward) {
      Expect(Argument(args, kNumArrays + 1), num_states, call.type, "states");
      Expect(Argument(args, kNumArrays + 2), num_states, call.type, "the gradient of states");
      Expect(Argument(args, kNumArrays + 3), paths, call.type, "the gradient of divergences");
      for (int array = 0; array < kNumArrays; ++array) {
        Expect(Answer(rets, array), call.problems * SizeOf(z, array), call.type, "gradient " + std::to_string(array));
      }
    } else {
      Expect(Answer(rets, 0), num_states, call.type, "states");
      Expect(Answer(rets, 1), paths, call.type, "divergences");
    }
    if (call.type == ffi::DataType::F64) {
      is_backward ? Backward<double>(call, pool, args, rets) : Forward<double>(call, pool, args, rets);
    } else if (call.type == ffi::DataType::F32) {
      is_backward ? Backward<float>(call, pool, args, rets) : Forward<float>(call, pool, args, rets);
    } else {
      throw Failure{"the chain serves numbers of 32 and 64 bits alone"};
    }
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error::InvalidArgument("gpssm: " + failure.message);
  }
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("proposal")
      .Attr<ffi::Span<const int64_t>>("kernels");
}

}  // namespace
}  // namespace gpssm

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(gpssm_walk, gpssm::Run<false>, gpssm::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(gpssm_walk_back, gpssm::Run<true>, gpssm::Binding());
#pragma GCC visibility pop
