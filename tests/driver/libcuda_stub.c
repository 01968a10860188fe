/* A stand-in for libcuda.so.1: enough of the driver to run the loader and the launch path without a GPU.
 *
 * It answers cuGetProcAddress for the real cuda.bindings, keeps the state that the driver would keep
 * (context stacks, capture modes, kernel attributes), refuses what the driver refuses, and writes one JSON
 * line per call. conftest.py compiles it and documents the environment variables that configure it.
 *
 * Struct layouts and numbers follow cuda.h; they are repeated here so that no CUDA toolkit is needed.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int CUresult;
enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900,
};
enum { ATTRIBUTE_MAX_DYNAMIC_SHARED = 8 };
enum { CAPTURE_MODE_RELAXED = 2 };
enum { LAUNCH_ATTRIBUTE_CLUSTER = 4, LAUNCH_ATTRIBUTE_POLICY = 5, LAUNCH_ATTRIBUTE_PDL = 6 };

enum { MAX_DEVICES = 8, MAX_KERNELS = 1024, STACK_DEPTH = 16, DEFAULT_SHARED = 48 * 1024 };

typedef struct {
  int major, minor, sm_count, max_shared;
} Device;

typedef struct {
  char name[256];
  uintptr_t library;
  int max_shared[MAX_DEVICES];
  int parameter_bytes;
} Kernel;

typedef struct {
  unsigned id, pad;
  union {
    unsigned dims[3];
    int flag;
    char bytes[64];
  } value;
} LaunchAttribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  LaunchAttribute *attributes;
  unsigned attribute_count;
} LaunchConfig;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device devices[MAX_DEVICES];
static int device_count;
static Kernel kernels[MAX_KERNELS];
static uintptr_t kernel_count, library_count;
static void *images[MAX_KERNELS];
static FILE *log_file;
static int parameter_bytes, capturing, capture_invalidated;
static int initialized, inherited; /* a child forked after cuInit has no driver */

static __thread uintptr_t stack[STACK_DEPTH];
static __thread int depth, capture_mode;

/* Handles are small numbers in ranges of their own, so that a mix-up cannot pass. */
static const uintptr_t PRIMARY = 0x1000, LIBRARY = 0x2000, KERNEL = 0x3000;

/* ---- faults: "cuLaunchKernelEx=719,cuLibraryLoadData=2:1" fails every call, or the next n calls ---- */

typedef struct {
  char name[64];
  int code, remaining;
} Fault;
static Fault faults[32];
static int fault_count;

void stub_fail(const char *name, int code, int times) {
  Fault *fault = &faults[fault_count++ % 32];
  snprintf(fault->name, sizeof fault->name, "%s", name);
  fault->code = code;
  fault->remaining = times;
}

static CUresult injected(const char *name) {
  for (int i = fault_count - 1; i >= 0; i--)
    if (!strcmp(faults[i].name, name) && faults[i].remaining) {
      if (faults[i].remaining > 0) faults[i].remaining--;
      return faults[i].code;
    }
  return SUCCESS;
}

void stub_capture(int active) { capturing = active, capture_invalidated = 0; }
int stub_capture_invalidated(void) { return capture_invalidated; }
int stub_capture_mode(void) { return capture_mode; }
int stub_stack_depth(void) { return depth; }

/* ---- configuration ---- */

static void read_devices(const char *spec) {
  Device physical[MAX_DEVICES];
  int count = 0;
  while (count < MAX_DEVICES && *spec) {
    Device *d = &physical[count++];
    sscanf(spec, "%d.%d:%d:%d", &d->major, &d->minor, &d->sm_count, &d->max_shared);
    spec += strcspn(spec, ",");
    spec += *spec == ',';
  }
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    memcpy(devices, physical, sizeof physical);
    device_count = count;
    return;
  }
  for (char *end; *visible; visible = *end ? end + 1 : end) {
    long ordinal = strtol(visible, &end, 10);
    if (end == visible || ordinal < 0 || ordinal >= count) break; /* as the driver: the rest is hidden */
    devices[device_count++] = physical[ordinal];
  }
}

static void after_fork_in_child(void) { inherited |= initialized, initialized = 0; }

__attribute__((constructor)) static void configure(void) {
  const char *value;
  pthread_atfork(NULL, NULL, after_fork_in_child);
  read_devices((value = getenv("CUDA_STUB_DEVICES")) ? value : "9.0:132:232448");
  if ((value = getenv("CUDA_STUB_LOG"))) log_file = fopen(value, "a");
  if ((value = getenv("CUDA_STUB_PARAMETER_BYTES"))) parameter_bytes = atoi(value);
  for (value = getenv("CUDA_STUB_FAIL"); value && *value;) {
    char name[64];
    int code, times = -1;
    if (sscanf(value, "%63[^=]=%d:%d", name, &code, &times) >= 2) stub_fail(name, code, times);
    value += strcspn(value, ",");
    value += *value == ',';
  }
}

/* ---- the log ---- */

static void write_hex(const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) fprintf(log_file, "%02x", ((const unsigned char *)bytes)[i]);
}

static uintptr_t current(void) { return depth ? stack[depth - 1] : 0; }
static int current_device(void) { return (int)(current() - PRIMARY) % MAX_DEVICES; }

/* One line per call: name, result, thread, current context, then what `...` adds. */
#define RECORD(result, ...)                                                                               \
  do {                                                                                                    \
    if (log_file) {                                                                                       \
      pthread_mutex_lock(&lock);                                                                          \
      fprintf(log_file, "{\"call\": \"%s\", \"result\": %d, \"pid\": %d, \"thread\": %ld, \"context\": %lu", \
              __func__, result, (int)getpid(), syscall(SYS_gettid), (unsigned long)current());            \
      __VA_ARGS__;                                                                                        \
      fputs("}\n", log_file);                                                                             \
      fflush(log_file);                                                                                   \
      pthread_mutex_unlock(&lock);                                                                        \
    }                                                                                                     \
  } while (0)
#define FIELD(format, ...) fprintf(log_file, ", " format, __VA_ARGS__)

/* What every call but the error and version queries checks first. */
static CUresult refused(const char *name) {
  CUresult fault = injected(name);
  if (fault) return fault;
  return initialized ? SUCCESS : NOT_INITIALIZED;
}

static CUresult bad_device(int device) { return device < 0 || device >= device_count ? INVALID_DEVICE : SUCCESS; }
static Kernel *kernel_of(uintptr_t handle) {
  return handle >= KERNEL && handle < KERNEL + kernel_count ? &kernels[handle - KERNEL] : NULL;
}

/* ---- process and devices ---- */

CUresult cuInit(unsigned flags) {
  CUresult result = injected("cuInit");
  if (!result && !device_count) result = NO_DEVICE;
  if (!result && inherited) result = NOT_INITIALIZED;
  if (!result) initialized = 1;
  RECORD(result, FIELD("\"flags\": %u", flags));
  return result;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return injected(__func__);
}

CUresult cuDeviceGetCount(int *count) {
  CUresult result = refused(__func__);
  *count = device_count;
  RECORD(result, );
  return result;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  CUresult result = refused(__func__);
  if (!result) result = bad_device(ordinal);
  *device = ordinal;
  RECORD(result, FIELD("\"ordinal\": %d", ordinal));
  return result;
}

CUresult cuDeviceGetName(char *name, int length, int device) {
  CUresult result = refused(__func__);
  if (!result) result = bad_device(device);
  if (!result) snprintf(name, length, "Stub GPU %d.%d", devices[device].major, devices[device].minor);
  RECORD(result, FIELD("\"device\": %d", device));
  return result;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  CUresult result = refused(__func__);
  if (!result) result = bad_device(device);
  if (!result) {
    const Device *d = &devices[device];
    switch (attribute) {
      case 16: *value = d->sm_count; break;
      case 75: *value = d->major; break;
      case 76: *value = d->minor; break;
      case 97: *value = d->max_shared; break;
      default: result = INVALID_VALUE;
    }
  }
  RECORD(result, FIELD("\"device\": %d, \"attribute\": %d", device, attribute));
  return result;
}

/* ---- contexts ---- */

CUresult cuDevicePrimaryCtxRetain(uintptr_t *context, int device) {
  CUresult result = refused(__func__);
  if (!result) result = bad_device(device);
  *context = PRIMARY + (uintptr_t)device;
  RECORD(result, FIELD("\"device\": %d", device));
  return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  CUresult result = refused(__func__);
  RECORD(result, FIELD("\"device\": %d", device));
  return result;
}

CUresult cuCtxGetCurrent(uintptr_t *context) {
  CUresult result = refused(__func__);
  *context = current();
  RECORD(result, );
  return result;
}

CUresult cuCtxSetCurrent(uintptr_t context) {
  CUresult result = refused(__func__);
  if (!result) {
    if (!depth) depth = 1;
    stack[depth - 1] = context;
  }
  RECORD(result, );
  return result;
}

CUresult cuCtxPushCurrent_v2(uintptr_t context) {
  CUresult result = refused(__func__);
  if (!result && (!context || depth == STACK_DEPTH)) result = INVALID_CONTEXT;
  if (!result) stack[depth++] = context;
  RECORD(result, );
  return result;
}

CUresult cuCtxPopCurrent_v2(uintptr_t *context) {
  CUresult result = refused(__func__);
  if (!result && !depth) result = INVALID_CONTEXT;
  if (!result) *context = stack[--depth];
  RECORD(result, );
  return result;
}

CUresult cuCtxSynchronize(void) {
  CUresult result = refused(__func__);
  RECORD(result, );
  return result;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  CUresult result = refused(__func__);
  int previous = capture_mode;
  if (!result) capture_mode = *mode, *mode = previous;
  RECORD(result, FIELD("\"mode\": %d", capture_mode));
  return result;
}

/* ---- libraries and kernels ---- */

static size_t image_size(const unsigned char *image) {
  uint64_t section_headers;
  uint16_t count;
  memcpy(&section_headers, image + 0x28, 8);
  memcpy(&count, image + 0x3c, 2);
  return section_headers + 64u * count;
}

CUresult cuLibraryLoadData(uintptr_t *library, const void *code, void *o0, void **v0, unsigned n0, void *o1,
                           void **v1, unsigned n1) {
  CUresult result = refused(__func__);
  if (!result && capturing && capture_mode != CAPTURE_MODE_RELAXED)
    result = CAPTURE_UNSUPPORTED, capture_invalidated = 1;
  if (!result && memcmp(code, "\177ELF", 4)) result = INVALID_IMAGE;
  if (!result) {
    pthread_mutex_lock(&lock);
    size_t size = image_size(code);
    images[library_count] = memcpy(malloc(size), code, size);
    *library = LIBRARY + library_count++;
    pthread_mutex_unlock(&lock);
  }
  RECORD(result, FIELD("\"bytes\": %zu", result ? 0 : image_size(code)));
  return result;
}

CUresult cuLibraryUnload(uintptr_t library) {
  CUresult result = refused(__func__);
  if (!result && (library < LIBRARY || library >= LIBRARY + library_count)) result = INVALID_HANDLE;
  RECORD(result, FIELD("\"library\": %lu", (unsigned long)library));
  return result;
}

/* What CUDA_STUB_PARAMETER_BYTES_OF says of a kernel, "name:bytes,name:bytes"; 0 = nothing. */
static int parameter_bytes_of(const char *kernel) {
  const char *list = getenv("CUDA_STUB_PARAMETER_BYTES_OF");
  const char *found = list ? strstr(list, kernel) : NULL;
  return found && found[strlen(kernel)] == ':' ? atoi(found + strlen(kernel) + 1) : 0;
}

CUresult cuLibraryGetKernel(uintptr_t *kernel, uintptr_t library, const char *name) {
  CUresult result = refused(__func__);
  if (!result && (library < LIBRARY || library >= LIBRARY + library_count)) result = INVALID_HANDLE;
  if (!result) {
    const void *image = images[library - LIBRARY];
    if (!memmem(image, image_size(image), name, strlen(name) + 1)) result = NOT_FOUND;
  }
  if (!result) {
    pthread_mutex_lock(&lock);
    uintptr_t i = 0;
    while (i < kernel_count && (kernels[i].library != library || strcmp(kernels[i].name, name))) i++;
    if (i == kernel_count) {
      kernels[i].library = library;
      snprintf(kernels[i].name, sizeof kernels[i].name, "%s", name);
      kernels[i].parameter_bytes = parameter_bytes_of(name);
      kernel_count++;
    }
    *kernel = KERNEL + i;
    pthread_mutex_unlock(&lock);
  }
  RECORD(result, FIELD("\"name\": \"%s\"", name));
  return result;
}

CUresult cuKernelSetAttribute(int attribute, int value, uintptr_t handle, int device) {
  CUresult result = refused(__func__);
  Kernel *kernel = kernel_of(handle);
  if (!result && !kernel) result = INVALID_HANDLE;
  if (!result) result = bad_device(device);
  if (!result && (attribute != ATTRIBUTE_MAX_DYNAMIC_SHARED || value > devices[device].max_shared))
    result = INVALID_VALUE;
  if (!result) kernel->max_shared[device] = value;
  RECORD(result, FIELD("\"kernel\": %lu, \"device\": %d, \"attribute\": %d, \"value\": %d", (unsigned long)handle,
                       device, attribute, value));
  return result;
}

CUresult cuKernelGetAttribute(int *value, int attribute, uintptr_t handle, int device) {
  CUresult result = refused(__func__);
  Kernel *kernel = kernel_of(handle);
  if (!result && !kernel) result = INVALID_HANDLE;
  if (!result) *value = attribute == ATTRIBUTE_MAX_DYNAMIC_SHARED ? kernel->max_shared[device] : 0;
  RECORD(result, FIELD("\"kernel\": %lu, \"device\": %d, \"attribute\": %d", (unsigned long)handle, device, attribute));
  return result;
}

/* ---- tensor maps ---- */

CUresult cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                int interleave, int swizzle, int l2_promotion, int oob_fill) {
  CUresult result = refused(__func__);
  if (!result && ((uintptr_t)map % 64 || rank < 1 || rank > 5)) result = INVALID_VALUE;
  if (!result) {
    /* What a test can decode: ten 32-bit words, then the dims. */
    uint32_t words[32] = {(uint32_t)dtype, rank, (uint32_t)(uintptr_t)address, (uint32_t)((uintptr_t)address >> 32),
                          (uint32_t)interleave, (uint32_t)swizzle, (uint32_t)l2_promotion, (uint32_t)oob_fill};
    memcpy(words + 8, dims, 8 * rank);
    memcpy(words + 18, box, 4 * rank);
    memcpy(map, words, 128);
  }
  RECORD(result, {
    FIELD("\"dtype\": %d, \"rank\": %u, \"address\": %lu, \"interleave\": %d, \"swizzle\": %d, \"l2_promotion\": %d, "
          "\"oob_fill\": %d",
          dtype, rank, (unsigned long)(uintptr_t)address, interleave, swizzle, l2_promotion, oob_fill);
    FIELD("\"dims\": [%lu", (unsigned long)dims[0]);
    for (unsigned i = 1; i < rank; i++) FIELD("%lu", (unsigned long)dims[i]);
    fputs("], \"strides\": [", log_file);
    for (unsigned i = 0; i + 1 < rank; i++) fprintf(log_file, "%s%lu", i ? ", " : "", (unsigned long)strides[i]);
    fprintf(log_file, "], \"box\": [%u", box[0]);
    for (unsigned i = 1; i < rank; i++) FIELD("%u", box[i]);
    fprintf(log_file, "], \"element_strides\": [%u", element_strides[0]);
    for (unsigned i = 1; i < rank; i++) FIELD("%u", element_strides[i]);
    fputs("]", log_file);
  });
  return result;
}

/* ---- memory ---- */

CUresult cuMemsetD8Async(uintptr_t address, unsigned char value, size_t size, void *stream) {
  CUresult result = refused(__func__);
  if (!result && !current()) result = INVALID_CONTEXT;
  RECORD(result, FIELD("\"address\": %lu, \"value\": %u, \"size\": %zu, \"stream\": %lu", (unsigned long)address,
                       value, size, (unsigned long)(uintptr_t)stream));
  return result;
}

CUresult cuStreamIsCapturing(void *stream, int *status) {
  CUresult result = refused(__func__);
  *status = capturing;
  RECORD(result, FIELD("\"stream\": %lu", (unsigned long)(uintptr_t)stream));
  return result;
}

/* ---- launch ---- */

/* A launch logs this many bytes of the kernel's first parameter, in place of CUDA_STUB_PARAMETER_BYTES. */
void stub_parameter_bytes(const char *kernel, int bytes) {
  for (uintptr_t i = 0; i < kernel_count; i++)
    if (!strcmp(kernels[i].name, kernel)) kernels[i].parameter_bytes = bytes;
}


static CUresult check_launch(const LaunchConfig *config, const Kernel *kernel) {
  if (!current()) return INVALID_CONTEXT;
  if (!kernel) return INVALID_HANDLE;
  for (int i = 0; i < 3; i++)
    if (!config->grid[i] || !config->block[i]) return INVALID_VALUE;
  int allowed = kernel->max_shared[current_device()];
  if (config->shared > (unsigned)(allowed > DEFAULT_SHARED ? allowed : DEFAULT_SHARED)) return INVALID_VALUE;
  return SUCCESS;
}

CUresult cuLaunchKernelEx(const LaunchConfig *config, uintptr_t handle, void **parameters, void **extra) {
  CUresult result = refused(__func__);
  Kernel *kernel = kernel_of(handle);
  if (!result) result = check_launch(config, kernel);
  RECORD(result, {
    FIELD("\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %lu",
          kernel ? kernel->name : "", config->grid[0], config->grid[1], config->grid[2], config->block[0],
          config->block[1], config->block[2], config->shared, (unsigned long)(uintptr_t)config->stream);
    for (unsigned i = 0; i < config->attribute_count; i++) {
      const LaunchAttribute *a = &config->attributes[i];
      if (a->id == LAUNCH_ATTRIBUTE_CLUSTER)
        FIELD("\"cluster\": [%u, %u, %u]", a->value.dims[0], a->value.dims[1], a->value.dims[2]);
      else if (a->id == LAUNCH_ATTRIBUTE_PDL)
        FIELD("\"pdl\": %s", a->value.flag ? "true" : "false");
      else if (a->id == LAUNCH_ATTRIBUTE_POLICY)
        FIELD("\"policy\": %d", a->value.flag);
      else
        FIELD("\"attribute_%u\": true", a->id);
    }
    fputs(", \"attributes\": [", log_file);
    for (unsigned i = 0; i < config->attribute_count; i++)
      fprintf(log_file, "%s%u", i ? ", " : "", config->attributes[i].id);
    fputs("], \"parameters\": \"", log_file);
    int logged = kernel && kernel->parameter_bytes ? kernel->parameter_bytes : parameter_bytes;
    if (parameters && logged) write_hex(parameters[0], (size_t)logged);
    fputs("\"", log_file);
  });
  return result;
}

/* ---- errors and lookup ---- */

static const struct {
  int code;
  const char *name, *text;
} ERRORS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

static CUresult describe(int code, const char **text, int want_name) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof ERRORS[0]; i++)
    if (ERRORS[i].code == code) {
      *text = want_name ? ERRORS[i].name : ERRORS[i].text;
      return SUCCESS;
    }
  *text = NULL;
  return INVALID_VALUE;
}
CUresult cuGetErrorName(int code, const char **text) { return describe(code, text, 1); }
CUresult cuGetErrorString(int code, const char **text) { return describe(code, text, 0); }

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

#define ENTRY(name) {#name, (void *)name}
static const struct {
  const char *name;
  void *function;
} EXPORTS[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSetCurrent),
    ENTRY(cuCtxSynchronize), ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuLibraryLoadData),
    ENTRY(cuLibraryUnload), ENTRY(cuLibraryGetKernel), ENTRY(cuKernelSetAttribute), ENTRY(cuKernelGetAttribute),
    ENTRY(cuTensorMapEncodeTiled), ENTRY(cuLaunchKernelEx), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
    ENTRY(cuMemsetD8Async), ENTRY(cuStreamIsCapturing),
    {"cuDevicePrimaryCtxRelease", (void *)cuDevicePrimaryCtxRelease_v2},
    {"cuCtxPushCurrent", (void *)cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", (void *)cuCtxPopCurrent_v2},
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
};

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  (void)version, (void)flags;
  for (size_t i = 0; i < sizeof EXPORTS / sizeof EXPORTS[0]; i++)
    if (!strcmp(EXPORTS[i].name, symbol)) {
      *function = EXPORTS[i].function;
      if (status) *status = 0;
      return SUCCESS;
    }
  *function = NULL;
  if (status) *status = 1;
  return NOT_FOUND;
}
