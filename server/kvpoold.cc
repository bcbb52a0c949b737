#include "server/kvpoold.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cuda/device.h"
#include "proto/cli/version.h"
#include "proto/support/status_macros.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/sockets.h"
#include "server/devices.h"
#include "server/gpu_witness.h"
#include "server/metrics/metrics.h"
#include "server/pool/key_hash.h"
#include "server/scoring/lost_gpu.h"

namespace kvpool {
namespace {

// Descriptors that are neither connections nor slabs: logs, locks, epoll sets, libraries, the metrics port
// and its scrapers.
constexpr uint64_t kOtherFiles = 96;
// Each slab has a descriptor, and with a keeper a copy of it. Where no size was given, slabs are taken to be this large, the
// smaller default.
constexpr uint64_t kUsualSlabBytes = 64 << 20;

// A keeper elsewhere answers when the daemon before has ended whole, which on a GPU takes some seconds.
constexpr std::chrono::milliseconds kMostDying{30000};

// How many of `limit` descriptors connections may use.
int ConnectionFiles(uint64_t limit, const std::vector<uint64_t>& capacity_bytes, uint64_t slab_bytes,
                    bool keeper) {
  uint64_t slabs = 0;
  for (const uint64_t bytes : capacity_bytes)
    slabs += bytes / (slab_bytes == 0 ? kUsualSlabBytes : slab_bytes) + 1;
  if (keeper) slabs *= 2;
  const uint64_t kept = std::min(slabs + kOtherFiles, limit / 2);
  return static_cast<int>(std::min<uint64_t>(limit - kept, 1 << 20));
}

std::string CudaFacts() {
  const absl::StatusOr<int> gpus = CudaDeviceCount();
  if (gpus.ok()) return absl::StrCat(*gpus, *gpus == 1 ? " GPU" : " GPUs");
  return absl::IsUnimplemented(gpus.status()) ? "built without" : "no driver";
}

std::string DeviceIds(const std::vector<std::unique_ptr<Device>>& devices) {
  std::string ids;
  for (const auto& device : devices) absl::StrAppend(&ids, ids.empty() ? "" : ",", device->id());
  return ids;
}

// Whether what lies in the devices' memory outlives this process. FAILED_PRECONDITION, DATA_LOSS: it does not.
absl::Status TryWhatOutlives(const std::vector<std::unique_ptr<Device>>& devices, bool seen_before) {
  for (const auto& device : devices) {
    RETURN_IF_ERROR(device->OutlivesProcesses());
    if (device->uuid_bytes().empty() || seen_before) continue;
    absl::Status proven = ProveThatMemoryOutlives(device.get());
    // The witness may have met a moment without memory, or without processes.
    if (!proven.ok() && !absl::IsDataLoss(proven)) proven = ProveThatMemoryOutlives(device.get());
    if (!proven.ok()) return absl::Status(proven.code(), absl::StrCat(device->id(), ": ", proven.message()));
    LogInfo("memory outlives a process", {{"device", device->id()}});
  }
  return absl::OkStatus();
}

// Null: there is to be no keeper. `started_by` is that which has started this process, if any has.
absl::StatusOr<std::unique_ptr<KeeperLink>> LinkTo(const Settings& settings, UniqueFd started_by) {
  KeeperLink::Options options{.another = settings.keeper_socket};
  if (!settings.keeper_elsewhere && !started_by.valid()) return nullptr;
  if (started_by.valid()) return KeeperLink::Join(std::move(started_by), options);
  absl::StatusOr<UniqueFd> socket = ConnectToKeeper(settings.keeper_socket);
  // One that comes later is given all that there is by then.
  if (absl::IsNotFound(socket.status())) {
    LogWarning("no keeper yet", {{"error", socket.status()}});
    return KeeperLink::Alone(options);
  }
  RETURN_IF_ERROR(socket.status());
  options.hello_patience = kMostDying;
  return KeeperLink::Join(*std::move(socket), options);
}

// The link is lost from here on where memory would not outlive this process.
absl::Status TrustKeeper(KeeperLink* link, const std::vector<std::unique_ptr<Device>>& devices) {
  RETURN_IF_ERROR(link->Trust(DeviceIds(devices)));
  // What a daemon with the same devices has left, it has left because it had seen this.
  const absl::Status outlives = TryWhatOutlives(devices, /*seen_before=*/link->inherits());
  for (const auto& device : devices) {
    if (!IsSticky(device->free_bytes().status())) continue;
    return absl::UnavailableError(absl::StrCat("--keeper=on: trying whether memory outlives a process took ",
                                               device->id(),
                                               " with it; start with --keeper=off: ", outlives.message()));
  }
  if (!outlives.ok()) {
    LogError("keeper not used", {{"error", outlives}, {"now", "all that is cached ends with this process"}});
    link->Decline();
  }
  return absl::OkStatus();
}

// The daemon makes its default directory, but not one that somebody named: a misspelt path must be
// reported, not made. A socket that is left there will be replaced, but no other file.
absl::Status CheckSocketPaths(const Settings& settings) {
  std::error_code error;
  for (const std::string& path : {settings.socket, settings.attach_socket()}) {
    const std::filesystem::file_status there = std::filesystem::symlink_status(path, error);
    if (std::filesystem::exists(there) && !std::filesystem::is_socket(there)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--socket=", settings.socket, ": ", path, " is there, and is no socket"));
    }
  }
  const std::string directory = settings.socket_directory();
  if (settings.default_socket) return MakeOwnDirectory("--socket", directory);
  if (std::filesystem::is_directory(directory, error)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--socket=", settings.socket, ": there is no directory ", directory));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const AccessPolicy>> AccessPolicyOf(const std::string& file) {
  if (file.empty()) return AccessPolicy::OfUid(geteuid());
  return AccessPolicy::Read(file);
}

absl::StatusOr<std::unique_ptr<Kvpoold>> Kvpoold::Start(const Settings& settings, KeeperEnd keeper) {
  RETURN_IF_ERROR(CheckSocketPaths(settings));
  // What an earlier daemon has left comes as descriptors.
  RETURN_IF_ERROR(RaiseOpenFileLimit().status());
  ASSIGN_OR_RETURN(std::unique_ptr<KeeperLink> link, LinkTo(settings, std::move(keeper.socket)));
  Place place(link.get());
  RETURN_IF_ERROR(place.Lock(settings.socket + ".lock"));
  ASSIGN_OR_RETURN(StateDir state_dir, StateDir::Open(settings.state_dir, &place));
  std::unique_ptr<Kvpoold> kvpoold(new Kvpoold(std::move(link), std::move(place), std::move(state_dir)));
  kvpoold->program_ = std::move(keeper.program);
  RETURN_IF_ERROR(kvpoold->Open(settings));
  return kvpoold;
}

absl::Status Kvpoold::Open(const Settings& settings) {
  const uint64_t began_ms = MonotonicClock()->NowMs();
  const double start_time_seconds = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  socket_ = settings.socket;
  attach_socket_ = settings.attach_socket();
  access_file_ = settings.access;
  tier_flush_ = settings.tier_flush;
  arguments_ = settings.arguments;
  ASSIGN_OR_RETURN(const auto policy, AccessPolicyOf(access_file_));
  access_ = std::make_shared<AccessControl>(policy);

  ASSIGN_OR_RETURN(OpenedDevices opened, OpenDevices(settings.device, settings.capacity));
  RETURN_IF_ERROR(CheckSlabBytes(settings.daemon.slab_bytes, opened));
  RETURN_IF_ERROR(CheckHostMemory(settings.tiers, opened));
  if (keeper_ != nullptr) {
    RETURN_IF_ERROR(TrustKeeper(keeper_.get(), opened.devices));
    RETURN_IF_ERROR(place_.KeepEpoch());
    BeforeEndForLostGpu([this] { keeper_->Distrust(); });
  }
  for (size_t i = 0; i < opened.devices.size(); ++i) {
    LogInfo("device", {{"device", opened.devices[i]->id()},
                       {"name", opened.devices[i]->name()},
                       {"capacity_bytes", opened.capacity_bytes[i]},
                       {"memory_bytes", opened.memory[i].bytes},
                       {"memory_source", opened.memory[i].source},
                       {"chosen", opened.choice}});
  }
  const std::string device_ids = DeviceIds(opened.devices);
  ASSIGN_OR_RETURN(const uint64_t open_files, RaiseOpenFileLimit());
  const int fd_ceiling =
      ConnectionFiles(open_files, opened.capacity_bytes, settings.daemon.slab_bytes, keeper_ != nullptr);

  DaemonOptions options = settings.daemon;
  options.version = Version();
  options.epoch = state_dir_.epoch();
  options.began_ms = began_ms;
  options.access = access_;
  if (!settings.tiers.empty() || !settings.tier_key_file.empty()) {
    const uint64_t served_host_bytes = ServedHostBytes(opened);
    ASSIGN_OR_RETURN(OpenedTiers tiers,
                     OpenTiers(settings.tiers, {.key_file = settings.tier_key_file,
                                                .encryption_keys = settings.tier_encryption_keys,
                                                .state_dir = settings.state_dir,
                                                .buffer_bytes = options.tier_buffer_bytes}));
    for (const TierMember& member : tiers.members) {
      LogInfo("tier", {{"tier", member.tier->name()},
                       {"what", member.tier->describe()},
                       {"write", TextOf(member.rule)},
                       {"values", member.tier->usage().values}});
    }
    options.tiers = std::move(tiers.members);
    options.tier_secret = std::move(tiers.secret);
    options.name_tier = [site = TierSite{.key_file = settings.tier_key_file,
                                         .secret = options.tier_secret,
                                         .seal = std::move(tiers.seal),
                                         .served_host_bytes = served_host_bytes}](const std::string& spec) {
      return NameTier(site, spec);
    };
  }
  options.next_tiers = [this] { return TiersOfToday(); };
  options.device_capacity_bytes = std::move(opened.capacity_bytes);
  // Nothing has hashed a key yet.
  SetKeyHashWords(RandomKeyHashWords());
  ASSIGN_OR_RETURN(daemon_,
                   Daemon::Start(options, std::move(opened.devices), MonotonicClock(),
                                 keeper_ == nullptr || keeper_->declined() ? nullptr : keeper_.get()));
  options.tiers.clear();  // The daemon's are the only references.

  // A member takes a socket, and its process a pidfd.
  const auto max_attached = static_cast<uint32_t>(std::clamp(fd_ceiling / 4, 16, 4096));
  const Listen listen = [this](const ListenOptions& listener) { return place_.Listen(listener); };
  ASSIGN_OR_RETURN(attach_server_, AttachServer::Start({.path = attach_socket_,
                                                        .group = settings.socket_group,
                                                        .listen = listen,
                                                        .max_connections = max_attached,
                                                        .fd_ceiling = fd_ceiling},
                                                       EventsOf(daemon_.get())));
  ASSIGN_OR_RETURN(
      grpc_server_,
      GrpcServer::Start(
          {.socket_path = socket_,
           .group = settings.socket_group,
           .listen = listen,
           .threads = static_cast<int>(settings.rpc_threads),
           .fd_ceiling = fd_ceiling,
           .max_connections = static_cast<uint32_t>(std::clamp(fd_ceiling / 3, 16, 4096)),
           .operator_address = settings.operator_tls_listen,
           .operator_tls = settings.operator_tls,
           .upgrade = [this](const Peer& peer, const v1::UpgradeRequest& request,
                             v1::UpgradeResponse* response) { return Upgrade(peer, request, response); }},
          daemon_.get(), &rpc_stats_));
  if (!settings.metrics_listen.empty()) {
    MetricSources sources{.daemon = [this] { return daemon_->Snapshot(); },
                          .rpc = [this] { return rpc_stats_.Snapshot(); },
                          .attach = [this] { return attach_server_->Stats(); },
                          .scrapes_refused = [this] { return scrape_stats_.refused(); },
                          .keeper_up = [this]() -> std::optional<bool> {
                            if (keeper_ == nullptr) return std::nullopt;
                            return !keeper_->lost();
                          },
                          .build = {.version = Version(), .cuda = CudaFacts()},
                          .start_time_seconds = start_time_seconds};
    ASSIGN_OR_RETURN(
        metrics_server_,
        MetricsServer::Start(
            settings.metrics_listen, [sources = std::move(sources)] { return CollectMetrics(sources); },
            [this] { return grpc_server_->serving(); }, MetricsServer::kPatience,
            {.tls = settings.metrics_tls,
             .fd_ceiling = fd_ceiling,
             .max_connections = static_cast<size_t>(std::clamp(fd_ceiling / 8, 16, 256)),
             .stats = &scrape_stats_}));
  }
  ServingFacts facts{.version = Version(),
                     .socket = socket_,
                     .attach_socket = attach_socket_,
                     .metrics_host = settings.metrics_listen.substr(0, settings.metrics_listen.rfind(':')),
                     .devices = device_ids,
                     .metrics_port = metrics_server_ == nullptr ? 0 : metrics_server_->port(),
                     .operator_port = grpc_server_->operator_port()};
  if (keeper_ != nullptr) keeper_->Serving();
  place_.Keep();
  if (keeper_ != nullptr)
    keeper_finder_ = std::make_unique<Housekeeper>([this] { keeper_->LookForAnother(); });
  opened_.store(true, std::memory_order_release);
  state_dir_.Announce(facts);
  LogInfo("serving", {{"socket", socket_},
                      {"epoch", state_dir_.epoch()},
                      {"metrics_port", facts.metrics_port},
                      {"operator_port", facts.operator_port},
                      {"open_files", open_files},
                      {"version", Version()}});
  return absl::OkStatus();
}

Kvpoold::~Kvpoold() { Stop(); }

absl::StatusOr<std::vector<std::string>> Kvpoold::TiersOfToday() const {
  ASSIGN_OR_RETURN(const Settings settings, ParseSettings(arguments_));
  std::vector<std::string> tiers;
  for (const TierOptions& tier : settings.tiers) tiers.push_back(tier.text);
  return tiers;
}

bool Kvpoold::BeginEnd() {
  ending_ = true;
  return !handing_over_;
}

uint32_t Kvpoold::Drain() {
  grpc_server_->SetServing(false);
  v1::DrainResponse response;
  const absl::Status drained = daemon_->Drain(v1::DrainRequest(), &response);
  if (!drained.ok()) LogWarning("drain failed", {{"error", drained}});
  return response.sessions_left();
}

void Kvpoold::ReadAccessAgain() {
  if (grpc_server_ != nullptr) grpc_server_->LookAtCertificates();
  if (metrics_server_ != nullptr) metrics_server_->LookAtCertificates();
  if (access_file_.empty()) return LogInfo("SIGHUP, and no --access to read again");
  const auto policy = AccessPolicyOf(access_file_);
  if (!policy.ok()) {
    return LogError("access rules refused", {{"file", access_file_}, {"error", policy.status()}});
  }
  access_->Replace(*policy);
  LogAudit("access rules read",
           std::initializer_list<LogField>{{"file", access_file_}, {"rules", (*policy)->size()}});
  if (daemon_ != nullptr) daemon_->ApplyRules();
}

void Kvpoold::Stop() {
  stopping_ = true;
  keeper_finder_.reset();
  if (keeper_ != nullptr && opened_) keeper_->Ending();
  state_dir_.Withdraw();
  metrics_server_.reset();
  // Callers that wait for a device operation are answered while there is a server to answer them.
  if (daemon_ != nullptr) daemon_->StopDeviceOperations();
  if (daemon_ != nullptr) daemon_->EndSoon();
  // The next one has the sockets of this one, whose start has failed.
  const bool sockets_stay = place_.inherited() && !opened_;
  if (grpc_server_ != nullptr) {
    if (!sockets_stay) unlink(socket_.c_str());
    grpc_server_->Stop(std::chrono::milliseconds(200));
    grpc_server_.reset();
  }
  if (attach_server_ != nullptr) {
    if (!sockets_stay) unlink(attach_socket_.c_str());
    // Of a start that failed: engines may be back by now, and the next one goes on with their sessions.
    if (keeper_ != nullptr && !opened_) attach_server_->HangUp();
    attach_server_.reset();
  }
  if (!sockets_stay) place_.Close();
  if (daemon_ != nullptr) daemon_->FlushTier(tier_flush_);
  daemon_.reset();
}

}  // namespace kvpool
