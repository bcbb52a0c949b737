// What an operator says, and is told: flags, config files, devices, and the machine around them.
#include "server/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/devices.h"
#include "server/machine.h"
#include "server/tier_options.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

template <typename T>
std::string Error(const absl::StatusOr<T>& result) {
  return result.ok() ? "accepted" : std::string(result.status().message());
}

void Write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

// ---- Config files

class ConfigTest : public ::testing::Test {
 protected:
  std::string ErrorOf(const std::string& text, std::vector<std::string> more = {}) {
    Write(path_, text);
    more.push_back("--config=" + path_);
    return Error(ParseSettings(more));
  }
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path() + "/kvpoold.conf";
};

// Each of these once started on all defaults: half of the machine's memory, the default socket.
TEST_F(ConfigTest, WhatCannotBeReadIsNoEmptyFile) {
  const std::string flag = "--config=" + directory_.path() + ": cannot read it: ";
  EXPECT_EQ(Error(ParseSettings({"--config=" + directory_.path()})), flag + "it is no regular file");
  EXPECT_EQ(Error(ParseSettings({"--config="})), "--config=: cannot read it: No such file or directory");
  EXPECT_EQ(ErrorOf(""), "--config=" + path_ + ": cannot read it: it is empty");
  EXPECT_THAT(ErrorOf(std::string((1 << 20) + 1, '#')), HasSubstr("it has more than 1048576 bytes"));
}

TEST_F(ConfigTest, ErrorsNameFileAndLine) {
  EXPECT_EQ(ErrorOf("# one\nlog-level = loud\n"),
            path_ + ":2: --log-level: log level is \"loud\"; there are debug, info, warning and error");
  EXPECT_EQ(ErrorOf("\nsockt = /run/k\n"), path_ + ":2: no flag --sockt; see --help");
  EXPECT_EQ(ErrorOf("socket\n"), path_ + ":1: \"socket\" is not \"name = value\"");
  EXPECT_EQ(ErrorOf("config = x\n"), path_ + ":1: a config file names no other one");
  // Checked only when all is known.
  EXPECT_THAT(ErrorOf("\n\nsocket = relative\n"), StartsWith(path_ + ":3: --socket=relative: "));
  EXPECT_THAT(ErrorOf("low-watermark = 0.5\n"), StartsWith(path_ + ":1: --low-watermark=0.5: "));
  EXPECT_THAT(ErrorOf("metrics_listen = nowhere\n"), StartsWith(path_ + ":1: --metrics-listen=nowhere: "));
  // The value that counts is the command line's.
  EXPECT_THAT(ErrorOf("socket = /run/k\n", {"--socket=relative"}), StartsWith("--socket=relative: "));
}

TEST_F(ConfigTest, AFlagIsSetOnceInAFile) {
  EXPECT_EQ(ErrorOf("pin-budget = 0.5\n\npin_budget = 0.6\n"),
            path_ + ":3: --pin-budget is set at " + path_ + ":1 too");
}

TEST_F(ConfigTest, ErrorsThatComeLaterFindTheirPlace) {
  Write(path_, "# memory\ncapacity = 8GiB\n");
  const absl::StatusOr<Settings> settings = ParseSettings({"--config=" + path_});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->Placed(absl::InvalidArgumentError("--capacity=8GiB: too much")).message(),
            path_ + ":2: --capacity=8GiB: too much");
  EXPECT_EQ(settings->Placed(absl::InvalidArgumentError("--capacity: too much")).message(),
            path_ + ":2: --capacity: too much");
  EXPECT_EQ(settings->Placed(absl::InvalidArgumentError("--slab-bytes=1: too few")).message(),
            "--slab-bytes=1: too few");
  EXPECT_TRUE(settings->Placed(absl::OkStatus()).ok());
}

TEST(SettingsTest, AnAddressIsOneHostAndOnePort) {
  for (const char* flag : {"--metrics-listen=", "--operator-tls-listen="}) {
    for (const char* address : {"9400", "host", "host:", "host:http", "host:70000", "host:-1", "a:1,b:2"}) {
      EXPECT_EQ(Error(ParseSettings({absl::StrCat(flag, address)})),
                absl::StrCat(flag, address, ": write host:port, with a port of 0 to 65535"));
    }
    EXPECT_TRUE(ParseSettings({flag}).ok());
  }
  EXPECT_TRUE(ParseSettings({"--metrics-listen=[::1]:9400"}).ok());
}

TEST(SettingsTest, AKeeperIsThisProgramOrASocket) {
  const auto on = ParseSettings({"--keeper=on", "--socket=/run/k/s", "--state-dir=/var/k"});
  ASSERT_TRUE(on.ok()) << on.status();
  EXPECT_TRUE(on->keeper && !on->keeper_elsewhere && !on->keeper_only);
  EXPECT_EQ(on->keeper_socket, "/var/k/keeper.sock");
  const auto only = ParseSettings({"--keeper-only", "--keeper-socket=/run/k/keeper"});
  ASSERT_TRUE(only.ok()) << only.status();
  EXPECT_TRUE(only->keeper_only);
  EXPECT_EQ(only->keeper_socket, "/run/k/keeper");
  const auto elsewhere = ParseSettings({"--keeper=socket:/run/k/keeper"});
  ASSERT_TRUE(elsewhere.ok()) << elsewhere.status();
  EXPECT_TRUE(elsewhere->keeper_elsewhere && !elsewhere->keeper);
  EXPECT_EQ(elsewhere->keeper_socket, "/run/k/keeper");
  for (const char* const taken : {"/run/k/s", "/run/k/s.attach"}) {
    EXPECT_THAT(
        Error(ParseSettings({"--keeper=on", "--socket=/run/k/s", std::string("--keeper-socket=") + taken})),
        HasSubstr("is a socket of the daemon's"));
  }
  EXPECT_THAT(Error(ParseSettings({"--keeper=yes"})), HasSubstr("is not on, off or socket:PATH"));
  EXPECT_THAT(Error(ParseSettings({"--keeper=socket:keeper"})), HasSubstr("write an absolute path"));
  EXPECT_THAT(Error(ParseSettings({"--keeper=socket:/k", "--keeper-only"})), HasSubstr("are for keepers"));
  EXPECT_THAT(Error(ParseSettings({"--keeper=socket:/" + std::string(200, 'k')})),
              HasSubstr("the limit is 107"));
}

TEST(SettingsTest, FlagsThatWouldBeIgnoredAreRefused) {
  const std::string tls = "--operator-tls-cert=/c: is for --operator-tls-listen";
  EXPECT_EQ(Error(ParseSettings({"--operator-tls-cert=/c"})), tls);
  EXPECT_THAT(Error(ParseSettings({"--operator-tls-listen=:1", "--operator-tls-cert=/c"})),
              HasSubstr("needs --operator-tls-cert, --operator-tls-key and --operator-tls-ca"));
  EXPECT_EQ(Error(ParseSettings({"--operator-tls-listen=:1", "--operator-tls-cert=/c",
                                 "--operator-tls-key=/k", "--operator-tls-ca=/a"})),
            "--operator-tls-listen=:1: needs --access, a file of rules that says whose certificates are "
            "operators'");
  EXPECT_EQ(Error(ParseSettings({"--metrics-listen=", "--metrics-tls-cert=/c", "--metrics-tls-key=/k"})),
            "--metrics-tls-cert=/c: is for --metrics-listen");
  for (const char* flag : {"--metrics-tls-cert=/c", "--metrics-tls-key=/k", "--metrics-tls-client-ca=/a"}) {
    EXPECT_EQ(Error(ParseSettings({flag})),
              absl::StrCat(flag, ": needs --metrics-tls-cert and --metrics-tls-key"));
  }
  EXPECT_TRUE(ParseSettings({"--metrics-tls-cert=/c", "--metrics-tls-key=/k"}).ok());
  EXPECT_THAT(Error(ParseSettings({"--tenant-share=0"})), StartsWith("--tenant-share=0: "));
  EXPECT_THAT(Error(ParseSettings({"--socket=/tmp/"})), StartsWith("--socket=/tmp/: "));
  // To chown it means: leave the group as it is.
  EXPECT_THAT(Error(ParseSettings({"--socket-group=4294967295"})), StartsWith("--socket-group=4294967295: "));
}

TEST(SettingsTest, WhatIsVerifiedIsSealOrNothing) {
  const auto settings = ParseSettings({"--verify=seal", "--verify-sample=3MiB"});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_TRUE(settings->daemon.verify);
  EXPECT_EQ(settings->daemon.verify_sample_bytes, 3u << 20);
  EXPECT_FALSE(ParseSettings({})->daemon.verify);
  EXPECT_THAT(Error(ParseSettings({"--verify=on"})), HasSubstr("--verify: \"on\" is not seal or off"));
}

TEST(SettingsTest, ATierIsAFolderAndACapacity) {
  const auto tier = ParseSettings({"--tier=file:/var/kv,capacity=2GiB,write=seal"});
  ASSERT_TRUE(tier.ok()) << tier.status();
  ASSERT_EQ(tier->tiers.size(), 1u);
  EXPECT_EQ(tier->tiers[0].kind, TierKind::kFile);
  EXPECT_EQ(tier->tiers[0].path, "/var/kv");
  EXPECT_EQ(tier->tiers[0].capacity_bytes, uint64_t{2} << 30);
  EXPECT_EQ(tier->tiers[0].rule.when, TierWrite::kSeal);
  EXPECT_THAT(ParseSettings({})->tiers, testing::IsEmpty());
  EXPECT_THAT(ParseSettings({"--tier="})->tiers, testing::IsEmpty());
  const auto error = [](const std::string& text) { return Error(ParseSettings({"--tier=" + text})); };
  EXPECT_THAT(
      error("redis:/x"),
      HasSubstr("\"redis:/x\" begins with none of host:, file:, resp: and s3:; a tier is written host:"));
  EXPECT_THAT(error("file:kv,capacity=1GiB"), HasSubstr("\"kv\" is no absolute path"));
  EXPECT_THAT(error("file:/kv"), HasSubstr("capacity is 0 bytes; must be at least 1048576"));
  EXPECT_THAT(error("file:/kv,capacity=some"), HasSubstr("capacity: \"some\""));
  for (const char* rule : {"reuse", "reuse:", "reuse:1", "reuse:64", "reuse:2x", "always"}) {
    EXPECT_THAT(
        error(std::string("file:/kv,capacity=1GiB,write=") + rule),
        HasSubstr(std::string("write is \"") + rule + "\"; must be evict, seal, or reuse:2 to reuse:63"));
  }
  EXPECT_THAT(error("file:/kv,capacity=1GiB,form=vllm"),
              HasSubstr("\"form=vllm\" is neither capacity= nor write="));
  // Tiers may be attached later.
  EXPECT_EQ(ParseSettings({"--tier-key-file=/k"})->tier_key_file, "/k");
}

TEST(SettingsTest, ThereMayBeATierOfEachKind) {
  const auto tiers =
      ParseSettings({"--tier=host:capacity=1GiB", "--tier=file:/kv,capacity=4GiB,write=reuse:3",
                     "--tier=resp:kv:1", "--tier-key-file=/k"});
  ASSERT_TRUE(tiers.ok()) << tiers.status();
  ASSERT_EQ(tiers->tiers.size(), 3u);
  EXPECT_EQ(tiers->tiers[0].kind, TierKind::kHost);
  EXPECT_EQ(tiers->tiers[0].capacity_bytes, uint64_t{1} << 30);
  EXPECT_EQ(tiers->tiers[0].rule.when, TierWrite::kEvict);
  EXPECT_EQ(tiers->tiers[1].rule.when, TierWrite::kReuse);
  EXPECT_EQ(tiers->tiers[1].rule.uses, 3u);
  EXPECT_EQ(tiers->tiers[2].kind, TierKind::kResp);
  const std::string path = testing::TempDir() + "tiers.conf";
  std::ofstream(path) << "tier = host:capacity=1GiB\ntier = file:/kv,capacity=4GiB\n";
  const std::string config = "--config=" + path;
  EXPECT_EQ(ParseSettings({config})->tiers.size(), 2u);
  const auto replaced = ParseSettings({config, "--tier=host:capacity=2GiB"});
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  ASSERT_EQ(replaced->tiers.size(), 1u) << "those of the command line replace them";
  EXPECT_EQ(replaced->tiers[0].capacity_bytes, uint64_t{2} << 30);
  EXPECT_THAT(ParseSettings({config, "--tier="})->tiers, testing::IsEmpty());
  const std::string host = "--tier=host:capacity=1GiB";
  EXPECT_THAT(Error(ParseSettings({host, host})),
              HasSubstr("--tier: two are host:; at most one of each kind"));
  EXPECT_THAT(Error(ParseSettings({"--tier=host:"})), HasSubstr("is neither capacity= nor write="));
  EXPECT_THAT(Error(ParseSettings({"--tier=host:capacity=1"})),
              HasSubstr("capacity is 1 bytes; must be at least"));
}

TEST(SettingsTest, KeysThatEncryptAreForTiers) {
  const std::string keys = "--tier-encryption-keys=/e";
  const auto settings = ParseSettings({"--tier=file:/kv,capacity=4GiB", keys});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->tier_encryption_keys, "/e");
  // One that lasts may be attached.
  EXPECT_TRUE(ParseSettings({"--tier=host:capacity=1GiB", keys}).ok());
  EXPECT_TRUE(ParseSettings({"--tier-key-file=/k", keys}).ok());
  EXPECT_EQ(
      Error(ParseSettings({keys})),
      "--tier-encryption-keys=/e: is for --tier, or for tiers that are attached, which need --tier-key-file");
}

// Those of the flags, and those that an operator attaches.
TEST(SettingsTest, TiersThatLastAreEncryptedHoweverTheyCome) {
  const TemporaryDirectory folder;
  const std::string keys = folder.path() + "/keys";
  std::ofstream(keys) << "* " << std::string(64, '7') << "\n";
  ASSERT_EQ(chmod(keys.c_str(), 0600), 0);
  const auto tiers = [&](const std::string& name) {
    return std::vector<TierOptions>{
        *ParseTierOptions("host:capacity=1MiB"),
        *ParseTierOptions(absl::StrCat("file:", folder.path(), "/", name, ",capacity=1MiB"))};
  };
  const auto encrypts = [](const TierMember& member) {
    return absl::StrContains(member.tier->describe(), "AES-256-GCM");
  };
  const auto plain = OpenTiers(tiers("plain"), {.state_dir = folder.path()});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(encrypts(plain->members[1]));
  auto sealed = OpenTiers(tiers("sealed"),
                          {.encryption_keys = keys, .state_dir = folder.path(), .buffer_bytes = 1 << 20});
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_FALSE(encrypts(sealed->members[0]));
  EXPECT_TRUE(encrypts(sealed->members[1]));
  EXPECT_EQ(sealed->members[1].tier->most_value_bytes(), (1 << 20) - 64);
  const TierSite site{.key_file = "", .secret = sealed->secret, .seal = sealed->seal};
  const auto attached = NameTier(site, absl::StrCat("file:", folder.path(), "/attached,capacity=1MiB"));
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_TRUE(encrypts(*attached->open()));
}

TEST(SettingsTest, ATierIsAServerThatNodesShare) {
  const std::string key = "--tier-key-file=/k";
  const auto least = ParseSettings({"--tier=resp:kv.example:6379", key});
  ASSERT_TRUE(least.ok()) << least.status();
  const RespTier::Options& resp = least->tiers.at(0).resp;
  EXPECT_EQ(resp.endpoint, (RespEndpoint{"kv.example", 6379}));
  EXPECT_EQ(resp.cluster, RespCluster::kAuto);
  EXPECT_FALSE(resp.tls.on);
  EXPECT_EQ(TextOf(least->tiers[0].rule), "seal");

  const auto all = ParseSettings(
      {"--tier=resp:[::1]:7000,cluster=on,tls=on,ca=/ca,cert=/c,key=/p,user=kv,password-file=/w,prefix=a.b:c,"
       "ttl=36h,connections=8,write=evict",
       key});
  ASSERT_TRUE(all.ok()) << all.status();
  const RespTier::Options& given = all->tiers.at(0).resp;
  EXPECT_EQ(given.endpoint, (RespEndpoint{"::1", 7000}));
  EXPECT_EQ(given.cluster, RespCluster::kOn);
  EXPECT_TRUE(given.tls.on);
  EXPECT_EQ(given.tls.ca_file + given.tls.cert_file + given.tls.key_file, "/ca/c/p");
  EXPECT_EQ(given.user, "kv");
  EXPECT_EQ(all->tiers[0].password_file, "/w");
  EXPECT_EQ(given.prefix, "a.b:c");
  EXPECT_EQ(given.ttl, std::chrono::hours(36));
  EXPECT_EQ(given.connections, 8);
  EXPECT_EQ(TextOf(all->tiers[0].rule), "evict");
}

TEST(SettingsTest, AWrongPartOfASharedTierIsNamed) {
  const auto error = [](const std::string& text) {
    return Error(ParseSettings({"--tier=resp:" + text, "--tier-key-file=/k"}));
  };
  EXPECT_THAT(error("kv"), HasSubstr("\"kv\" is no HOST:PORT"));
  EXPECT_THAT(error("kv:0"), HasSubstr("\"kv:0\" is no HOST:PORT"));
  EXPECT_THAT(error("kv:65536"), HasSubstr("\"kv:65536\" is no HOST:PORT"));
  EXPECT_THAT(error("kv:1,cluster=yes"), HasSubstr("cluster is \"yes\"; must be auto, on, off"));
  EXPECT_THAT(error("kv:1,tls=maybe"), HasSubstr("tls is \"maybe\"; must be off, on"));
  EXPECT_THAT(error("kv:1,ca=/ca"), HasSubstr("ca=, cert= and key= are for tls=on"));
  EXPECT_THAT(error("kv:1,tls=on,cert=/c"), HasSubstr("cert= and key= go together"));
  EXPECT_THAT(error("kv:1,tls=on,ca=c"), HasSubstr("ca is \"c\", no absolute path"));
  EXPECT_THAT(error("kv:1,user=me"), HasSubstr("user= is without password-file="));
  EXPECT_THAT(error("kv:1,prefix={a}"), HasSubstr("prefix is \"{a}\"; must be 1 to 64 of"));
  EXPECT_THAT(error("kv:1,ttl=0"), HasSubstr("ttl is \"0\"; must be 1s to 8760h"));
  EXPECT_THAT(error("kv:1,connections=17"), HasSubstr("connections is \"17\"; must be 1 to 16"));
  EXPECT_THAT(error("kv:1,write=reuse"), HasSubstr("write is \"reuse\"; must be evict, seal, or reuse:2"));
  EXPECT_THAT(error("kv:1,capacity=1GiB"), HasSubstr("\"capacity=\" is no part of resp:"));
  EXPECT_THAT(Error(ParseSettings({"--tier=resp:kv:1"})),
              HasSubstr("--tier-key-file=: must name a file with the secret that all nodes"));
}

TEST(SettingsTest, ATierIsABucketThatNodesShare) {
  const std::string key = "--tier-key-file=/k";
  const auto least = ParseSettings({"--tier=s3:https://s3.example/kv-cache", key});
  ASSERT_TRUE(least.ok()) << least.status();
  const S3Tier::Options& s3 = least->tiers.at(0).s3;
  EXPECT_EQ(TextOf(s3.client.endpoint), "https://s3.example/kv-cache");
  EXPECT_FALSE(s3.client.endpoint.virtual_host);
  EXPECT_EQ(s3.client.region, "") << "the environment may say it";
  EXPECT_EQ(s3.credentials.file, "");
  EXPECT_EQ(s3.prefix, "kvpool");
  EXPECT_EQ(TextOf(least->tiers[0].rule), "seal");

  const auto all =
      ParseSettings({"--tier=s3:https://[::1]:9000/"
                     "kv.cache-1,region=eu-west-1,style=virtual,credentials-file=/c,profile=kv,"
                     "ca=/ca,prefix=a=b@c/d,connections=128,write=evict",
                     key});
  ASSERT_TRUE(all.ok()) << all.status();
  const S3Tier::Options& given = all->tiers.at(0).s3;
  EXPECT_EQ(TextOf(given.client.endpoint), "https://[::1]:9000/kv.cache-1");
  EXPECT_TRUE(given.client.endpoint.virtual_host);
  EXPECT_EQ(given.client.region, "eu-west-1");
  EXPECT_EQ(given.credentials.file + given.client.ca_file, "/c/ca");
  EXPECT_EQ(given.credentials.profile, "kv");
  EXPECT_EQ(given.prefix, "a=b@c/d");
  EXPECT_EQ(given.client.connections, 128);
  EXPECT_EQ(TextOf(all->tiers[0].rule), "evict");
}

TEST(SettingsTest, AWrongPartOfABucketIsNamed) {
  const auto error = [](const std::string& text) {
    return Error(ParseSettings({"--tier=s3:" + text, "--tier-key-file=/k"}));
  };
  const std::string place = "https://s3.example/kvs";
  EXPECT_THAT(error("s3.example/kvs"),
              HasSubstr("\"s3.example/kvs\" begins with neither https:// nor http://"));
  EXPECT_THAT(error("https://s3.example"), HasSubstr("names no bucket"));
  EXPECT_THAT(error("https://s3.example/KV"), HasSubstr("has the bucket \"KV\", not 3 to 63"));
  EXPECT_THAT(error(place + ",region="), HasSubstr("region is \"\"; must be 1 to 64 of"));
  EXPECT_THAT(error(place + ",region=a b"), HasSubstr("region is \"a b\""));
  EXPECT_THAT(error(place + ",style=dns"), HasSubstr("style is \"dns\"; must be path, virtual"));
  EXPECT_THAT(error(place + ",credentials-file=c"), HasSubstr("credentials-file is \"c\", no absolute path"));
  EXPECT_THAT(error(place + ",profile=kv"), HasSubstr("profile= is without credentials-file="));
  EXPECT_THAT(error("http://s3.example/kvs,ca=/ca"), HasSubstr("ca= is for https://"));
  for (const char* const prefix :
       {"", "/a", "a/", "a//b", "..", "a/../b", "./a", "a b", "a%20b", "\xc3\xa4"}) {
    EXPECT_THAT(error(absl::StrCat(place, ",prefix=", prefix)),
                HasSubstr(absl::StrCat("prefix is \"", prefix, "\"; must be 1 to 128 of")));
  }
  EXPECT_THAT(error(place + ",connections=129"), HasSubstr("connections is \"129\"; must be 1 to 128"));
  EXPECT_THAT(error(place + ",connections=0"), HasSubstr("must be 1 to 128"));
  EXPECT_THAT(error(place + ",write=reuse"),
              HasSubstr("write is \"reuse\"; must be evict, seal, or reuse:2 to reuse:63"));
  EXPECT_THAT(error(place + ",ttl=1h"), HasSubstr("\"ttl=\" is no part of s3:"));
  EXPECT_THAT(Error(ParseSettings({"--tier=s3:" + place})),
              HasSubstr("--tier-key-file=: must name a file with the secret"));
}

// ---- Capacity

TEST(CapacityTest, ErrorsNameTheLimits) {
  const uint64_t total = uint64_t{8} << 30;
  EXPECT_EQ(*ParseCapacity("25%", total), total / 4);
  EXPECT_EQ(*ParseCapacity("100%", total), total);
  EXPECT_EQ(*ParseCapacity("1.5GiB", total), total * 3 / 16);
  for (const char* share : {"150%", "0%", "-5%", "nan%", "%"}) {
    EXPECT_EQ(Error(ParseCapacity(share, total)),
              absl::StrCat("\"", share, "\" is no share; the limits are above 0% and 100%"));
  }
  EXPECT_EQ(Error(ParseCapacity("9GiB", total)), "\"9GiB\" is 9663676416 bytes; there are 8589934592");
  for (const char* size : {"", "-1", "8Gi", "lots", "GiB"}) {
    EXPECT_THAT(Error(ParseCapacity(size, total)), HasSubstr("write bytes, or a number with KiB")) << size;
  }
  EXPECT_THAT(Error(ParseCapacity("1e30", total)), HasSubstr("the limits are 1 and 1125899906842624"));
}

TEST(DevicesTest, ErrorsNameTheFlag) {
  EXPECT_EQ(Error(OpenDevices("host", "1KiB")), "--capacity=1KiB: 1024 bytes of host; the least is 2097152");
  EXPECT_THAT(
      Error(OpenDevices("host", "500TiB")),
      AllOf(StartsWith("--capacity: \"500TiB\" is 549755813888000 bytes; there are "), HasSubstr("RAM")));
  EXPECT_THAT(Error(OpenDevices("host,host", "0.6")),
              AllOf(StartsWith("--capacity=0.6: "), HasSubstr(" of host together")));
  EXPECT_THAT(Error(OpenDevices("", "0.5")), StartsWith("--device: \"\" is no device"));
  EXPECT_THAT(Error(OpenDevices("cuda:", "0.5")), StartsWith("--device: "));
  EXPECT_THAT(Error(OpenDevices("cuda:99", "0.5")), StartsWith("--device: cuda:99: "));
}

TEST(DevicesTest, EachDeviceMayHaveASizeOfItsOwn) {
  const absl::StatusOr<OpenedDevices> opened = OpenDevices("host", "host=16MiB");
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_THAT(opened->capacity_bytes, testing::ElementsAre(16 << 20));
  EXPECT_EQ(OpenDevices("host,host", "host=16MiB")->capacity_bytes.size(), 2u);
  EXPECT_EQ(Error(OpenDevices("host", "cuda:0=1GiB")), "--capacity=cuda:0=1GiB has no size for host");
  EXPECT_EQ(Error(OpenDevices("host", "host=1GiB,cuda:0=1GiB")),
            "--capacity=host=1GiB,cuda:0=1GiB names cuda:0; the devices are host");
  EXPECT_EQ(Error(OpenDevices("host", "host=1GiB,host=2GiB")), "host has two sizes");
  EXPECT_THAT(Error(OpenDevices("host", "host=1KiB")), HasSubstr("1024 bytes of host; the least is"));
  EXPECT_TRUE(CheckCapacity("cuda:0=40GiB,host=50%").ok());
  EXPECT_THAT(std::string(CheckCapacity("host=1GiB,2GiB").message()),
              StartsWith("\"2GiB\" is no DEVICE=SIZE"));
  EXPECT_THAT(std::string(CheckCapacity("cuda:0=40Gi").message()), StartsWith("\"40Gi\" is no size"));
}

TEST(DevicesTest, ASlabIsNeitherBelowAGranuleNorAboveTheCapacity) {
  const absl::StatusOr<OpenedDevices> opened = OpenDevices("host", "16MiB");
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{2} << 20, uint64_t{16} << 20}) {
    EXPECT_TRUE(CheckSlabBytes(bytes, *opened).ok()) << bytes;
  }
  EXPECT_EQ(CheckSlabBytes(1, *opened).message(),
            "--slab-bytes=1: the limits on host are 2097152 and its capacity, 16777216");
  EXPECT_FALSE(CheckSlabBytes((uint64_t{16} << 20) + 1, *opened).ok());
}

// ---- The machine

// The kernel's files, as they are in containers.
class MachineTest : public ::testing::Test {
 protected:
  void Mounted(const std::string& mountinfo, const std::string& cgroup) {
    Write(root_ + "/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo);
    Write(root_ + "/proc/self/cgroup", cgroup);
  }
  const TemporaryDirectory directory_;
  const std::string root_ = directory_.path();
  const std::string mount_ = "/sys/fs/cgroup";
};

TEST_F(MachineTest, MemoryIsTheMachinesWhereNothingLimitsIt) {
  const MemoryLimit ram = UsableMemory(root_);
  EXPECT_EQ(ram.source, "RAM");
  EXPECT_GT(ram.bytes, uint64_t{1} << 20);
  Mounted("30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/user.slice\n");
  Write(root_ + mount_ + "/user.slice/memory.max", "max\n");
  EXPECT_EQ(UsableMemory(root_).bytes, ram.bytes);
}

TEST_F(MachineTest, TheLeastLimitOfTheCgroupsAroundCountsInV2) {
  Mounted("30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/pods/pod1/daemon\n");
  Write(root_ + mount_ + "/pods/pod1/daemon/memory.max", "max\n");
  Write(root_ + mount_ + "/pods/pod1/memory.max", "1048576\n");
  Write(root_ + mount_ + "/pods/memory.max", "2097152\n");
  EXPECT_EQ(UsableMemory(root_).bytes, 1048576u);
  EXPECT_EQ(UsableMemory(root_).source, mount_ + "/pods/pod1/memory.max");
  Write(root_ + mount_ + "/pods/pod1/daemon/memory.max", "524288\n");
  EXPECT_EQ(UsableMemory(root_).bytes, 524288u);
}

TEST_F(MachineTest, AContainersOwnTreeIsMountedAtItsRoot) {
  // With a cgroup namespace, and without one.
  for (const char* cgroup : {"0::/\n", "0::/docker/1a2b\n", "0::/../sibling\n"}) {
    Mounted("30 22 0:26 /docker/1a2b /sys/fs/cgroup ro - cgroup2 cgroup rw\n", cgroup);
    Write(root_ + mount_ + "/memory.max", "1048576\n");
    EXPECT_EQ(UsableMemory(root_).bytes, 1048576u) << cgroup;
  }
}

TEST_F(MachineTest, MemoryLimitsOfV1) {
  Mounted(
      "31 22 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
      "32 22 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
      "5:cpu:/elsewhere\n4:hugetlb,memory:/docker/1a2b\n");
  Write(root_ + mount_ + "/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write(root_ + mount_ + "/memory/docker/memory.limit_in_bytes", "1048576\n");
  Write(root_ + mount_ + "/memory/docker/1a2b/memory.limit_in_bytes", "2097152\n");
  EXPECT_EQ(UsableMemory(root_).bytes, 1048576u);
}

// Sets a variable of the environment, or removes it, until the end of the test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    Set(value);
  }
  ~Variable() { Set(before_.has_value() ? before_->c_str() : nullptr); }
  void Set(const char* value) const { value == nullptr ? unsetenv(name_) : setenv(name_, value, 1); }

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

TEST_F(MachineTest, WhatPromisesAGpu) {
  const Variable granted("NVIDIA_VISIBLE_DEVICES", nullptr), visible("CUDA_VISIBLE_DEVICES", nullptr);
  EXPECT_EQ(PromisedGpu(root_), "");
  Write(root_ + "/dev/null", "");
  EXPECT_EQ(PromisedGpu(root_), "");
  for (const char* none : {"", "void", "none"}) {
    granted.Set(none);
    EXPECT_EQ(PromisedGpu(root_), "") << none;
  }
  granted.Set("all");
  EXPECT_EQ(PromisedGpu(root_), "NVIDIA_VISIBLE_DEVICES=all");
  granted.Set("void");
  std::filesystem::create_directories(root_ + "/proc/driver/nvidia");
  EXPECT_EQ(PromisedGpu(root_), "/proc/driver/nvidia");
  Write(root_ + "/dev/nvidia0", "");
  EXPECT_EQ(PromisedGpu(root_), "/dev/nvidia0");
  visible.Set("0");
  EXPECT_EQ(PromisedGpu(root_), "CUDA_VISIBLE_DEVICES=0");
  for (const char* hidden : {"", "-1"}) {
    visible.Set(hidden);
    EXPECT_EQ(PromisedGpu(root_), "") << hidden;
  }
}

TEST_F(MachineTest, AutoDoesNotTakeHostMemoryForAPromisedGpu) {
  const Variable granted("NVIDIA_VISIBLE_DEVICES", "all"), visible("CUDA_VISIBLE_DEVICES", nullptr);
  const absl::StatusOr<int> gpus = CudaDeviceCount();
  if (gpus.ok() && *gpus > 0) GTEST_SKIP() << "this machine has a GPU, so that the promise is kept";
  EXPECT_THAT(Error(OpenDevices("auto", "16MiB")),
              AllOf(StartsWith("--device=auto: NVIDIA_VISIBLE_DEVICES=all promises a GPU, but "),
                    HasSubstr("say --device=host if host memory is meant")));
  EXPECT_TRUE(OpenDevices("host", "16MiB").ok());
}

}  // namespace
}  // namespace kvpool
