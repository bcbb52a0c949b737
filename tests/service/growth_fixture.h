// A daemon whose spaces grow, and what one may see of them.
#ifndef KVPOOL_TESTS_SERVICE_GROWTH_FIXTURE_H_
#define KVPOOL_TESTS_SERVICE_GROWTH_FIXTURE_H_

#include <memory>
#include <utility>

#include "tests/service/service_fixture.h"

namespace kvpool {

class GrowthTest : public ServiceTest {
 protected:
  SpaceSnapshot Space(size_t index = 0) { return daemon_->Snapshot().spaces.at(index); }
  uint64_t Used(int device = 0) { return daemon_->Snapshot().devices.at(device).used_bytes(); }
  void Ack(Engine* engine, uint32_t slab) {
    v1::SlabAck ack;
    ack.set_slab(slab);
    daemon_->OnSlabAck(engine->id, ack);
  }
  // An engine that has yet to map the second slab, and one whose guarantee rests on that.
  std::pair<std::unique_ptr<Engine>, std::unique_ptr<Engine>> OpenPending() {
    StartDaemon(4);
    auto mapping = OpenEngine(OpenRequest(), "a");
    mapping->Lease(12);
    v1::OpenSession request = OpenRequest();
    request.set_guaranteed_blocks(10);
    return {std::move(mapping), OpenEngine(request, "b")};
  }
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_GROWTH_FIXTURE_H_
