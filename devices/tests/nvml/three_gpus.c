/* A stand-in for NVIDIA's management library: two GPUs behind a switch and one that fell off the bus.
   Functions and structures have the forms of nvml.h. */
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
static int gpus[3] = {0, 1, 2};
static int lost(void *gpu) { return *(int *)gpu == 2 ? 15 : 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { (void)error; return "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = &gpus[index]; return 0; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned length) { (void)gpu; snprintf(text, length, "NVIDIA H200"); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned length) { snprintf(text, length, "GPU-%d", *(int *)gpu); return 0; }
int nvmlDeviceGetMinorNumber(void *gpu, unsigned *minor) { *minor = 4 + *(int *)gpu; return lost(gpu); }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) { *milliwatts = 75500; return lost(gpu); }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) { *celsius = 33; return sensor ? 2 : lost(gpu); }
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *memory) {
    memory->total = 150754820096; memory->free = 150000000000; memory->used = 754820096; return lost(gpu);
}
int nvmlDeviceGetPciInfo_v3(void *gpu, pci_t *pci) {
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%d0:00.0", 1 + *(int *)gpu); return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process_t *processes) {
    *count = *(int *)gpu == 0; processes[0].pid = 4711; processes[0].used = 1ull << 30; return lost(gpu);
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) { *level = 50; return lost(a) | lost(b); }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *active) { *active = link < 18; return lost(gpu); }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, int *type) { (void)link; *type = 2; return lost(gpu); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, pci_t *pci) { (void)gpu; (void)link; (void)pci; return 3; }
