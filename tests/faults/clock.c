// A wall clock that jumps: LD_PRELOAD this, and the clock is off by the seconds that the file RECMILL_CLOCK holds (int64).
// The monotonic clock is left alone, and so is every wait for a time span, as on a real machine.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none = 0;
static const volatile int64_t *jump = &none;

__attribute__((constructor)) static void open_clock(void) {
  const char *path = getenv("RECMILL_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) jump = mapped;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  long code = syscall(SYS_clock_gettime, clock, now);
  if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *jump;
  return (int)code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (out) *out = found.tv_sec;
  return found.tv_sec;
}

// Deadlines by the wall clock, as the kernel knows it. Those by the monotonic clock are smaller: no machine runs so long.
static struct timespec real_deadline(const struct timespec *deadline) {
  struct timespec found = *deadline;
  if (found.tv_sec > 500000000) found.tv_sec -= *jump;
  return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec until = real_deadline(deadline);
  return next(condition, mutex, &until);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
  static int (*next)(sem_t *, const struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec until = real_deadline(deadline);
  return next(semaphore, &until);
}
