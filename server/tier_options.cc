#include "server/tier_options.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "proto/support/status_macros.h"
#include "server/devices.h"
#include "server/machine.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/file_tier.h"
#include "server/tiers/host_tier.h"
#include "server/tiers/sealed_tier.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

constexpr size_t kMostPrefix = 64;
constexpr int kMostConnections = 16, kMostS3Connections = 128;
constexpr size_t kMostS3Prefix = 128, kMostName = 64;
constexpr char kUsualRegion[] = "us-east-1";
constexpr absl::Duration kLeastTtl = absl::Seconds(1), kMostTtl = absl::Hours(24 * 365);
constexpr size_t kMostPasswordBytes = 512;

struct Part {
  absl::string_view name, value;
};

absl::Status Wrong(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(
      what,
      "; a tier is written host:capacity=BYTES[,write=RULE], file:PATH,capacity=BYTES[,write=RULE], "
      "resp:HOST:PORT[,cluster=auto|on|off]"
      "[,tls=on|off][,ca=FILE][,cert=FILE,key=FILE][,user=NAME][,password-file=FILE][,prefix=TEXT]"
      "[,ttl=DURATION][,connections=N][,write=RULE] or "
      "s3:http[s]://HOST[:PORT]/BUCKET[,region=NAME][,style=path|virtual][,credentials-file=FILE]"
      "[,profile=NAME][,ca=FILE][,prefix=TEXT][,connections=N][,write=RULE], and RULE is evict, seal or "
      "reuse:N"));
}

absl::Status SetWrite(absl::string_view value, TierRule* rule) {
  if (value == "evict" || value == "seal") {
    rule->when = value == "seal" ? TierWrite::kSeal : TierWrite::kEvict;
    return absl::OkStatus();
  }
  absl::string_view uses = value;
  if (!absl::ConsumePrefix(&uses, "reuse:") || !absl::SimpleAtoi(uses, &rule->uses) ||
      rule->uses < TierRule::kLeastUses || rule->uses > TierRule::kMostUses) {
    return Wrong(absl::StrCat("write is \"", value, "\"; must be evict, seal, or reuse:",
                              TierRule::kLeastUses, " to reuse:", TierRule::kMostUses));
  }
  rule->when = TierWrite::kReuse;
  return absl::OkStatus();
}

// capacity= and write= of a tier that keeps to the first.
absl::Status SetBounded(const std::vector<Part>& parts, uint64_t least, TierOptions* options) {
  for (const auto& [name, value] : parts) {
    if (name == "capacity") {
      const absl::StatusOr<uint64_t> bytes = ParseBytes({value.data(), value.size()});
      if (!bytes.ok()) return Wrong(absl::StrCat("capacity: ", bytes.status().message()));
      options->capacity_bytes = *bytes;
    } else if (name == "write") {
      RETURN_IF_ERROR(SetWrite(value, &options->rule));
    } else {
      return Wrong(absl::StrCat("\"", name, "=", value, "\" is neither capacity= nor write="));
    }
  }
  if (options->capacity_bytes >= least) return absl::OkStatus();
  return Wrong(absl::StrCat("capacity is ", options->capacity_bytes, " bytes; must be at least ", least));
}

absl::StatusOr<TierOptions> ParseHost(const std::vector<Part>& parts) {
  TierOptions options;
  options.kind = TierKind::kHost;
  RETURN_IF_ERROR(SetBounded(parts, HostTier::kLeastCapacityBytes, &options));
  return options;
}

absl::StatusOr<TierOptions> ParseFile(absl::string_view path, const std::vector<Part>& parts) {
  TierOptions options;
  if (path.empty() || path[0] != '/') return Wrong(absl::StrCat("\"", path, "\" is no absolute path"));
  options.path = std::string(path);
  RETURN_IF_ERROR(SetBounded(parts, FileTier::kLeastCapacityBytes, &options));
  return options;
}

absl::Status SetFile(const Part& part, std::string* file) {
  if (part.value.empty() || part.value[0] != '/') {
    return Wrong(absl::StrCat(part.name, " is \"", part.value, "\", no absolute path"));
  }
  *file = std::string(part.value);
  return absl::OkStatus();
}

absl::Status SetPrefix(absl::string_view value, std::string* prefix) {
  const bool plain = std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-' || c == ':';
  });
  if (value.empty() || value.size() > kMostPrefix || !plain) {
    return Wrong(absl::StrCat("prefix is \"", value, "\"; must be 1 to ", kMostPrefix,
                              " of the letters, digits and ._-:"));
  }
  *prefix = std::string(value);
  return absl::OkStatus();
}

absl::Status SetTtl(absl::string_view value, std::chrono::milliseconds* ttl) {
  absl::Duration duration;
  if (!absl::ParseDuration(value, &duration) || duration < kLeastTtl || duration > kMostTtl) {
    return Wrong(absl::StrCat("ttl is \"", value, "\"; must be ", absl::FormatDuration(kLeastTtl), " to ",
                              absl::FormatDuration(kMostTtl)));
  }
  *ttl = absl::ToChronoMilliseconds(duration);
  return absl::OkStatus();
}

absl::Status SetConnections(absl::string_view value, int most, int* connections) {
  if (!absl::SimpleAtoi(value, connections) || *connections < 1 || *connections > most) {
    return Wrong(absl::StrCat("connections is \"", value, "\"; must be 1 to ", most));
  }
  return absl::OkStatus();
}

absl::Status SetOneOf(const Part& part, absl::Span<const absl::string_view> names, size_t* index) {
  const auto found = std::find(names.begin(), names.end(), part.value);
  *index = static_cast<size_t>(found - names.begin());
  if (found != names.end()) return absl::OkStatus();
  return Wrong(absl::StrCat(part.name, " is \"", part.value, "\"; must be ", absl::StrJoin(names, ", ")));
}

absl::Status SetResp(const Part& part, TierOptions* options) {
  RespTier::Options& resp = options->resp;
  size_t index = 0;
  if (part.name == "cluster") {
    RETURN_IF_ERROR(SetOneOf(part, {"auto", "on", "off"}, &index));
    resp.cluster = static_cast<RespCluster>(index);
    return absl::OkStatus();
  }
  if (part.name == "tls") {
    RETURN_IF_ERROR(SetOneOf(part, {"off", "on"}, &index));
    resp.tls.on = index == 1;
    return absl::OkStatus();
  }
  if (part.name == "ca") return SetFile(part, &resp.tls.ca_file);
  if (part.name == "cert") return SetFile(part, &resp.tls.cert_file);
  if (part.name == "key") return SetFile(part, &resp.tls.key_file);
  if (part.name == "password-file") return SetFile(part, &options->password_file);
  if (part.name == "prefix") return SetPrefix(part.value, &resp.prefix);
  if (part.name == "ttl") return SetTtl(part.value, &resp.ttl);
  if (part.name == "connections") return SetConnections(part.value, kMostConnections, &resp.connections);
  if (part.name == "write") return SetWrite(part.value, &options->rule);
  if (part.name != "user") return Wrong(absl::StrCat("\"", part.name, "=\" is no part of resp:"));
  if (part.value.empty()) return Wrong("user is \"\"; must be a name");
  resp.user = std::string(part.value);
  return absl::OkStatus();
}

absl::StatusOr<TierOptions> ParseResp(absl::string_view address, const std::vector<Part>& parts) {
  TierOptions options;
  options.kind = TierKind::kResp;
  options.rule.when = TierWrite::kSeal;
  const auto endpoint = ParseRespEndpoint({address.data(), address.size()});
  if (!endpoint.has_value()) return Wrong(absl::StrCat("\"", address, "\" is no HOST:PORT"));
  options.resp.endpoint = *endpoint;
  for (const Part& part : parts) RETURN_IF_ERROR(SetResp(part, &options));
  const RespTls& tls = options.resp.tls;
  if (tls.cert_file.empty() != tls.key_file.empty()) return Wrong("cert= and key= go together");
  if (!tls.on && !(tls.ca_file.empty() && tls.cert_file.empty())) {
    return Wrong("ca=, cert= and key= are for tls=on");
  }
  if (!options.resp.user.empty() && options.password_file.empty())
    return Wrong("user= is without password-file=");
  return options;
}

absl::Status SetS3Prefix(absl::string_view value, std::string* prefix) {
  const bool plain = std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("._-:=@+/", std::string(1, static_cast<char>(c)));
  });
  // A store that has its objects in folders takes these for steps.
  const std::vector<absl::string_view> folders = absl::StrSplit(value, '/');
  const bool steps = std::any_of(folders.begin(), folders.end(), [](absl::string_view folder) {
    return folder.empty() || folder == "." || folder == "..";
  });
  if (value.size() > kMostS3Prefix || !plain || steps) {
    return Wrong(absl::StrCat("prefix is \"", value, "\"; must be 1 to ", kMostS3Prefix,
                              " of the letters, digits and ._-:=@+, and / between folders"));
  }
  *prefix = std::string(value);
  return absl::OkStatus();
}

absl::Status SetName(const Part& part, std::string* name) {
  const bool plain = std::all_of(part.value.begin(), part.value.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
  if (part.value.empty() || part.value.size() > kMostName || !plain) {
    return Wrong(absl::StrCat(part.name, " is \"", part.value, "\"; must be 1 to ", kMostName,
                              " of the letters, digits and ._-"));
  }
  *name = std::string(part.value);
  return absl::OkStatus();
}

absl::Status SetS3(const Part& part, TierOptions* options) {
  S3Tier::Options& s3 = options->s3;
  if (part.name == "style") {
    size_t index = 0;
    RETURN_IF_ERROR(SetOneOf(part, {"path", "virtual"}, &index));
    s3.client.endpoint.virtual_host = index == 1;
    return absl::OkStatus();
  }
  if (part.name == "region") return SetName(part, &s3.client.region);
  if (part.name == "credentials-file") return SetFile(part, &s3.credentials.file);
  if (part.name == "profile") return SetName(part, &s3.credentials.profile);
  if (part.name == "ca") return SetFile(part, &s3.client.ca_file);
  if (part.name == "prefix") return SetS3Prefix(part.value, &s3.prefix);
  if (part.name == "connections")
    return SetConnections(part.value, kMostS3Connections, &s3.client.connections);
  if (part.name == "write") return SetWrite(part.value, &options->rule);
  return Wrong(absl::StrCat("\"", part.name, "=\" is no part of s3:"));
}

absl::StatusOr<TierOptions> ParseS3(absl::string_view url, const std::vector<Part>& parts) {
  TierOptions options;
  options.kind = TierKind::kS3;
  options.rule.when = TierWrite::kSeal;
  const absl::StatusOr<S3Endpoint> endpoint = ParseS3Endpoint({url.data(), url.size()});
  if (!endpoint.ok()) return Wrong(std::string(endpoint.status().message()));
  options.s3.client.endpoint = *endpoint;
  options.s3.client.region.clear();
  bool profile = false;
  for (const Part& part : parts) {
    RETURN_IF_ERROR(SetS3(part, &options));
    profile |= part.name == "profile";
  }
  if (!endpoint->tls && !options.s3.client.ca_file.empty()) return Wrong("ca= is for https://");
  if (profile && options.s3.credentials.file.empty()) return Wrong("profile= is without credentials-file=");
  return options;
}

absl::StatusOr<std::unique_ptr<Tier>> OpenS3(const TierOptions& options) {
  S3Tier::Options s3 = options.s3;
  if (s3.client.region.empty()) {
    // What AWS's tools read as well.
    const char* const region = std::getenv("AWS_REGION");
    s3.client.region = region == nullptr || *region == '\0' ? kUsualRegion : region;
  }
  return S3Tier::Open(s3);
}

absl::StatusOr<std::unique_ptr<Tier>> OpenResp(const TierOptions& options) {
  RespTier::Options resp = options.resp;
  if (!options.password_file.empty()) {
    ASSIGN_OR_RETURN(resp.password,
                     ReadSecretFile("tier: password-file", options.password_file, 1, kMostPasswordBytes));
    // An editor ends the line.
    if (resp.password.back() == '\n') resp.password.pop_back();
    if (resp.password.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tier: password-file=", options.password_file, ": its first line is empty"));
    }
  }
  absl::StatusOr<std::unique_ptr<RespTier>> tier = RespTier::Open(resp);
  if (!tier.ok()) return absl::InvalidArgumentError(absl::StrCat("--tier: ", tier.status().message()));
  return *std::move(tier);
}

absl::StatusOr<std::unique_ptr<Tier>> OpenTier(const TierOptions& options) {
  switch (options.kind) {
    case TierKind::kHost:
      return std::make_unique<HostTier>(options.capacity_bytes);
    case TierKind::kFile:
      return FileTier::Open({.path = options.path, .capacity_bytes = options.capacity_bytes});
    case TierKind::kResp:
      return OpenResp(options);
    case TierKind::kS3:
      return OpenS3(options);
  }
  return absl::InternalError("no such tier");
}

absl::string_view NameOf(TierKind kind) {
  switch (kind) {
    case TierKind::kHost:
      return "host";
    case TierKind::kFile:
      return "file";
    case TierKind::kResp:
      return "resp";
    case TierKind::kS3:
      return "s3";
  }
  return "";
}

absl::StatusOr<TierOptions> ParseKind(absl::string_view text) {
  absl::string_view place = text;
  // All of it is named.
  const bool host = absl::ConsumePrefix(&place, "host:");
  const std::vector<absl::string_view> words = absl::StrSplit(place, ',');
  std::vector<Part> parts;
  for (size_t i = host ? 0 : 1; i < words.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> part =
        absl::StrSplit(words[i], absl::MaxSplits('=', 1));
    parts.push_back({part.first, part.second});
  }
  if (host) return ParseHost(parts);
  place = words[0];
  if (absl::ConsumePrefix(&place, "file:")) return ParseFile(place, parts);
  if (absl::ConsumePrefix(&place, "resp:")) return ParseResp(place, parts);
  if (absl::ConsumePrefix(&place, "s3:")) return ParseS3(place, parts);
  return Wrong(absl::StrCat("\"", words[0], "\" begins with none of host:, file:, resp: and s3:"));
}

std::string KeyFileOf(const std::string& folder) { return folder + "/key"; }

// What outlives the daemon is behind one that seals, where there are keys.
absl::StatusOr<std::shared_ptr<Tier>> Sealed(std::unique_ptr<Tier> tier, const TierSeal& seal) {
  if (seal.keys == nullptr || !tier->lasting()) return tier;
  ASSIGN_OR_RETURN(std::unique_ptr<SealedTier> sealed,
                   SealedTier::Make(std::move(tier), seal.keys, {.buffer_bytes = seal.buffer_bytes}));
  return sealed;
}

}  // namespace

absl::StatusOr<TierOptions> ParseTierOptions(std::string_view text) {
  ASSIGN_OR_RETURN(TierOptions options, ParseKind({text.data(), text.size()}));
  options.text = std::string(text);
  return options;
}

absl::Status CheckTogether(const std::vector<TierOptions>& tiers) {
  if (tiers.size() > TierSet::kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tier was given ", tiers.size(), " times; limit ", TierSet::kMost));
  }
  for (size_t i = 0; i < tiers.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (tiers[i].kind != tiers[j].kind) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--tier: two are ", NameOf(tiers[i].kind), ":; at most one of each kind"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTierKeyFile(const TierOptions& tier, const std::string& key_file) {
  const bool shared = tier.kind == TierKind::kResp || tier.kind == TierKind::kS3;
  if (!shared || !key_file.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--tier-key-file=: must name a file with the secret that all nodes of --tier=resp:... or s3:... have: "
      "32 to "
      "4096 bytes");
}

uint64_t ServedHostBytes(const OpenedDevices& opened) {
  uint64_t served = 0;
  for (size_t i = 0; i < opened.devices.size(); ++i) {
    if (opened.devices[i]->uuid_bytes().empty()) served += opened.capacity_bytes[i];
  }
  return served;
}

absl::Status CheckHostMemory(const TierOptions& tier, uint64_t served_bytes) {
  const MemoryLimit memory = UsableMemory();
  if (tier.kind != TierKind::kHost ||
      tier.capacity_bytes <= memory.bytes - std::min(served_bytes, memory.bytes)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--tier: host: capacity is ", tier.capacity_bytes, " bytes, beside ", served_bytes,
                   " of --capacity; there are ", memory.bytes, " (", memory.source, ")"));
}

absl::Status CheckHostMemory(const std::vector<TierOptions>& tiers, const OpenedDevices& opened) {
  const uint64_t served = ServedHostBytes(opened);
  for (const TierOptions& tier : tiers) RETURN_IF_ERROR(CheckHostMemory(tier, served));
  return absl::OkStatus();
}

absl::StatusOr<OpenedTiers> OpenTiers(const std::vector<TierOptions>& tiers, const TierSettings& settings) {
  OpenedTiers opened;
  std::string own_file = settings.state_dir + "/tier-key";
  std::vector<std::unique_ptr<Tier>> plain;
  for (const TierOptions& options : tiers) {
    ASSIGN_OR_RETURN(plain.emplace_back(), OpenTier(options));
    if (options.kind == TierKind::kFile) own_file = KeyFileOf(options.path);
  }
  ASSIGN_OR_RETURN(opened.secret, settings.key_file.empty()
                                      ? ReadOrMakeTierSecret("tier", own_file)
                                      : ReadTierSecret("tier-key-file", settings.key_file));
  if (!settings.encryption_keys.empty()) {
    ASSIGN_OR_RETURN(opened.seal.keys, EncryptionKeyFile::Open("tier-encryption-keys",
                                                               settings.encryption_keys, opened.secret));
    opened.seal.buffer_bytes = settings.buffer_bytes;
  }
  for (size_t i = 0; i < tiers.size(); ++i) {
    ASSIGN_OR_RETURN(std::shared_ptr<Tier> tier, Sealed(std::move(plain[i]), opened.seal));
    opened.members.push_back({.tier = std::move(tier), .rule = tiers[i].rule, .spec = tiers[i].text});
  }
  return opened;
}

absl::StatusOr<NamedTier> NameTier(const TierSite& site, const std::string& text) {
  ASSIGN_OR_RETURN(const TierOptions options, ParseTierOptions(text));
  RETURN_IF_ERROR(CheckTierKeyFile(options, site.key_file));
  RETURN_IF_ERROR(CheckHostMemory(options, site.served_host_bytes));
  const absl::string_view name = NameOf(options.kind);
  return NamedTier{.name = std::string(name), .open = [site, options]() -> absl::StatusOr<TierMember> {
                     const bool has_key = options.kind == TierKind::kFile && site.key_file.empty();
                     const std::string key = KeyFileOf(options.path);
                     // To open a folder changes it.
                     if (has_key) RETURN_IF_ERROR(CheckTierSecret("tier", key, site.secret));
                     ASSIGN_OR_RETURN(std::unique_ptr<Tier> plain, OpenTier(options));
                     if (has_key) RETURN_IF_ERROR(KeepTierSecret("tier", key, site.secret));
                     ASSIGN_OR_RETURN(std::shared_ptr<Tier> tier, Sealed(std::move(plain), site.seal));
                     return TierMember{.tier = std::move(tier), .rule = options.rule, .spec = options.text};
                   }};
}

}  // namespace kvpool
