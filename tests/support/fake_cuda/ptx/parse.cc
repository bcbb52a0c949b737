// PTX, as nvcc writes it: declarations, then a statement a line. What is not known ends the process, so that nothing is
// executed wrongly in silence.
#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "tests/support/fake_cuda/ptx/image.h"
#include "tests/support/fake_cuda/ptx/operations.h"
#include "tests/support/fake_cuda/ptx/program.h"

namespace kvpool::fake::ptx {
namespace {

using std::string_view;

constexpr size_t kAlignment = 64;
size_t Aligned(size_t offset, size_t to) { return (offset + to - 1) / to * to; }

bool IsSpace(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

string_view Trimmed(string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

// Splits at separators outside of brackets.
std::vector<string_view> Split(string_view text, char separator) {
  std::vector<string_view> parts;
  int depth = 0;
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{' || text[i] == '[') ++depth;
    if (text[i] == '}' || text[i] == ']') --depth;
    if (text[i] != separator || depth > 0) continue;
    parts.push_back(Trimmed(text.substr(start, i - start)));
    start = i + 1;
  }
  const string_view last = Trimmed(text.substr(start));
  if (!last.empty()) parts.push_back(last);
  return parts;
}

std::vector<string_view> Words(string_view text) {
  std::vector<string_view> words;
  while (!(text = Trimmed(text)).empty()) {
    const size_t end = static_cast<size_t>(std::ranges::find_if(text, IsSpace) - text.begin());
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return words;
}

// Line ends stay, so that lines can be counted.
std::string WithoutComments(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (text.compare(i, 2, "/*") == 0) {
      const size_t end = std::min(text.find("*/", i), text.size() - 2) + 2;
      for (; i < end; ++i) {
        if (text[i] == '\n') out += '\n';
      }
    } else {
      out += text[i++];
    }
  }
  return out;
}

struct Register {
  size_t bytes = 0;  // each lane's; 0: a predicate
  size_t first = 0;  // its place, or that of the first of `count` numbered ones
  size_t count = 0;  // 0: one that has no number
};
size_t WarpBytes(size_t bytes) { return bytes == 0 ? sizeof(uint32_t) : bytes * kLanes; }

class Parser {
 public:
  explicit Parser(std::string text) : program_(std::make_unique<Program>()) {
    program_->text = WithoutComments(text);
    text_ = program_->text;
  }

  std::unique_ptr<const Program> Run() {
    while (SkipSpace()) {
      if (Skip(".version") || Skip(".target") || Skip(".address_size")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.substr(at_).starts_with(".shared")) {
        DeclareShared(Statement());
      } else if (Skip(".visible .entry")) {
        ParseKernel();
      } else {
        Unknown(text_.substr(at_, text_.find('\n', at_) - at_));
      }
    }
    return std::move(program_);
  }

 private:
  [[noreturn]] void Unknown(string_view what) const {
    Die("PTX line " + std::to_string(Line()) + ": not known: " + std::string(what));
  }
  uint32_t Line() const {
    return 1 + static_cast<uint32_t>(
                   std::count(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(at_), '\n'));
  }
  bool SkipSpace() {
    while (at_ < text_.size() && IsSpace(text_[at_])) at_ += 1, line_ += text_[at_ - 1] == '\n';
    return at_ < text_.size();
  }
  bool Skip(string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  string_view Until(char end) {
    const size_t found = text_.find(end, at_);
    if (found == string_view::npos) Unknown("the end of the text");
    const string_view part = text_.substr(at_, found - at_);
    at_ = found + 1;
    return Trimmed(part);
  }
  string_view Statement() { return Until(';'); }

  int64_t Number(string_view digits) const {
    int64_t value = 0;
    const bool negative = !digits.empty() && digits[0] == '-';
    if (negative) digits.remove_prefix(1);
    if (digits.empty() || !std::ranges::all_of(digits, IsDigit)) Unknown(digits);
    for (const char c : digits)
      value = static_cast<int64_t>(static_cast<uint64_t>(value) * 10 + static_cast<uint64_t>(c - '0'));
    return negative ? static_cast<int64_t>(0 - static_cast<uint64_t>(value)) : value;
  }
  // "name[n]": the name and n.
  std::pair<string_view, size_t> Array(string_view declared) const {
    const size_t bracket = declared.find('[');
    if (bracket == string_view::npos || declared.back() != ']') Unknown(declared);
    return {declared.substr(0, bracket),
            static_cast<size_t>(Number(declared.substr(bracket + 1, declared.size() - bracket - 2)))};
  }

  // .shared .align 8 .b8 name[256]
  void DeclareShared(string_view statement) {
    const std::vector<string_view> words = Words(statement);
    if (words.size() != 5 || words[1] != ".align" || words[3] != ".b8") Unknown(statement);
    const auto [name, bytes] = Array(words[4]);
    const size_t offset = Aligned(program_->shared_bytes, kAlignment);
    shared_[std::string(name)] = offset;
    program_->shared_bytes = offset + bytes;
  }

  void ParseParameter(string_view declared) {
    const std::vector<string_view> words = Words(declared);
    size_t bytes = 0, alignment = 0;
    string_view name = words.back();
    if (words.size() == 5 && words[1] == ".align" && words[3] == ".b8") {
      alignment = static_cast<size_t>(Number(words[2]));
      std::tie(name, bytes) = Array(words.back());
    } else if (words.size() >= 3) {
      alignment = bytes =
          BytesOfType(words[1].substr(1));  // what may follow speaks of the memory that a pointer is for
    }
    if (words.size() < 3 || words[0] != ".param" || bytes == 0) Unknown(declared);
    const size_t offset = Aligned(kernel_->parameter_bytes, alignment);
    kernel_->parameters.push_back({offset, bytes});
    kernel_->parameter_bytes = offset + bytes;
    parameters_[std::string(name)] = offset;
  }

  void ParseKernel() {
    auto kernel = std::make_unique<Kernel>();
    kernel_ = kernel.get();
    parameters_.clear();
    labels_.clear();
    branches_.clear();
    constants_.clear();
    scopes_.assign(1, {});
    kernel_->name = Until('(');
    for (const string_view parameter : Split(Until(')'), ',')) ParseParameter(parameter);
    const std::vector<string_view> directives = Words(Until('{'));
    for (size_t i = 0; i + 1 < directives.size(); i += 2) {
      if (directives[i] == ".maxntid")
        kernel_->max_threads = static_cast<uint32_t>(Number(directives[i + 1]));
      else if (directives[i] != ".minnctapersm")
        Unknown(directives[i]);
    }
    kernel_->register_bytes = Special::kSpecials * WarpBytes(sizeof(uint32_t));
    line_ = Line();
    for (int depth = 1; depth > 0;) {
      if (!SkipSpace()) Unknown("the end of a kernel");
      if (Skip("{")) {
        ++depth;
        scopes_.emplace_back();
      } else if (Skip("}")) {
        --depth;
        scopes_.pop_back();
      } else if (text_[at_] == '$') {
        labels_[std::string(Until(':'))] = static_cast<uint32_t>(kernel_->code.size());
      } else {
        const uint32_t line = line_;
        const size_t start = at_;
        ParseStatement(Statement(), line);
        line_ += static_cast<uint32_t>(std::count(text_.begin() + static_cast<ptrdiff_t>(start),
                                                  text_.begin() + static_cast<ptrdiff_t>(at_), '\n'));
      }
    }
    for (const auto& [index, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) Unknown(label);
      kernel_->code[index].target = found->second;
    }
    // A kernel's end is one, said or not.
    kernel_->code.push_back({.execute = &Return, .line = line_});
    program_->kernels[kernel_->name] = std::move(kernel);
  }

  // ------------------------------------------------------------------------------------------- registers

  // .reg .b32 %r<885> or .reg .b32 %temp
  void DeclareRegisters(string_view statement) {
    const std::vector<string_view> words = Words(statement);
    if (words.size() != 3) Unknown(statement);
    string_view name = words[2];
    Register declared;
    if (words[1] != ".pred") declared.bytes = BytesOfType(words[1].substr(1));
    if (name.back() == '>') {
      const size_t bracket = name.find('<');
      declared.count = static_cast<size_t>(Number(name.substr(bracket + 1, name.size() - bracket - 2)));
      name = name.substr(0, bracket);
    }
    kernel_->register_bytes = Aligned(kernel_->register_bytes, kAlignment);
    declared.first = kernel_->register_bytes;
    kernel_->register_bytes += std::max<size_t>(declared.count, 1) * WarpBytes(declared.bytes);
    scopes_.back()[std::string(name)] = declared;
  }

  struct Found {
    Place place;
    size_t bytes;
  };
  std::optional<Found> FindRegister(string_view name) const {
    constexpr std::array<string_view, Special::kSpecials> kNames = {
        "%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%nctaid.x", "%nctaid.y", "%tid.y"};
    if (const auto special = std::ranges::find(kNames, name); special != kNames.end()) {
      const auto index = static_cast<size_t>(special - kNames.begin());
      return Found{static_cast<Place>(index * WarpBytes(sizeof(uint32_t))), sizeof(uint32_t)};
    }
    const auto prefix_end =
        name.size() -
        static_cast<size_t>(std::find_if_not(name.rbegin(), name.rend(), IsDigit) - name.rbegin());
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto whole = scope->find(std::string(name));
          whole != scope->end() && whole->second.count == 0) {
        return Found{static_cast<Place>(whole->second.first), whole->second.bytes};
      }
      const auto family = scope->find(std::string(name.substr(0, prefix_end)));
      if (family == scope->end() || prefix_end == name.size()) continue;
      const auto number = static_cast<size_t>(Number(name.substr(prefix_end)));
      if (number >= family->second.count) continue;
      return Found{static_cast<Place>(family->second.first + number * WarpBytes(family->second.bytes)),
                   family->second.bytes};
    }
    return std::nullopt;
  }
  Found RegisterOf(string_view name) const {
    const std::optional<Found> found = FindRegister(name);
    if (!found.has_value()) Unknown(name);
    return *found;
  }
  Place RegisterOf(string_view name, size_t bytes) const {
    const Found found = RegisterOf(name);
    if (found.bytes != bytes) Unknown("the size of " + std::string(name));
    return found.place;
  }

  // A constant, the same for all lanes.
  Place Constant(uint64_t value, size_t bytes) {
    const auto [known, is_new] = constants_.try_emplace(std::pair(value, bytes), kernel_->constants.size());
    if (is_new) {
      std::vector<std::byte>& all = kernel_->constants;
      all.resize(Aligned(known->second + WarpBytes(bytes), kAlignment));
      for (size_t lane = 0; lane < (bytes == 0 ? 1 : kLanes); ++lane) {
        std::memcpy(all.data() + known->second + lane * bytes, &value, bytes == 0 ? sizeof(uint32_t) : bytes);
      }
    }
    return ~static_cast<Place>(known->second);
  }

  std::optional<uint64_t> ValueOf(string_view operand) const {
    if (operand.starts_with("0f") || operand.starts_with("0d")) {
      return std::stoull(std::string(operand.substr(2)), nullptr, 16);
    }
    if (const auto parameter = parameters_.find(std::string(operand)); parameter != parameters_.end()) {
      return parameter->second;
    }
    if (const auto shared = shared_.find(std::string(operand)); shared != shared_.end())
      return shared->second;
    if (IsDigit(operand[0]) || operand[0] == '-') return static_cast<uint64_t>(Number(operand));
    return std::nullopt;
  }

  // An operand that is read; `bytes` is 0 for a predicate.
  Place Source(string_view operand, size_t bytes) {
    if (operand[0] == '%') return RegisterOf(operand, bytes);
    const std::optional<uint64_t> value = ValueOf(operand);
    if (!value.has_value()) Unknown(operand);
    if (bytes == 0) return Constant(*value != 0 ? kAllLanes : 0, 0);
    return Constant(bytes == 8 ? *value : *value & ((uint64_t{1} << bytes * 8) - 1), bytes);
  }

  // ----------------------------------------------------------------------------------------- statements

  void ParseStatement(string_view statement, uint32_t line) {
    if (statement.starts_with(".reg")) return DeclareRegisters(statement);
    if (statement.starts_with(".shared")) return DeclareShared(statement);
    if (statement.starts_with(".pragma")) return;
    Instruction instruction = {.line = line};
    if (statement[0] == '@') {
      const string_view guard = Words(statement)[0];
      instruction.guard_negated = guard[1] == '!';
      instruction.guard = RegisterOf(guard.substr(instruction.guard_negated ? 2 : 1), 0);
      statement = Trimmed(statement.substr(guard.size()));
    }
    const string_view opcode = Words(statement)[0];
    const std::vector<string_view> operands = Split(statement.substr(opcode.size()), ',');
    if (!ParseControl(opcode, operands, &instruction) && !ParseAccess(opcode, operands, &instruction) &&
        !ParseVectorMove(opcode, operands, &instruction) &&
        !ParseMatrixProduct(opcode, operands, &instruction)) {
      ParseOperation(opcode, operands, &instruction);
    }
    if (instruction.execute == nullptr) Unknown(statement);
    kernel_->code.push_back(instruction);
  }

  bool ParseControl(string_view opcode, const std::vector<string_view>& operands, Instruction* in) {
    if (opcode == "bra" || opcode == "bra.uni") {
      in->execute = &Branch;
      branches_.emplace_back(kernel_->code.size(), operands[0]);
    } else if (opcode == "ret" || opcode == "exit") {
      in->execute = &Return;
    } else if (opcode == "bar.sync" && operands.size() == 1 && operands[0] == "0") {
      in->execute = &Barrier;
    } else {
      return false;
    }
    return true;
  }

  // [%rd1+8], [symbol+8] or [%rd1]
  void ParseAddress(string_view operand, Instruction* in) {
    if (operand.front() != '[' || operand.back() != ']') Unknown(operand);
    operand = operand.substr(1, operand.size() - 2);
    const size_t plus = operand.find('+');
    if (plus != string_view::npos) in->displacement = Number(Trimmed(operand.substr(plus + 1)));
    const string_view base = Trimmed(operand.substr(0, plus));
    if (base[0] != '%') {
      in->from[0] = Source(base, sizeof(uint64_t));
      return;
    }
    const Found found = RegisterOf(base);
    in->from[0] = found.place;
    in->short_address = found.bytes == sizeof(uint32_t);
  }

  static std::vector<string_view> Elements(string_view operand) {
    return operand[0] == '{' ? Split(operand.substr(1, operand.size() - 2), ',')
                             : std::vector<string_view>{operand};
  }

  bool ParseAccess(string_view opcode, const std::vector<string_view>& operands, Instruction* in) {
    const std::vector<string_view> parts = Split(opcode, '.');
    const bool load = parts[0] == "ld", store = parts[0] == "st",
               atomic = parts[0] == "atom" || parts[0] == "red";
    if (!load && !store && !atomic) return false;
    for (const string_view part : parts) {
      if (part == "global") in->space = Space::kGlobal;
      if (part == "shared") in->space = Space::kShared;
      if (part == "param") in->space = Space::kParam;
      if (part == "local" || part == "const") Unknown(opcode);
    }
    if (atomic && std::ranges::find(parts, "add") == parts.end()) Unknown(opcode);
    const bool returns = load || parts[0] == "atom";
    ParseAddress(operands[returns ? 1 : 0], in);
    const std::vector<string_view> elements = Elements(operands[load ? 0 : operands.size() - 1]);
    in->count = static_cast<uint8_t>(elements.size());
    const uint32_t element_bytes = BytesOfType(parts.back());
    size_t register_bytes = std::max<size_t>(element_bytes, 2);
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i][0] == '%') register_bytes = RegisterOf(elements[i]).bytes;
    }
    for (size_t i = 0; i < elements.size(); ++i) {
      if (load)
        in->to[i] = RegisterOf(elements[i], register_bytes);
      else
        in->from[1 + i] = Source(elements[i], register_bytes);
    }
    if (parts[0] == "atom") in->to[0] = RegisterOf(operands[0], register_bytes);
    in->execute = FindAccess(load    ? Access::kLoad
                             : store ? Access::kStore
                                     : Access::kAtomicAdd,
                             parts.back(), static_cast<uint32_t>(register_bytes));
    return true;
  }

  // mov.b64 {%r1, %r2}, %rd1 and mov.b64 %rd1, {%r1, %r2}
  bool ParseVectorMove(string_view opcode, const std::vector<string_view>& operands, Instruction* in) {
    if (!opcode.starts_with("mov.b") || operands.size() != 2) return false;
    const bool unpacks = operands[0][0] == '{', packs = operands[1][0] == '{';
    if (!unpacks && !packs) return false;
    const std::vector<string_view> parts = Elements(operands[unpacks ? 0 : 1]);
    const uint32_t whole_bytes = BytesOfType(opcode.substr(sizeof "mov." - 1));
    const uint32_t part_bytes = whole_bytes / static_cast<uint32_t>(parts.size());
    in->count = static_cast<uint8_t>(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      if (unpacks)
        in->to[i] = RegisterOf(parts[i], part_bytes);
      else
        in->from[i] = Source(parts[i], part_bytes);
    }
    if (unpacks)
      in->from[0] = Source(operands[1], whole_bytes);
    else
      in->to[0] = RegisterOf(operands[0], whole_bytes);
    in->execute = unpacks ? FindUnpack(part_bytes, whole_bytes) : FindPack(part_bytes, whole_bytes);
    return true;
  }

  // mma.sync…  {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f5, %f6, %f7, %f8}
  bool ParseMatrixProduct(string_view opcode, const std::vector<string_view>& operands, Instruction* in) {
    in->execute = FindMatrixProduct(opcode);
    if (in->execute == nullptr) return false;
    std::vector<string_view> all;
    for (const string_view operand : operands) {
      for (const string_view element : Elements(operand)) all.push_back(element);
    }
    if (all.size() != std::size(in->to) + std::size(in->from)) Unknown(opcode);
    for (size_t i = 0; i < all.size(); ++i) {
      if (i < std::size(in->to))
        in->to[i] = RegisterOf(all[i], sizeof(uint32_t));
      else
        in->from[i - std::size(in->to)] = Source(all[i], sizeof(uint32_t));
    }
    return true;
  }

  void ParseOperation(string_view opcode, const std::vector<string_view>& operands, Instruction* in) {
    const Operation* operation = FindOperation(std::string(opcode));
    if (operation == nullptr || operands.size() != operation->operands.size()) return;
    for (size_t i = 0; i < operands.size(); ++i) {
      const char letter = operation->operands[i];
      const size_t bytes = letter == 'p' ? 0 : letter == 'h' ? 2 : letter == 'w' ? 4 : 8;
      if (i > 0) {
        in->from[i - 1] = Source(operands[i], bytes);
        continue;
      }
      // A shuffle has a second result: %r1|%p1.
      const std::vector<string_view> results = Split(operands[0], '|');
      in->to[0] = RegisterOf(results[0], bytes);
      if (results.size() == 2) in->to[1] = RegisterOf(results[1], 0);
    }
    in->execute = operation->execute;
  }

  std::unique_ptr<Program> program_;
  string_view text_;
  size_t at_ = 0;
  std::map<std::string, size_t> shared_;  // offsets
  // Of the kernel that is being parsed.
  uint32_t line_ = 1;
  Kernel* kernel_ = nullptr;
  std::map<std::string, size_t> parameters_;  // offsets
  std::vector<std::map<std::string, Register>> scopes_;
  std::map<std::pair<uint64_t, size_t>, size_t> constants_;
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

}  // namespace

std::string Program::LineOf(const Instruction& instruction) const {
  size_t at = 0;
  for (uint32_t line = 1; line < instruction.line; ++line) at = text.find('\n', at) + 1;
  return std::string(Trimmed(string_view(text).substr(at, text.find('\n', at) - at)));
}

std::unique_ptr<const Program> Parse(std::string text) { return Parser(std::move(text)).Run(); }

}  // namespace kvpool::fake::ptx
