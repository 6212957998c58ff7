// Tests of the shared ring without Python, for sanitizer builds (scripts/sanitize.sh):
//
//   ring_test [stress|kill|all] [--seconds N] [--seed N] [--break NAME]
//
//   stress  producer and runtime in one process, workers are replaced, every answer is checked
//   kill    two processes, either one killed at every named point of the protocol and at random
//
// --break injects a bug that stress must find: early-done (answers are published before they are
// computed), twice (items are claimed twice).
#include <sched.h>
#include <unistd.h>

#include <string>

#include "ring_arena.h"

namespace scout {

void at_test_point(Point point, uint32_t slot) {
  if (ring_test::point_handler != nullptr) ring_test::point_handler(point, slot);
}

}  // namespace scout

namespace ring_test {

PointHandler point_handler = nullptr;

std::vector<int> pick_cpus(uint32_t count) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) die("sched_getaffinity");
  std::vector<int> found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
  std::vector<int> cpus;
  for (uint32_t i = 0; i < count; ++i) cpus.push_back(found[i % found.size()]);
  return cpus;
}

std::vector<int> pick_nodes(uint32_t count, uint32_t nodes) {
  std::vector<int> found;
  for (uint32_t i = 0; i < count; ++i) found.push_back(static_cast<int>(i % nodes));
  return found;
}

}  // namespace ring_test

int main(int argc, char** argv) {
  using namespace ring_test;
  Options options;
  std::string wanted = "all";
  bool known = true;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const char* const value = word.rfind("--", 0) == 0 && i + 1 < argc ? argv[++i] : "";
    if (word == "--seconds") {
      options.seconds = std::atof(value);
    } else if (word == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (word == "--break") {
      options.damage = value;
      known = known && (options.damage == "early-done" || options.damage == "twice");
    } else {
      wanted = word;
    }
  }
  const bool stress = wanted == "all" || wanted == "stress",
             kill = wanted == "all" || wanted == "kill";
  if (!known || !(options.seconds > 0) || !(stress || kill)) {
    std::fputs(
        "usage: ring_test [stress|kill|all] [--seconds N] [--seed N] [--break early-done|twice]\n",
        stderr);
    return 2;
  }
  alarm(static_cast<unsigned>(options.seconds * 10) + 360);  // a hang ends with a signal
  if (stress) run_stress(options);
  if (kill) run_kill(options);
}
