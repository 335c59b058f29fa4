/* Loaded before torch (LD_PRELOAD): a thread of gloo pauses, at random up to GLOO_PAUSE_MS milliseconds, right after it
 * has told the caller that a collective is done, and so lets go of the collective's tensors that much later. Nothing
 * else changes. A pause ends early when the process starts the next collective: so a run takes little longer, and only
 * what follows the last collective meets a long pause. GLOO_PAUSE_SEED makes the
 * pauses repeatable.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64 };

static pthread_cond_t *volatile queues[MOST]; /* what workers wait for between two collectives */
static volatile unsigned long handed;           /* collectives handed to workers */
static __thread int known, worker;
static __thread unsigned state, told;

static int is_worker(void) {
  if (!known) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    worker = !strcmp(name, "pt_gloo_runloop");
    known = worker; /* a thread gets its name when it runs already */
  }
  return worker;
}

static void pause_worker(void) {
  const char *limit = getenv("GLOO_PAUSE_MS"), *seed = getenv("GLOO_PAUSE_SEED"), *rank = getenv("RANK");
  unsigned most = limit ? atoi(limit) : 0;
  if (!most) return;
  if (!state) state = 1 + (seed ? atoi(seed) : getpid()) * 7919u + (rank ? atoi(rank) : 0) * 104729u;
  unsigned milliseconds = rand_r(&state) % (most + 1);
  unsigned long before = handed;
  while (milliseconds-- && handed == before) {
    struct timespec slice = {0, 1000000L};
    nanosleep(&slice, NULL);
  }
}

static void *original(const char *name) {
  /* the version that torch is linked to: an older one has another layout */
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
  return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_broadcast(pthread_cond_t *condition) {
  static int (*broadcast)(pthread_cond_t *);
  if (!broadcast) broadcast = original("pthread_cond_broadcast");
  int result = broadcast(condition);
  /* a work's future is told first, the caller second */
  if (is_worker() && ++told % 2 == 0) pause_worker();
  return result;
}

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
  static int (*wait)(pthread_cond_t *, pthread_mutex_t *);
  if (!wait) wait = original("pthread_cond_wait");
  if (is_worker())
    for (int i = 0; i < MOST && queues[i] != condition; i++)
      if (!queues[i]) {
        queues[i] = condition;
        break;
      }
  return wait(condition, mutex);
}

int pthread_cond_signal(pthread_cond_t *condition) {
  static int (*one)(pthread_cond_t *);
  if (!one) one = original("pthread_cond_signal");
  for (int i = 0; i < MOST && queues[i]; i++)
    if (queues[i] == condition) handed++;
  return one(condition);
}
