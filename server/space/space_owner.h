// Who keeps the registry of sessions, the housekeeper and the reclaimer that a space's turns have work for.
#ifndef KVPOOL_SERVER_SPACE_SPACE_OWNER_H_
#define KVPOOL_SERVER_SPACE_SPACE_OWNER_H_

namespace kvpool {

struct Deferred;
class Space;

class SpaceOwner {
 public:
  // Carries out `ended`, `gone`, `housekeep` and `reclaim` of a turn. Comes from any thread, under no lock,
  // once the space has carried out the rest.
  virtual void AfterTurn(Space* space, const Deferred& deferred) = 0;

 protected:
  ~SpaceOwner() = default;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_OWNER_H_
