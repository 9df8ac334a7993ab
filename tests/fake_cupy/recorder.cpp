// Which bytes a kernel loads and stores: what g++ -fsanitize=thread calls before every access,
// without ThreadSanitizer. One byte of shadow for each byte of the fake GPUs: 1 read, 2 written.
#include <sys/mman.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {
typedef uintptr_t Address;
constexpr int PAGE_BITS = 12;
Address low, high, wild;
unsigned char *shadow, *seen;  // seen: by page
std::vector<size_t> pages;
std::vector<Address> ignored;  // thread-local variables of the kernels

bool ours(Address address) {  // the stack, or a geometry variable
    Address here = (Address)__builtin_frame_address(0);
    if (address + (1 << 20) > here && address < here + (1 << 20)) return true;
    return std::find_if(ignored.begin(), ignored.end(), [&](Address start) {
               return start <= address && address < start + 16; }) != ignored.end();
}

void touch(const void* pointer, size_t size, unsigned char kind) {
    Address address = (Address)pointer;
    if (address < low || address + size > high) {
        if (!wild && !ours(address)) wild = address;
        return;
    }
    size_t offset = address - low;
    for (size_t i = 0; i < size; ++i) shadow[offset + i] |= kind;
    for (size_t page = offset >> PAGE_BITS; page <= (offset + size - 1) >> PAGE_BITS; ++page)
        if (!seen[page]) { seen[page] = 1; pages.push_back(page); }
}

void* zeros(size_t size) {
    return mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
}  // namespace

extern "C" {
void fake_region(Address start, Address end) {
    low = start, high = end;
    shadow = (unsigned char*)zeros(end - start);
    seen = (unsigned char*)zeros(((end - start) >> PAGE_BITS) + 1);
}
void fake_ignore(const void* start) {
    if (std::find(ignored.begin(), ignored.end(), (Address)start) == ignored.end())
        ignored.push_back((Address)start);
}
// The runs of bytes touched alike since the last call, as (start, end, kind); how many there are.
size_t fake_collect(Address* out, size_t most, Address* was_wild) {
    std::sort(pages.begin(), pages.end());
    size_t found = 0;
    Address end = 0;
    for (size_t page : pages) {
        unsigned char* bytes = shadow + (page << PAGE_BITS);
        for (size_t i = 0; i < (size_t)1 << PAGE_BITS; ++i) {
            if (!bytes[i]) continue;
            Address address = low + (page << PAGE_BITS) + i;
            if (!found || address != end || out[3 * found - 1] != bytes[i]) {
                if (found == most) return most + 1;
                out[3 * found] = address, out[3 * found + 2] = bytes[i], ++found;
            }
            out[3 * found - 2] = end = address + 1;
        }
        memset(bytes, 0, 1 << PAGE_BITS);
        seen[page] = 0;
    }
    pages.clear();
    *was_wild = wild;
    wild = 0;
    return found;
}

#define BOTH(size)                                                              \
    void __tsan_read##size(void* a) { touch(a, size, 1); }                      \
    void __tsan_write##size(void* a) { touch(a, size, 2); }                     \
    void __tsan_unaligned_read##size(void* a) { touch(a, size, 1); }            \
    void __tsan_unaligned_write##size(void* a) { touch(a, size, 2); }
BOTH(1) BOTH(2) BOTH(4) BOTH(8) BOTH(16)
void __tsan_read_range(void* a, size_t size) { touch(a, size, 1); }
void __tsan_write_range(void* a, size_t size) { touch(a, size, 2); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
