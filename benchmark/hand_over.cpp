// The CPU's side of benchmark/gpu_handover.py: it answers bells, and does no work. Compiled by read_loop.py and called
// through ctypes, which gives up Python's lock meanwhile: a loop in Python would keep it, and whoever launches
// waited for it up to 5 ms after each call that gives it up, as the replay of a graph does.
#include <cstdint>

extern "C" {

// Layer by layer, over and over: sees bell[layer], takes it back, counts it in *answered and sets done[layer].
// Returns when *end is not 0.
void scout_answer_bells(int64_t* bell, int64_t* done, int64_t layers, int64_t* answered, const int64_t* end) {
  for (int64_t layer = 0;; layer = layer + 1 < layers ? layer + 1 : 0) {
    while (__atomic_load_n(bell + layer, __ATOMIC_ACQUIRE) == 0) {
      if (__atomic_load_n(end, __ATOMIC_RELAXED) != 0) return;
    }
    __atomic_store_n(bell + layer, 0, __ATOMIC_RELAXED);
    __atomic_store_n(answered, *answered + 1, __ATOMIC_RELAXED);
    __atomic_store_n(done + layer, 1, __ATOMIC_RELEASE);
  }
}
}
