// Named places in the ring's protocol. In a build for tests (SCOUT_TEST_POINTS) the test decides
// there to go on, to dawdle, to damage something or to kill its process; otherwise they are
// nothing.
#pragma once

#include <cstdint>

namespace scout {

enum class Point : uint32_t {
  // Producer, in the order of Producer::publish and await_done.
  kClosed,         // the slot's old record can no longer be claimed
  kHeaderWritten,  // seq, layer, rows, parts
  kDataWritten,    // q, pages, n_pages
  kOpened,         // items can be claimed by whoever looks
  kLogged,
  kHeadRaised,
  kBellRaised,
  kWoken,    // sleepers, if there were any
  kWaiting,  // reply.waiters is set
  kAnswered,
  // Worker, in the order of Runtime::serve, run_item, publish_done and sleep.
  kEntryRead,
  kHeaderRead,
  kItemClaimed,
  kItemComputed,
  kRowWritten,
  kAllRowsWritten,
  kStatusWritten,
  kDone,          // published, whoever waits is not woken yet
  kGoingToSleep,  // counted as a sleeper
  kFallingAsleep,
  kAwake,
  kCount,
};

#ifdef SCOUT_TEST_POINTS
void at_test_point(Point point, uint32_t slot);  // the test's
#define SCOUT_POINT(point, slot) ::scout::at_test_point(::scout::Point::point, slot)
#else
#define SCOUT_POINT(point, slot) static_cast<void>(0)
#endif

}  // namespace scout
