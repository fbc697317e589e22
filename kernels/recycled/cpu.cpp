// Memory that is used again, and the times of a thread: what worker threads need besides kernels.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "recycled/recycler.h"

namespace nb = nanobind;

namespace recmill {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// Uninitialised bytes. Keeps the GIL: a thread that releases it to allocate has to wait for it again.
Bytes allocate(int64_t num_bytes) {
  if (num_bytes < 1 || num_bytes > INT64_MAX / 2) throw std::invalid_argument("num_bytes: is " + std::to_string(num_bytes));
  struct Owned {
    void* memory;
    int64_t num_bytes;
  };
  const int64_t block_bytes = Recycler::block_bytes(num_bytes);
  void* memory = recycler().take(block_bytes);
  nb::capsule owner(new Owned{memory, block_bytes}, [](void* held) noexcept {
    auto* own = static_cast<Owned*>(held);
    recycler().give_back(own->memory, own->num_bytes);
    delete own;
  });
  return Bytes(memory, {static_cast<size_t>(num_bytes)}, owner);
}

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Nanoseconds on a core, nanoseconds runnable but without one. Kept open: a read takes 2 instead of 15 microseconds.
struct SchedulerFile {
  int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  ~SchedulerFile() {
    if (file >= 0) close(file);
  }
};

// Releases the GIL once: after a long computation a system call is where a thread loses its core.
std::tuple<double, double, double> thread_times() {
  thread_local SchedulerFile scheduler;
  thread_local double last_wall = 0, last_cpu = 0, queued = 0;
  const double wall = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  if (wall - last_wall > 1.05 * (cpu - last_cpu)) {  // else it hardly waited for anything
    char text[64] = {};
    unsigned long long on_core = 0, waited = 0;
    if (scheduler.file >= 0 && pread(scheduler.file, text, sizeof text - 1, 0) > 0 &&
        std::sscanf(text, "%llu %llu", &on_core, &waited) == 2)
      queued = 1e-9 * static_cast<double>(waited);
  }
  last_wall = wall;
  last_cpu = cpu;
  return {wall, cpu, queued};
}

}  // namespace

void bind_recycled(nb::module_& m) {
  m.def("allocate", &allocate);
  m.def("release_idle", [] { return recycler().release({}, 0); });
  m.def("thread_times", &thread_times, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill
