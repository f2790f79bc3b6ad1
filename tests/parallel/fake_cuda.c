// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// A driver of CUDA and an NCCL for tests without a GPU. Memory of a device is the host's; every
// stream is a thread that does its work in order, late. Communicators pass files around in a folder
// that the unique id names, so ranks may be processes. What hangs, hangs until it is aborted.
// Windows of CUDA IPC are memory files, which others open through `/proc`; a compiler makes of any
// source a module that has our kernels.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { READY = 0, INVALID = 1, NOT_FOUND = 500, NOT_READY = 600, IN_PROGRESS = 7, RELAXED = 2, REFUSED = 801 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long copies, launches, blocked, rooms, names, kernels, windows, views, registered;

// What a test asks about: copies between host and device, operations of NCCL, times the host waited
// for the device, memory of the device that was not given back, communicators that were named,
// kernels launched, windows of CUDA IPC that were not given back, those of others that are open,
// and memory that was registered.
long fake_count(const char *what) {
  static const struct {
    const char *what;
    long *count;
  } counts[] = {{"copies", &copies}, {"launches", &launches}, {"blocked", &blocked}, {"rooms", &rooms}, {"names", &names},
                {"kernels", &kernels}, {"windows", &windows}, {"views", &views}, {"registered", &registered}};
  long count = -1;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    if (strcmp(what, counts[i].what) == 0) count = *counts[i].count;
  pthread_mutex_unlock(&lock);
  return count;
}

static void count(long *counter) {
  pthread_mutex_lock(&lock);
  ++*counter;
  pthread_mutex_unlock(&lock);
}

// Streams and events.

// Where a stream was when an event was recorded. Who waits, waits for this, whatever becomes of the
// event.
typedef struct point {
  int reached;
} point;

typedef struct event {
  point *last;
} event;

typedef struct job {
  void (*run)(struct job *);
  struct job *next;
  void *to;
  const void *from;
  size_t bytes;
  float value;
  unsigned delay;
  point *point;
  void *group;
} job;

typedef struct stream {
  job *first, *last;
  int busy;
} stream;

static void *serve(void *argument) {
  stream *own = argument;
  for (;;) {
    pthread_mutex_lock(&lock);
    while (!own->first) pthread_cond_wait(&changed, &lock);
    job *next = own->first;
    own->first = next->next;
    own->busy = 1;
    pthread_mutex_unlock(&lock);
    if (next->delay) usleep(next->delay);
    next->run(next);
    free(next);
    pthread_mutex_lock(&lock);
    own->busy = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

void *fake_stream(void) {
  stream *own = calloc(1, sizeof *own);
  pthread_t thread;
  pthread_create(&thread, NULL, serve, own);
  pthread_detach(thread);
  return own;
}

static stream *stream_of(void *handle) {
  static stream *standard;
  if (handle) return handle;
  if (!standard) standard = fake_stream();
  return standard;
}

static void enqueue(void *handle, job work) {
  stream *own = stream_of(handle);
  job *copy = malloc(sizeof *copy);
  *copy = work;
  copy->next = NULL;
  pthread_mutex_lock(&lock);
  if (own->first) own->last->next = copy;
  else own->first = copy;
  own->last = copy;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void move(job *work) { memmove(work->to, work->from, work->bytes); }

static void fill(job *work) {
  float *to = work->to;
  for (size_t i = 0; i < work->bytes / sizeof *to; i++) to[i] = work->value;
}

static void reach(job *work) {
  pthread_mutex_lock(&lock);
  work->point->reached = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void await(job *work) {
  pthread_mutex_lock(&lock);
  while (!work->point->reached) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

// The framework's work: numbers that are there after some microseconds, a copy, and waiting for all
// of it.
void fake_fill(void *handle, float *to, size_t count, float value, unsigned delay) {
  enqueue(handle, (job){.run = fill, .to = to, .bytes = count * sizeof *to, .value = value, .delay = delay});
}

void fake_copy(void *handle, void *to, const void *from, size_t bytes) {
  enqueue(handle, (job){.run = move, .to = to, .from = from, .bytes = bytes});
}

int cuStreamSynchronize(void *handle) {
  stream *own = stream_of(handle);
  pthread_mutex_lock(&lock);
  while (own->first || own->busy) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return READY;
}

void fake_wait(void *handle) { cuStreamSynchronize(handle); }

// The driver.

int cuInit(unsigned flags) { return flags ? INVALID : READY; }
int cuDriverGetVersion(int *version) { return *version = 13000, READY; }
int cuDeviceGetCount(int *number) { return *number = 8, READY; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < 8 ? READY : INVALID; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  (void)device;
  return *value = which == 75 ? (getenv("FAKE_OLD_GPU") ? 8 : 9) : which == 115 && !getenv("FAKE_NO_POOLS"), READY;
}
int cuDeviceGetName(char *name, int room, int device) {
  snprintf(name, room, "Fake %d", device);
  return READY;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, device + 1, 16);
  return READY;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  return *bytes = (size_t)1 << 34, READY;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(intptr_t)(device + 1), READY; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, READY; }
int cuCtxPushCurrent_v2(void *context) { return context ? READY : INVALID; }
int cuCtxPopCurrent_v2(void **context) { return *context = NULL, READY; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, READY; }
int cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
  (void)flags, (void)priority;
  return *handle = fake_stream(), READY;
}
int cuStreamDestroy_v2(void *handle) { return handle ? READY : INVALID; }
int cuStreamWaitEvent(void *handle, event *mark, unsigned flags) {
  (void)flags;
  if (mark->last) enqueue(handle, (job){.run = await, .point = mark->last});
  return READY;
}

// The stream that a graph is captured on, and what a thread's calls do to captures of others: only
// relaxed ones end none.
static void *captured;
static __thread int mode;

void fake_capture(void *handle) { captured = handle; }
int cuStreamIsCapturing(void *handle, int *state) { return *state = captured && handle == captured, READY; }
int cuThreadExchangeStreamCaptureMode(int *other) {
  int before = mode;
  return mode = *other, *other = before, READY;
}
int cuEventCreate(event **mark, unsigned flags) {
  (void)flags;
  return *mark = calloc(1, sizeof **mark), READY;
}
int cuEventDestroy_v2(event *mark) { return mark ? READY : INVALID; }
int cuEventRecord(event *mark, void *handle) {
  mark->last = calloc(1, sizeof *mark->last);
  enqueue(handle, (job){.run = reach, .point = mark->last});
  return READY;
}
int cuEventQuery(event *mark) {
  if (captured && mode != RELAXED) abort();
  pthread_mutex_lock(&lock);
  int reached = !mark->last || mark->last->reached;
  pthread_mutex_unlock(&lock);
  return reached ? READY : NOT_READY;
}
int cuEventSynchronize(event *mark) {
  count(&blocked);
  if (mark->last) await(&(job){.point = mark->last});
  return READY;
}
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
  (void)bytes, (void)flags;
  return address ? READY : INVALID;
}
int cuMemHostUnregister(void *address) { return address ? READY : INVALID; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *handle) {
  count(&copies);
  enqueue(handle, (job){.run = move, .to = (void *)to, .from = from, .bytes = bytes, .delay = 200});
  return READY;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *handle) {
  count(&copies);
  enqueue(handle, (job){.run = move, .to = to, .from = (void *)from, .bytes = bytes, .delay = 200});
  return READY;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *handle) {
  enqueue(handle, (job){.run = move, .to = (void *)to, .from = (void *)from, .bytes = bytes, .delay = 200});
  return READY;
}

// Memory in the order of a stream. Whoever uses it too early, or too late, finds other bytes.
typedef struct block {
  size_t bytes;
  size_t unused;
} block;

static void spoil(job *work) { memset(work->to, 0x5a, work->bytes); }

static void give_back(job *work) {
  spoil(work);
  free((block *)work->to - 1);
  pthread_mutex_lock(&lock);
  rooms--;
  pthread_mutex_unlock(&lock);
}

int cuMemAllocAsync(uint64_t *address, size_t bytes, void *handle) {
  block *made = malloc(sizeof *made + bytes);
  if (!made) return 2;
  made->bytes = bytes;
  count(&rooms);
  enqueue(handle, (job){.run = spoil, .to = made + 1, .bytes = bytes, .delay = 200});
  return *address = (uint64_t)(uintptr_t)(made + 1), READY;
}
int cuMemFreeAsync(uint64_t address, void *handle) {
  block *made = (block *)(uintptr_t)address - 1;
  enqueue(handle, (job){.run = give_back, .to = made + 1, .bytes = made->bytes});
  return READY;
}
// Windows of CUDA IPC.

typedef struct {
  char bytes[64];
} offer;

typedef struct {
  uint64_t address;
  size_t bytes;
  int file;
} window;

static window all_windows[64];

static window *window_at(uint64_t address) {
  for (size_t i = 0; i < 64; i++)
    if (all_windows[i].address == address) return &all_windows[i];
  return NULL;
}

static uint64_t map(int file, size_t bytes) {
  void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return base == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)base;
}

// One that was taken, or one of another process: both end here.
static int unmap(uint64_t address, long *counter, int own) {
  pthread_mutex_lock(&lock);
  window *found = address ? window_at(address) : NULL;
  int good = found && (found->file >= 0) == own;
  if (good) {
    munmap((void *)(uintptr_t)address, found->bytes);
    if (own) close(found->file);
    found->address = 0;
    --*counter;
  }
  pthread_mutex_unlock(&lock);
  return good ? READY : INVALID;
}

static int keep(window made, uint64_t *address, long *counter) {
  if (!made.address) return 2;
  pthread_mutex_lock(&lock);
  window *place = window_at(0);
  if (!place) abort();
  *place = made;
  ++*counter;
  pthread_mutex_unlock(&lock);
  return *address = made.address, READY;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  int file = memfd_create("window", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)bytes)) return 2;
  return keep((window){map(file, bytes), bytes, file}, address, &windows);
}
int cuMemFree_v2(uint64_t address) { return unmap(address, &windows, 1); }
int cuIpcGetMemHandle(offer *made, uint64_t address) {
  if (getenv("FAKE_NO_IPC")) return REFUSED;
  pthread_mutex_lock(&lock);
  window *own = window_at(address);
  int good = own && own->file >= 0;
  memset(made, 0, sizeof *made);
  if (good) snprintf(made->bytes, sizeof made->bytes, "%d %d %zu", getpid(), own->file, own->bytes);
  pthread_mutex_unlock(&lock);
  return good ? READY : INVALID;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, offer made, unsigned flags) {
  int process, descriptor;
  size_t bytes;
  char path[64];
  if (flags != 1 || sscanf(made.bytes, "%d %d %zu", &process, &descriptor, &bytes) != 3) return INVALID;
  // As the driver: nobody opens what is its own.
  if (process == getpid()) return 201;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, descriptor);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return INVALID;
  uint64_t base = map(file, bytes);
  close(file);
  return keep((window){base, bytes, -1}, address, &views);
}
int cuIpcCloseMemHandle(uint64_t address) { return unmap(address, &views, 0); }

// Kernels: what they are called with, and what they do.

enum { TENSORS = 160, MEMBERS = 64 };

typedef struct {
  uint64_t address[TENSORS], count[TENSORS];
  uint32_t start[TENSORS], tiles[TENSORS], tensors;
} batch;

typedef struct {
  uint64_t address[MEMBERS];
  uint32_t members, op;
  double prescale, postscale;
} inputs;

typedef struct {
  char name[32];
  batch batch;
  inputs inputs;
  uint64_t base, count;
} kernel;

static size_t size_of(int type);
static double read_number(const void *from, size_t at, int type);
static void write_number(void *to, size_t at, int type, double value);

static int type_named(const char *name) {
  // In the order of NCCL's numbers, as far as it has them.
  static const char *const known[] = {"i8",  "u8",   "i32",    "u32",    "i64", "u64", "f16",  "f32",
                                      "f64", "bf16", "f8e4m3", "f8e5m2", "i16", "u16", "truth"};
  for (int type = 0; type < 15; type++)
    if (strcmp(known[type], name) == 0) return type;
  abort();
}

static void reduce_all(kernel *own) {
  inputs *in = &own->inputs;
  int type = type_named(own->name + strlen("reduce_"));
  for (size_t at = 0; at < own->count; at++) {
    double value = 0;
    for (uint32_t member = 0; member < in->members; member++) {
      double next = read_number((void *)(uintptr_t)in->address[member], at, type) * in->prescale;
      if (member == 0) value = next;
      else if (in->op == 3) value = next < value ? next : value;
      else if (in->op == 4) value = next > value ? next : value;
      else value = in->op == 5 ? value * next : value + next;
    }
    if (in->op == 0) value /= in->members;
    write_number((void *)(uintptr_t)own->base, at, type, value * in->postscale);
  }
}

static void run_kernel(job *work) {
  kernel *own = work->group;
  if (strncmp(own->name, "reduce_", 7) == 0) reduce_all(own);
  else {
    int pack = own->name[0] == 'p';
    size_t size = size_of(type_named(own->name + (pack ? 5 : 7)));
    for (uint32_t i = 0; i < own->batch.tensors; i++) {
      void *tensor = (void *)(uintptr_t)own->batch.address[i];
      void *there = (void *)(uintptr_t)(own->base + 16 * (uint64_t)own->batch.start[i]);
      memmove(pack ? there : tensor, pack ? tensor : there, own->batch.count[i] * size);
    }
  }
  free(own);
}

int cuModuleLoadData(void **module, const void *image) {
  if (strcmp(image, "any code") != 0) return NOT_FOUND;
  return *module = (void *)image, READY;
}
int cuModuleUnload(void *module) { return (void)module, READY; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  return *function = strdup(name), READY;
}
int cuLaunchKernel(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g,
                   void *handle, void **arguments, void **extra) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)extra;
  kernel *own = calloc(1, sizeof *own);
  snprintf(own->name, sizeof own->name, "%s", (char *)function);
  free(function);
  if (strncmp(own->name, "reduce_", 7) == 0) {
    own->inputs = *(inputs *)arguments[0];
    own->count = *(uint64_t *)arguments[2];
  } else own->batch = *(batch *)arguments[0];
  own->base = *(uint64_t *)arguments[1];
  count(&kernels);
  enqueue(handle, (job){.run = run_kernel, .group = own, .delay = 200});
  return READY;
}

// The compiler.

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 99, READY; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, void *a, void *b) {
  (void)source, (void)name, (void)headers, (void)a, (void)b;
  return *program = program, READY;
}
int nvrtcDestroyProgram(void **program) { return (void)program, READY; }
int nvrtcCompileProgram(void *program, int options, const char *const *all) {
  return (void)program, (void)options, (void)all, READY;
}
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return (void)program, *bytes = sizeof "any code", READY; }
int nvrtcGetCUBIN(void *program, char *code) { return (void)program, memcpy(code, "any code", sizeof "any code"), READY; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return (void)program, *bytes = 0, READY; }
int nvrtcGetProgramLog(void *program, char *log) { return (void)program, (void)log, READY; }

int cuGetErrorName(int status, const char **name) { return *name = status == NOT_FOUND ? "NOT_FOUND" : "INVALID", 0; }
int cuGetErrorString(int status, const char **text) { return (void)status, *text = "said by a test", 0; }

// NCCL.

typedef struct comm {
  char folder[128];
  int rank, size, status, aborted, running;
  long collectives, sent[64], received[64];
} comm;

typedef enum { ALLREDUCE, BROADCAST, REDUCE, GATHER, SCATTER, SEND, RECEIVE } kind;

typedef struct call {
  kind kind;
  const void *from;
  void *to;
  size_t number;
  int type, op, peer;
  comm *comm;
  struct call *next;
} call;

static __thread call *first_call, *last_call;
static __thread void *call_stream;
static double factors[4096];
static int made;

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 2, 2, 1};
  return sizes[type];
}

// A float of eight bits, if it is a number.
static double eight_bits(uint8_t code, int type) {
  int mantissa = type == 10 ? 3 : 2, bias = type == 10 ? 7 : 15;
  int exponent = (code & 127) >> mantissa, fraction = code & ((1 << mantissa) - 1);
  double steps = exponent ? ((1 << mantissa) + fraction) * (double)(1u << (exponent - 1)) : fraction;
  return (code < 128 ? steps : -steps) / (1 << (bias - 1 + mantissa));
}

static double read_number(const void *from, size_t at, int type) {
  switch (type) {
    case 0: return ((const int8_t *)from)[at];
    case 1: return ((const uint8_t *)from)[at];
    case 2: return ((const int32_t *)from)[at];
    case 3: return ((const uint32_t *)from)[at];
    case 4: return (double)((const int64_t *)from)[at];
    case 5: return (double)((const uint64_t *)from)[at];
    case 7: return ((const float *)from)[at];
    case 8: return ((const double *)from)[at];
    case 9: {
      uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
      float value;
      memcpy(&value, &bits, sizeof value);
      return value;
    }
    case 10:
    case 11: return eight_bits(((const uint8_t *)from)[at], type);
    case 12: return ((const int16_t *)from)[at];
    case 13: return ((const uint16_t *)from)[at];
    case 14: return ((const uint8_t *)from)[at] != 0;
    default: abort();
  }
}

static void write_number(void *to, size_t at, int type, double value) {
  switch (type) {
    case 0: ((int8_t *)to)[at] = (int8_t)value; break;
    case 1: ((uint8_t *)to)[at] = (uint8_t)value; break;
    case 2: ((int32_t *)to)[at] = (int32_t)value; break;
    case 3: ((uint32_t *)to)[at] = (uint32_t)value; break;
    case 4: ((int64_t *)to)[at] = (int64_t)value; break;
    case 5: ((uint64_t *)to)[at] = (uint64_t)value; break;
    case 7: ((float *)to)[at] = (float)value; break;
    case 8: ((double *)to)[at] = value; break;
    case 9: {
      float single = (float)value;
      uint32_t bits;
      memcpy(&bits, &single, sizeof bits);
      ((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
      break;
    }
    case 10:
    case 11:  // Tests have sums that are numbers of the type.
      for (int code = 0; code < 256; code++)
        if (eight_bits((uint8_t)code, type) == value) ((uint8_t *)to)[at] = (uint8_t)code;
      break;
    case 12: ((int16_t *)to)[at] = (int16_t)value; break;
    case 13: ((uint16_t *)to)[at] = (uint16_t)value; break;
    case 14: ((uint8_t *)to)[at] = value != 0; break;
    default: abort();
  }
}

static void post(comm *own, const char *name, const void *bytes, size_t number) {
  char temporary[256], final[256];
  snprintf(temporary, sizeof temporary, "%s/.%s", own->folder, name);
  snprintf(final, sizeof final, "%s/%s", own->folder, name);
  FILE *file = fopen(temporary, "wb");
  if (!file || fwrite(bytes, 1, number, file) != number || fclose(file) || rename(temporary, final)) abort();
}

// Waits for what another rank has posted; null when it was aborted.
static void *fetch(comm *own, const char *name, size_t number) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", own->folder, name);
  FILE *file;
  while (!(file = fopen(path, "rb"))) {
    if (own->aborted) return NULL;
    usleep(200);
  }
  char *bytes = malloc(number + 1);
  if (fread(bytes, 1, number, file) != number) abort();
  fclose(file);
  return bytes;
}

static double joined(double a, double b, int op) {
  switch (op) {
    case 1: return a * b;
    case 2: return a > b ? a : b;
    case 3: return a < b ? a : b;
    default: return a + b;
  }
}

// What a rank brings to a collective: nothing where only the sender's is looked at, whose buffer
// alone is that long.
static size_t brought(int rank, size_t bytes, int copied) { return copied < 0 || rank == copied ? bytes : 0; }

// Numbers that a rank brings to a collective, and those it looks at in what each brings.
static void collective(call *work, size_t brings, size_t begin, size_t number, int copied) {
  comm *own = work->comm;
  char name[64];
  long turn = own->collectives++;
  size_t size = size_of(work->type);
  snprintf(name, sizeof name, "%ld.%d", turn, own->rank);
  post(own, name, work->from, brought(own->rank, brings * size, copied));
  void *all[64] = {0};
  for (int rank = 0; rank < own->size; rank++) {
    snprintf(name, sizeof name, "%ld.%d", turn, rank);
    if (!(all[rank] = fetch(own, name, brought(rank, brings * size, copied)))) return;
  }
  if (work->kind == GATHER) {
    for (int rank = 0; rank < own->size; rank++)
      memcpy((char *)work->to + rank * brings * size, all[rank], brings * size);
  } else if (copied >= 0) {
    memcpy(work->to, all[copied], brings * size);
  } else if (work->to) {
    for (size_t at = 0; at < number; at++) {
      double factor = work->op >= 42 ? factors[work->op % 4096] : 1;
      double value = read_number(all[0], begin + at, work->type) * factor;
      for (int rank = 1; rank < own->size; rank++)
        value = joined(value, read_number(all[rank], begin + at, work->type) * factor, work->op);
      write_number(work->to, at, work->type, work->op == 4 ? value / own->size : value);
    }
  }
  for (int rank = 0; rank < own->size; rank++) free(all[rank]);
  // Who came to this turn is done with the one before.
  char path[256];
  snprintf(path, sizeof path, "%s/%ld.%d", own->folder, turn - 1, own->rank);
  unlink(path);
}

static void run_call(call *work) {
  comm *own = work->comm;
  char name[64];
  size_t size = size_of(work->type), number = work->number;
  switch (work->kind) {
    case ALLREDUCE: collective(work, number, 0, number, -1); break;
    case BROADCAST: collective(work, number, 0, number, work->peer); break;
    case GATHER: collective(work, number, 0, number, -1); break;
    case REDUCE: collective(work, number, 0, own->rank == work->peer ? number : 0, -1); break;
    case SCATTER: collective(work, number * own->size, own->rank * number, number, -1); break;
    case SEND:
      snprintf(name, sizeof name, "p%ld.%d.%d", own->sent[work->peer]++, own->rank, work->peer);
      post(own, name, work->from, number * size);
      break;
    case RECEIVE: {
      snprintf(name, sizeof name, "p%ld.%d.%d", own->received[work->peer]++, work->peer, own->rank);
      void *bytes = fetch(own, name, number * size);
      if (bytes) memcpy(work->to, bytes, number * size);
      free(bytes);
    }
  }
}

static void run_group(job *work) {
  call *next = work->group;
  while (next) {
    call *now = next;
    next = now->next;
    if (!now->comm->aborted) run_call(now);
    pthread_mutex_lock(&lock);
    now->comm->running--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(now);
  }
}

static int add(call work, void *handle) {
  call *copy = malloc(sizeof *copy);
  *copy = work;
  copy->next = NULL;
  if (first_call) last_call->next = copy;
  else first_call = copy;
  last_call = copy;
  call_stream = handle;
  pthread_mutex_lock(&lock);
  work.comm->running++;
  launches++;
  pthread_mutex_unlock(&lock);
  return READY;
}

int ncclGetVersion(int *version) { return *version = 22703, READY; }
const char *ncclGetErrorString(int status) { return status == IN_PROGRESS ? "in progress" : "said by a test"; }

typedef struct {
  char bytes[128];
} unique;

int ncclGetUniqueId(unique *id) {
  const char *folder = getenv("FAKE_NCCL");
  memset(id, 0, sizeof *id);
  count(&names);
  snprintf(id->bytes, sizeof id->bytes, "%s/XXXXXX", folder ? folder : "/tmp");
  return mkdtemp(id->bytes) ? READY : 2;
}

static void *meet(void *argument) {
  comm *own = argument;
  char name[64];
  for (int rank = 0; rank < own->size; rank++) {
    snprintf(name, sizeof name, "hello.%d", rank);
    void *hello = fetch(own, name, 1);
    if (!hello) break;
    free(hello);
  }
  pthread_mutex_lock(&lock);
  own->status = own->aborted ? 6 : READY;
  own->running--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return NULL;
}

int ncclCommInitRankConfig(comm **out, int size, unique id, int rank, void *settings) {
  comm *own = calloc(1, sizeof *own);
  char name[64];
  (void)settings;
  memcpy(own->folder, id.bytes, sizeof own->folder);
  own->rank = rank, own->size = size, own->status = IN_PROGRESS, own->running = 1;
  snprintf(name, sizeof name, "hello.%d", rank);
  post(own, name, "!", 1);
  pthread_t thread;
  pthread_create(&thread, NULL, meet, own);
  pthread_detach(thread);
  return *out = own, IN_PROGRESS;
}

int ncclCommAbort(comm *own) {
  pthread_mutex_lock(&lock);
  own->aborted = 1;
  while (own->running > 0) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return READY;
}

int ncclCommGetAsyncError(comm *own, int *status) {
  pthread_mutex_lock(&lock);
  *status = own->status;
  pthread_mutex_unlock(&lock);
  return READY;
}

int ncclMemAlloc(void **address, size_t bytes) { return (*address = malloc(bytes)) ? READY : 2; }

int ncclCommRegister(comm *own, void *address, size_t bytes, void **handle) {
  count(&registered);
  *handle = address;
  return own && bytes ? READY : 5;
}

int ncclGroupStart(void) { return READY; }

// Of a communicator that does not block, calls are handed over by a thread that a group begins.
typedef struct {
  call *first;
  void *handle;
} group;

static void *hand_over(void *argument) {
  group own = *(group *)argument;
  comm *of = own.first->comm;
  free(argument);
  usleep(100);
  enqueue(own.handle, (job){.run = run_group, .group = own.first});
  pthread_mutex_lock(&lock);
  if (of->status == IN_PROGRESS) of->status = READY;
  pthread_mutex_unlock(&lock);
  return NULL;
}

int ncclGroupEnd(void) {
  if (!first_call) return READY;
  group *own = malloc(sizeof *own);
  *own = (group){first_call, call_stream};
  pthread_mutex_lock(&lock);
  // NCCL refuses what comes before.
  if (first_call->comm->status == IN_PROGRESS) abort();
  first_call->comm->status = IN_PROGRESS;
  pthread_mutex_unlock(&lock);
  first_call = last_call = NULL;
  pthread_t thread;
  pthread_create(&thread, NULL, hand_over, own);
  pthread_detach(thread);
  return IN_PROGRESS;
}

int ncclAllReduce(const void *from, void *to, size_t number, int type, int op, comm *own, void *handle) {
  return add((call){ALLREDUCE, from, to, number, type, op, 0, own, NULL}, handle);
}
int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, comm *own, void *handle) {
  return add((call){BROADCAST, from, to, number, type, 0, root, own, NULL}, handle);
}
int ncclReduce(const void *from, void *to, size_t number, int type, int op, int root, comm *own, void *handle) {
  return add((call){REDUCE, from, to, number, type, op, root, own, NULL}, handle);
}
int ncclAllGather(const void *from, void *to, size_t number, int type, comm *own, void *handle) {
  return add((call){GATHER, from, to, number, type, 0, 0, own, NULL}, handle);
}
int ncclReduceScatter(const void *from, void *to, size_t number, int type, int op, comm *own, void *handle) {
  return add((call){SCATTER, from, to, number, type, op, 0, own, NULL}, handle);
}
int ncclSend(const void *from, size_t number, int type, int peer, comm *own, void *handle) {
  return add((call){SEND, from, NULL, number, type, 0, peer, own, NULL}, handle);
}
int ncclRecv(void *to, size_t number, int type, int peer, comm *own, void *handle) {
  return add((call){RECEIVE, NULL, to, number, type, 0, peer, own, NULL}, handle);
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, comm *own) {
  (void)residence, (void)own;
  *op = 42 + made++ % 4000;
  factors[*op % 4096] = type == 8 ? *(double *)scalar : *(float *)scalar;
  return READY;
}
int ncclRedOpDestroy(int op, comm *own) { return (void)op, (void)own, READY; }
