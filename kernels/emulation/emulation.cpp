#include "emulation.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <vector>

namespace emulation {

thread_local unsigned char* shared_memory;

namespace {

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = (128 << 10) + 17 * 64;  // No power of two: stacks would lie in the same sets of a cache.
constexpr size_t MAX_SHARED_BYTES = 228 << 10;

enum class State { Ready, AtWarpOperation, AtInputs, AtBarrier, Finished };

struct Copy {
    void* shared;
    const void* global;
    unsigned bytes, source_bytes;

    void run() const {
        memcpy(shared, global, source_bytes);
        memset(static_cast<char*>(shared) + source_bytes, 0, bytes - source_bytes);
    }
};

// Of __builtin_setjmp: longjmp of the C library looks for handlers to run, which takes longer than most fibers do between jumps.
// Who jumps is never inlined: a function may not both mark a place and go there.
using Place = void* [5];

struct Fiber {
    Place resume;
    bool started = false;
    bool has_waited = false;  // For the kernel before.
    State state = State::Finished;
    std::vector<std::vector<Copy>> copies{1};  // The last group is open.
};

// Pages that a kernel before writes: closed to threads that have not waited for it.
struct Produced {
    void* at;
    size_t bytes;
    int access;  // Once it is done.
};

struct Warp {
    void* lanes[32];
    unsigned mask = 0, arrived = 0;
    Together operation = nullptr;
};

// Everything an OS thread needs to run CTAs.
struct Machine {
    const Kernel* kernel = nullptr;
    const void* args = nullptr;
    Place scheduler;
    unsigned current = 0;
    bool reverse = false;
    std::vector<Produced> produced;
    bool is_closed = false;
    std::vector<Fiber> fibers{MAX_THREADS};
    Warp warps[MAX_THREADS / 32];
    unsigned char* stacks;
    unsigned char* shared_end;

    Machine() {
        stacks = reserve(STACK_BYTES * MAX_THREADS);
        unsigned char* shared = reserve(MAX_SHARED_BYTES + 4096);
        shared_end = shared + MAX_SHARED_BYTES;
        mprotect(shared_end, 4096, PROT_NONE);
    }

    static unsigned char* reserve(size_t bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) fail("no memory for fibers");
        return static_cast<unsigned char*>(at);
    }
};

Machine& machine() {
    static thread_local Machine* own = new Machine;
    return *own;
}

Kernel* all_kernels;

void close_produced(Machine& m, bool closes) {
    if (m.is_closed == closes) return;
    m.is_closed = closes;
    for (const Produced& pages : m.produced) {
        if (mprotect(pages.at, pages.bytes, closes ? PROT_NONE : pages.access)) fail("pages that cannot be closed");
    }
}

void on_signal(int number, siginfo_t* info, void*) {
    const Machine& m = machine();
    for (const Produced& pages : m.produced) {
        const auto at = static_cast<const char*>(info->si_addr), from = static_cast<const char*>(pages.at);
        if (m.is_closed && at >= from && at < from + pages.bytes) fail("reads or writes what the kernel before writes, and has not waited for it");
    }
    fail("signal %d (%s) at address %p: an access out of bounds, or misaligned", number, strsignal(number), info->si_addr);
}

[[noreturn]] void fiber_main();

// Threads of the warp that begins with this one.
unsigned num_lanes(const Machine& m, unsigned first) { return m.kernel->threads - first < 32 ? m.kernel->threads - first : 32; }

[[noreturn, gnu::noinline]] void go_on_with(Machine& m, unsigned id) {
    Fiber& fiber = m.fibers[id];
    m.current = id;
    threadIdx = {id, 0, 0};
    close_produced(m, !fiber.has_waited);
    if (fiber.started) __builtin_longjmp(fiber.resume, 1);
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = m.stacks + STACK_BYTES * id;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
    fail("a fiber does not start");
}

// The next lane of the same warp that is ready, or the scheduler.
[[noreturn, gnu::noinline]] void leave(Machine& m) {
    const unsigned first = m.current / 32 * 32, lanes = num_lanes(m, first), step = m.reverse ? -1u : 1u;
    for (unsigned lane = m.current % 32 + step; lane < lanes; lane += step) {
        if (m.fibers[first + lane].state == State::Ready) go_on_with(m, first + lane);
    }
    __builtin_longjmp(m.scheduler, 1);
}

// Lets others run until this fiber is ready again.
void pause(State state) {
    Machine& m = machine();
    Fiber& self = m.fibers[m.current];
    self.state = state;
    if (__builtin_setjmp(self.resume) == 0) leave(m);
}

// Body of a fiber: one thread of every CTA that comes.
void fiber_main() {
    Machine& m = machine();
    for (;;) {
        m.kernel->thread(m.args);
        Fiber& self = m.fibers[m.current];
        for (auto& group : self.copies) {
            if (!group.empty()) fail("a thread ends with copies that it has not waited for");
        }
        if (!self.has_waited) fail("a thread ends without wait_for_inputs");
        pause(State::Finished);
    }
}

// Makes ready who of these threads waits at a place, and returns how many do.
unsigned release(Machine& m, State place, unsigned first, unsigned threads) {
    unsigned released = 0;
    for (unsigned id = first; id < first + threads; id++) {
        if (m.fibers[id].state != place) continue;
        m.fibers[id].state = State::Ready;
        released++;
    }
    return released;
}

// The first of a warp's threads, in the order of the run, that is ready; MAX_THREADS where none is.
unsigned first_ready(const Machine& m, unsigned first, unsigned lanes) {
    for (unsigned i = 0; i < lanes; i++) {
        const unsigned id = first + (m.reverse ? lanes - 1 - i : i);
        if (m.fibers[id].state == State::Ready) return id;
    }
    return MAX_THREADS;
}

// Runs a warp until none of its lanes is ready; false where none was.
bool run_warp(Machine& m, unsigned first) {
    const unsigned lanes = num_lanes(m, first);
    for (bool progress = false;; progress = true) {
        unsigned id = first_ready(m, first, lanes);
        if (id == MAX_THREADS && release(m, State::AtInputs, first, lanes) > 0) id = first_ready(m, first, lanes);
        if (id == MAX_THREADS) return progress;
        if (__builtin_setjmp(m.scheduler) == 0) go_on_with(m, id);
    }
}

void run_cta(Machine& m) {
    const unsigned threads = m.kernel->threads;
    memset(shared_memory, 0xff, m.shared_end - shared_memory);
    for (unsigned id = 0; id < threads; id++) m.fibers[id].state = State::Ready, m.fibers[id].has_waited = false;
    const unsigned warps = (threads + 31) / 32;
    for (;;) {
        bool progress = false;
        for (unsigned i = 0; i < warps; i++) progress |= run_warp(m, 32 * (m.reverse ? warps - 1 - i : i));
        if (progress) continue;
        unsigned finished = 0, at_barrier = 0;
        for (unsigned id = 0; id < threads; id++) {
            finished += m.fibers[id].state == State::Finished;
            at_barrier += m.fibers[id].state == State::AtBarrier;
        }
        if (finished == threads) return;
        if (at_barrier != threads) {
            fail("of %u threads %u wait at a barrier and %u have ended; the others wait in warp operations", threads, at_barrier, finished);
        }
        release(m, State::AtBarrier, 0, threads);
    }
}

}  // namespace

Registration::Registration(Kernel& kernel) {
    kernel.next = all_kernels;
    all_kernels = &kernel;
}

void fail(const char* format, ...) {
    Machine& m = machine();
    fprintf(stderr, "kernel %s, CTA (%u, %u, %u), thread %u: ", m.kernel ? m.kernel->name : "none", blockIdx.x, blockIdx.y, blockIdx.z,
            threadIdx.x);
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    abort();
}

void warp(unsigned mask, Together operation, void* mine) {
    Machine& m = machine();
    const unsigned first = m.current / 32 * 32, lane = m.current % 32;
    Warp& w = m.warps[m.current / 32];
    if (w.arrived == 0) {
        memset(w.lanes, 0, sizeof w.lanes);
        w.mask = mask;
        w.operation = operation;
    }
    if (w.mask != mask || w.operation != operation || !(mask >> lane & 1)) fail("lanes of a warp meet in different operations or masks");
    w.lanes[lane] = mine;
    w.arrived |= 1u << lane;
    if (w.arrived != mask) return pause(State::AtWarpOperation);
    operation(w.lanes);
    w.arrived = 0;
    for (unsigned other = 0; other < 32; other++) {
        if (other != lane && (mask >> other & 1)) m.fibers[first + other].state = State::Ready;
    }
}

void barrier() { pause(State::AtBarrier); }

void wait_for_inputs() {
    Machine& m = machine();
    m.fibers[m.current].has_waited = true;
    // All of a warp go on together: so pages are opened and closed once a warp, and not once a thread. To meet all of a CTA here
    // would be a barrier that a GPU has not.
    if (!m.produced.empty()) pause(State::AtInputs);
}

void copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(global) % bytes) fail("a misaligned copy of %u bytes", bytes);
    Machine& m = machine();
    const Copy copy{shared, global, bytes, source_bytes};
    if (m.reverse) copy.run();
    m.fibers[m.current].copies.back().push_back(copy);
}

void commit_copies() {
    Machine& m = machine();
    m.fibers[m.current].copies.emplace_back();
}

void wait_for_copies(unsigned groups_left) {
    Machine& m = machine();
    auto& copies = m.fibers[m.current].copies;
    while (copies.size() > groups_left + 1) {
        for (const Copy& copy : copies.front()) {
            if (!m.reverse) copy.run();
        }
        copies.erase(copies.begin());
    }
}

}  // namespace emulation

using emulation::Kernel;

const Kernel* emulation_kernels() { return emulation::all_kernels; }

const Kernel* emulation_next(const Kernel* kernel) { return kernel->next; }

void emulation_launch(const Kernel* kernel, const unsigned* grid, const void* args, int reverse) {
    struct sigaction action = {};
    action.sa_sigaction = emulation::on_signal;
    action.sa_flags = SA_SIGINFO;
    for (int number : {SIGSEGV, SIGBUS, SIGILL}) sigaction(number, &action, nullptr);
    auto& m = emulation::machine();
    m.kernel = kernel;
    m.args = args;
    m.reverse = reverse;
    emulation::shared_memory = m.shared_end - (kernel->shared_bytes + 15) / 16 * 16;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {kernel->threads, 1, 1};
    const unsigned ctas = grid[0] * grid[1] * grid[2];
    for (unsigned i = 0; i < ctas; i++) {
        const unsigned at = reverse ? ctas - 1 - i : i;
        blockIdx = {at % grid[0], at / grid[0] % grid[1], at / (grid[0] * grid[1])};
        emulation::run_cta(m);
    }
    emulation::close_produced(m, false);
    m.produced.clear();
}

void emulation_produced(void* at, size_t bytes, int is_writable) {
    emulation::machine().produced.push_back({at, bytes, is_writable ? PROT_READ | PROT_WRITE : PROT_READ});
}
