#include "server/attach/attach_server.h"

#include <sys/socket.h>

#include <utility>

#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "server/attach/attach_loop.h"
#include "server/attach/attach_mailbox.h"

namespace kvpool {

AttachEvents EventsOf(Daemon* daemon) {
  return {
      .attached =
          [daemon](std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                   const v1::AttachHello& hello) {
            return daemon->OnAttached(std::move(peer), credentials, hello);
          },
      .slab_ack = [daemon](AttachId id, const v1::SlabAck& ack) { daemon->OnSlabAck(id, ack); },
      .slab_left = [daemon](AttachId id, const v1::SlabLeft& left) { daemon->OnSlabLeft(id, left); },
      .hangup = [daemon](AttachId id) { return daemon->OnHangup(id); },
      .process_dead = [daemon](AttachId id) { daemon->OnProcessDead(id); },
  };
}

absl::StatusOr<std::unique_ptr<AttachServer>> AttachServer::Start(const AttachServerOptions& options,
                                                                  AttachEvents events) {
  ASSIGN_OR_RETURN(UniqueFd listener,
                   options.listen({.path = options.path, .type = SOCK_SEQPACKET, .group = options.group}));
  ASSIGN_OR_RETURN(std::shared_ptr<AttachMailbox> mailbox, AttachMailbox::Make());
  ASSIGN_OR_RETURN(std::unique_ptr<AttachLoop> loop,
                   AttachLoop::Open(options, std::move(events), std::move(listener), std::move(mailbox)));
  return std::unique_ptr<AttachServer>(new AttachServer(std::move(loop)));
}

AttachServer::AttachServer(std::unique_ptr<AttachLoop> loop)
    : loop_(std::move(loop)), thread_(NamedThread("attach", [this] {
        while (loop_->RunOnce(loop_->TimeoutMs())) {
        }
      })) {}

AttachServer::~AttachServer() {
  if (thread_.joinable()) EndThread();
}

void AttachServer::EndThread() {
  loop_->Stop();
  thread_.join();
}

void AttachServer::HangUp() {
  EndThread();
  loop_->HangUp();
}

AttachStats AttachServer::Stats() const { return loop_->Stats(); }

}  // namespace kvpool
