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
#include <sys/wait.h>
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

namespace {

struct Mode {
  const char* name;
  int (*run)(const Options&);
};
constexpr Mode kModes[] = {{"stress", run_stress}, {"kill", run_kill}};

// Runs in a separate process: a crash or a hang is a result too.
int run_apart(const Mode& mode, const Options& options) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    alarm(static_cast<unsigned>(options.seconds * 5) + 180);
    const int rc = mode.run(options);
    std::fflush(nullptr);
    std::exit(rc);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) die("waitpid");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
    std::fprintf(stderr, "FAILED: %s hangs (seed %llu)\n", mode.name,
                 static_cast<unsigned long long>(options.seed));
  else
    std::fprintf(stderr, "FAILED: %s, %s %d (seed %llu)\n", mode.name,
                 WIFSIGNALED(status) ? "signal" : "exit code",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
                 static_cast<unsigned long long>(options.seed));
  return 1;
}

}  // namespace
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
  int ran = 0, failed = 0;
  for (const Mode& mode : kModes) {
    if (!known || !(options.seconds > 0) || (wanted != "all" && wanted != mode.name)) continue;
    ++ran;
    failed += run_apart(mode, options);
  }
  if (ran > 0) return failed == 0 ? 0 : 1;
  std::fputs(
      "usage: ring_test [stress|kill|all] [--seconds N] [--seed N] [--break early-done|twice]\n",
      stderr);
  return 2;
}
