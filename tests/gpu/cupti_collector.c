// A collector for CUPTI that does nothing but take buffers and give them back, to see what CUPTI costs by
// itself. record_torch.py compiles and loads it:
//     cc -O2 -shared -fPIC -o cupti_collector.so cupti_collector.c -ldl -lpthread
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER_BYTES = 4 << 20, MOST_SPARE = 256 };

typedef void (*requested_fn)(uint8_t **, size_t *, size_t *);
typedef void (*completed_fn)(void *, uint32_t, uint8_t *, size_t, size_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *spare[MOST_SPARE];
static int spares;
static size_t collected;

static void requested(uint8_t **buffer, size_t *size, size_t *most_records) {
  pthread_mutex_lock(&lock);
  *buffer = spares ? spare[--spares] : calloc(1, BUFFER_BYTES);
  pthread_mutex_unlock(&lock);
  *size = BUFFER_BYTES;
  *most_records = 0;  // as many as fit
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  memset(buffer, 0, valid);
  pthread_mutex_lock(&lock);
  collected += valid;
  if (spares < MOST_SPARE) spare[spares++] = buffer;
  pthread_mutex_unlock(&lock);
}

// Has the loaded libcupti at path hand its buffers here; 0, or CUPTI's error.
int collect(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  int (*registered)(requested_fn, completed_fn) =
      library ? dlsym(library, "cuptiActivityRegisterCallbacks") : NULL;
  collected = 0;
  return registered ? registered(requested, completed) : -1;
}

// Bytes of records so far.
size_t collected_bytes(void) { return collected; }
