#include "client/replay/conversation.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <queue>
#include <random>
#include <utility>

namespace kvpool::replay {
namespace {

// All lengths in tokens, all times in seconds. "Trace" is the public conversation trace.
constexpr double kWarmupSeconds = 3600;      // 99 % of the gaps between turns are below 1,600 s.
constexpr double kArrivalsPerSecond = 1.93;  // Conversations; with their turns 3.4 requests a second.
constexpr double kTickMs = 3000;             // The trace's clock moves in steps of 3 s.

constexpr uint32_t kShortestPrompt = 890;  // System prompt and template; the trace's shortest prompt has 890.
constexpr uint32_t kLongestPrompt = 126195;  // The model's window of 128 Ki less room for an answer.
constexpr uint32_t kSharedBlocks = 1;        // The first block of every prompt: the only one shared by all.

// First messages. A quarter are one line, and nobody comes back to those; a few are whole documents.
constexpr double kOneLineShare = 0.26;
constexpr double kOneLineMeanTokens = 45;
constexpr double kFirstMedianTokens = 6000, kFirstSigma = 1.13;
constexpr double kDocumentShare = 0.022;
constexpr double kDocumentTokens =
    40000;  // Documents have log-uniform lengths of this to the longest prompt.

// Answers: mostly around 370 tokens, some a word or two, some long.
constexpr double kTerseShare = 0.13, kTerseMedianTokens = 20, kTerseSigma = 1.0;
constexpr double kLongShare = 0.05, kLongMedianTokens = 800, kLongSigma = 0.35;
constexpr double kAnswerMeanTokens = 370, kAnswerSdTokens = 165;
constexpr uint32_t kLongestAnswer = 2000;  // The trace's cap.

// Messages after the first: a line, or an attachment.
constexpr double kAttachmentShare = 0.27, kAttachmentMedianTokens = 3500, kAttachmentSigma = 1.1;
constexpr double kLineMedianTokens = 15, kLineSigma = 1.2;
// Turns of long conversations that replace what was attached: the shared part is a fraction
// u^2 of the blocks.
constexpr double kReplaceShare = 0.2;
constexpr size_t kReplaceFromBlocks = 8;
constexpr double kReplaceSigma = 0.35;  // Spread of the new length around the old.
constexpr double kRepeatShare = 0.01;   // "Try again": the same prompt.

// After turn t another one follows with probability 1 - 2.95 / (t + 3.9): 40 % after the first, 79 % after
// the tenth. People who stayed stay. Long prompts are abandoned more often.
constexpr double kLeave = 2.95, kLeaveOffset = 3.9;
constexpr uint32_t kLongPrompt = 32768;
constexpr double kLongPromptStays = 0.7;

// Time to the next turn: generating and reading the answer, then thinking, which takes
// longer for longer texts.
constexpr double kSecondsPerAnswerToken = 0.04;
constexpr double kThinkMedianSeconds = 112, kThinkSigma = 1.15;
constexpr double kThinkLengthExponent = 0.1, kThinkLengthUnitTokens = 7000;

// std::mt19937_64 is the same everywhere; the standard's distributions are not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  double Uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double Exponential(double mean) { return -mean * std::log1p(-Uniform()); }
  double Normal() {
    const double radius = std::sqrt(-2 * std::log1p(-Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }
  double LogNormal(double median, double sigma) { return median * std::exp(sigma * Normal()); }

 private:
  std::mt19937_64 engine_;
};

struct Conversation {
  uint32_t turns = 0;
  uint32_t prompt_tokens = 0;
  uint32_t answer_tokens = 0;
  std::vector<uint64_t> hash_ids;
};

class Workload {
 public:
  explicit Workload(uint64_t seed) : dice_(seed) {}

  std::vector<Request> Run(uint64_t count) {
    std::vector<Request> requests;
    requests.reserve(count);
    double next_arrival = -kWarmupSeconds;
    while (requests.size() < count) {
      Turn turn;
      if (turns_.empty() || next_arrival <= turns_.top().seconds) {
        turn.seconds = next_arrival;
        next_arrival += dice_.Exponential(1 / kArrivalsPerSecond);
        Begin(&turn.conversation);
      } else {
        turn = turns_.top();
        turns_.pop();
        if (!Continue(&turn.conversation)) continue;
      }
      Conversation& conversation = turn.conversation;
      ++conversation.turns;
      conversation.answer_tokens = AnswerTokens();
      if (turn.seconds >= 0) {
        requests.push_back(
            {.timestamp_ms = static_cast<uint64_t>(std::floor(turn.seconds * 1000 / kTickMs) * kTickMs),
             .input_tokens = conversation.prompt_tokens,
             .output_tokens = conversation.answer_tokens,
             .hash_ids = conversation.hash_ids});
      }
      MaybeAnotherTurn(std::move(turn));
    }
    return requests;
  }

 private:
  struct Turn {
    double seconds = 0;
    uint64_t order = 0;  // Ties end here.
    Conversation conversation;
  };
  struct Later {
    bool operator()(const Turn& a, const Turn& b) const {
      return a.seconds != b.seconds ? a.seconds > b.seconds : a.order > b.order;
    }
  };

  void Begin(Conversation* conversation) {
    double message = dice_.Uniform() < kOneLineShare ? dice_.Exponential(kOneLineMeanTokens)
                                                     : dice_.LogNormal(kFirstMedianTokens, kFirstSigma);
    if (dice_.Uniform() < kDocumentShare) {
      message = kDocumentTokens * std::pow(kLongestPrompt / kDocumentTokens, dice_.Uniform());
    }
    for (uint64_t id = 0; id < kSharedBlocks; ++id) conversation->hash_ids.push_back(id);
    SetPrompt(conversation, kSharedBlocks, kShortestPrompt + message);
  }

  // False: the prompt would no longer fit, which ends the conversation.
  bool Continue(Conversation* conversation) {
    const double what = dice_.Uniform();
    const size_t blocks = conversation->hash_ids.size();
    if (what < kReplaceShare && blocks >= kReplaceFromBlocks) {
      const double share = dice_.Uniform();
      const size_t kept =
          std::max<size_t>(2, static_cast<size_t>(static_cast<double>(blocks) * share * share));
      const double tokens = dice_.LogNormal(conversation->prompt_tokens, kReplaceSigma);
      SetPrompt(conversation, kept, std::max(tokens, static_cast<double>((kept + 1) * kTokensPerBlock)));
      return true;
    }
    if (what >= 1 - kRepeatShare) return true;
    const double message = dice_.Uniform() < kAttachmentShare
                               ? dice_.LogNormal(kAttachmentMedianTokens, kAttachmentSigma)
                               : dice_.LogNormal(kLineMedianTokens, kLineSigma);
    const double tokens = conversation->prompt_tokens + conversation->answer_tokens + message;
    if (tokens > kLongestPrompt) return false;
    SetPrompt(conversation, conversation->prompt_tokens / kTokensPerBlock, tokens);
    return true;
  }

  // The first `kept` blocks stay what they were; all behind them are new.
  void SetPrompt(Conversation* conversation, size_t kept, double tokens) {
    conversation->prompt_tokens = static_cast<uint32_t>(std::min<double>(tokens, kLongestPrompt));
    const size_t blocks = (conversation->prompt_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
    conversation->hash_ids.resize(std::min({kept, blocks, conversation->hash_ids.size()}));
    while (conversation->hash_ids.size() < blocks) conversation->hash_ids.push_back(next_id_++);
  }

  uint32_t AnswerTokens() {
    const double kind = dice_.Uniform();
    const double tokens = kind < kTerseShare ? dice_.LogNormal(kTerseMedianTokens, kTerseSigma)
                          : kind < kTerseShare + kLongShare
                              ? dice_.LogNormal(kLongMedianTokens, kLongSigma)
                              : kAnswerMeanTokens + kAnswerSdTokens * dice_.Normal();
    return static_cast<uint32_t>(std::clamp<double>(tokens, 3, kLongestAnswer));
  }

  void MaybeAnotherTurn(Turn turn) {
    const Conversation& conversation = turn.conversation;
    // One-line questions fit into two blocks.
    if (conversation.prompt_tokens <= 2 * kTokensPerBlock) return;
    const double stays = (1 - kLeave / (conversation.turns + kLeaveOffset)) *
                         (conversation.prompt_tokens > kLongPrompt ? kLongPromptStays : 1);
    if (dice_.Uniform() >= stays) return;
    const double length = conversation.prompt_tokens / kThinkLengthUnitTokens;
    turn.seconds +=
        kSecondsPerAnswerToken * conversation.answer_tokens +
        dice_.LogNormal(kThinkMedianSeconds, kThinkSigma) * std::pow(length, kThinkLengthExponent);
    turn.order = ++order_;
    turns_.push(std::move(turn));
  }

  Dice dice_;
  std::priority_queue<Turn, std::vector<Turn>, Later> turns_;
  uint64_t order_ = 0;
  uint64_t next_id_ = kSharedBlocks;
};

}  // namespace

std::vector<Request> GenerateConversation(const ConversationOptions& options) {
  return Workload(options.seed).Run(options.requests);
}

}  // namespace kvpool::replay
