// Named points in the ring's protocol. In test builds (SCOUT_TEST_POINTS) the test may continue,
// delay, corrupt something or kill its process there; otherwise they are no-ops.
#pragma once

#include <cstdint>

namespace scout {

enum class Point : uint32_t {
  // Producer, in the order of Producer::publish and await_done.
  kClosed,         // the slot's previous record can no longer be claimed
  kHeaderWritten,  // seq, layer, rows, splits
  kDataWritten,    // q, pages, n_pages
  kOpened,         // items can be claimed
  kLogged,
  kHeadRaised,
  kBellRaised,
  kWoken,    // any sleepers were woken
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
  kDone,          // published, waiters are not woken yet
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
