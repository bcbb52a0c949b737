#include "server/sim/curve.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace kvpool::sim {
namespace {

constexpr double kWidth = 1040, kHeight = 620;
constexpr double kLeft = 76, kRight = 190, kTop = 86, kBottom = 66;
constexpr double kLabelHeight = 15;
constexpr double kNegligible = 0.0005;

// Okabe and Ito's colours, which the colour-blind can tell apart too; dashes once they repeat.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                    "#e69f00", "#56b4e9", "#8c6d31"};
constexpr const char* kDashes[] = {"", "7 3", "2 3"};

struct Line {
  std::string policy;
  std::string colour, dash;
  double width = 1.8;
  std::vector<std::pair<double, double>> points;  // capacity, miss ratio
  double label_y = 0;
};

class Picture {
 public:
  Picture(const Workload& workload, const std::vector<Result>& results) : workload_(workload) {
    std::map<std::string, size_t> at;
    double highest = 0, lowest = 1;
    for (const Result& r : results) {
      const double miss = 1 - r.block_ratio();
      highest = std::max(highest, miss);
      lowest = std::min(lowest, miss);
      if (r.policy == "infinite") {
        floor_ = miss;
        continue;
      }
      const auto [it, is_new] = at.try_emplace(r.policy, lines_.size());
      if (is_new) lines_.push_back({.policy = r.policy});
      const auto capacity = static_cast<double>(r.capacity_blocks);
      lines_[it->second].points.emplace_back(capacity, miss);
      least_ = least_ == 0 ? capacity : std::min(least_, capacity);
      most_ = std::max(most_, capacity);
    }
    TrimTail();
    step_ = highest - lowest > 0.4 ? 0.1 : highest - lowest > 0.1 ? 0.05 : 0.01;
    top_ = std::min(1.0, std::ceil(highest / step_ + 0.1) * step_);
    bottom_ = std::max(0.0, std::floor(lowest / step_ - 0.1) * step_);
    Style();
  }

  std::string Draw() {
    Frame();
    Grid();
    // The two lines to compare with are on top.
    for (const bool bold : {false, true}) {
      for (const Line& line : lines_) {
        if ((line.width > 2) == bold) Curve(line);
      }
    }
    Labels();
    return svg_ + "</svg>\n";
  }

 private:
  double X(double capacity) const {
    return kLeft + (kWidth - kLeft - kRight) * std::log(capacity / least_) / std::log(most_ / least_);
  }
  double Y(double miss) const { return kTop + (kHeight - kTop - kBottom) * (top_ - miss) / (top_ - bottom_); }

  // Leaves out the capacities beyond which all policies miss no more than infinite memory.
  void TrimTail() {
    for (const double miss = floor_ + kNegligible; floor_ > 0 && most_ > least_;) {
      double before = least_;
      for (const Line& line : lines_) {
        for (const auto& [capacity, at] : line.points) {
          if (capacity == most_ && at > miss) return;
          if (capacity < most_) before = std::max(before, capacity);
        }
      }
      // Keeps one capacity at which no policy misses more, behind the last at which some policy does.
      const bool flat_before = std::all_of(lines_.begin(), lines_.end(), [&](const Line& line) {
        return std::all_of(line.points.begin(), line.points.end(),
                           [&](const auto& p) { return p.first != before || p.second <= miss; });
      });
      if (!flat_before || before == least_) return;
      for (Line& line : lines_) std::erase_if(line.points, [&](const auto& p) { return p.first == most_; });
      most_ = before;
    }
  }

  void Style() {
    int i = 0;
    for (Line& line : lines_) {
      if (line.policy == "opt") {
        line.colour = "#000000";
        line.width = 2.6;
        continue;
      }
      if (line.policy == "lru") {
        line.colour = "#444444";
        line.width = 2.6;
        continue;
      }
      line.colour = kColours[i % std::size(kColours)];
      line.dash = kDashes[i / std::size(kColours) % std::size(kDashes)];
      ++i;
    }
  }

  void Text(double x, double y, const std::string& anchor, const std::string& more, const std::string& text) {
    absl::StrAppendFormat(&svg_, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>%s</text>\n", x, y,
                          anchor, more,
                          absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}}));
  }
  void Rule(double x1, double y1, double x2, double y2, const std::string& more) {
    absl::StrAppendFormat(&svg_, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2,
                          y2, more);
  }

  void Frame() {
    absl::StrAppendFormat(
        &svg_,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
        "height=\"%.0f\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" "
        "fill=\"#222222\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
        kWidth, kHeight, kWidth, kHeight);
    const size_t slash = workload_.name.find_last_of('/');
    Text(kLeft, 28, "start", "font-size=\"18\" font-weight=\"bold\"", "Miss ratio by capacity and policy");
    Text(kLeft, 48, "start", "fill=\"#666666\"",
         absl::StrCat(workload_.name.substr(slash == std::string::npos ? 0 : slash + 1), ": ",
                      workload_.Describe()));
    Text(kLeft, 65, "start", "fill=\"#666666\"", "Only a leading run of resident blocks is a hit");
  }

  void Grid() {
    for (double miss = bottom_; miss < top_ + step_ / 2; miss += step_) {
      Rule(kLeft, Y(miss), kWidth - kRight, Y(miss), "stroke=\"#e4e4e4\"");
      Text(kLeft - 8, Y(miss) + 4.5, "end", "", absl::StrFormat("%.0f %%", miss * 100));
    }
    for (double decade = 1; decade <= most_ * 1.0001; decade *= 10) {
      for (const int digit : {1, 2, 5}) {
        const double c = decade * digit;
        if (c < least_ * 0.9999 || c > most_ * 1.0001) continue;
        Rule(X(c), kTop, X(c), kHeight - kBottom, digit == 1 ? "stroke=\"#d0d0d0\"" : "stroke=\"#eeeeee\"");
        Text(X(c), kHeight - kBottom + 18, "middle", "",
             c >= 1e6   ? absl::StrFormat("%g M", c / 1e6)
             : c >= 1e4 ? absl::StrFormat("%g,000", c / 1e3)
                        : absl::StrFormat("%g", c));
      }
    }
    Rule(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "stroke=\"#888888\"");
    Text((kLeft + kWidth - kRight) / 2, kHeight - 20, "middle", "", "Capacity, blocks");
    Text(20, (kTop + kHeight - kBottom) / 2, "middle",
         absl::StrFormat("transform=\"rotate(-90 20 %.1f)\"", (kTop + kHeight - kBottom) / 2),
         "Blocks that were computed anew");
    if (floor_ > 0) {
      Rule(kLeft, Y(floor_), kWidth - kRight, Y(floor_),
           "stroke=\"#999999\" stroke-width=\"1.4\" "
           "stroke-dasharray=\"1 4\" stroke-linecap=\"round\"");
      Text(kLeft + 6, Y(floor_) - 6, "start", "fill=\"#777777\" font-size=\"12\"", "infinite memory");
    }
  }

  void Curve(const Line& line) {
    absl::StrAppendFormat(&svg_,
                          "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\" "
                          "stroke-linejoin=\"round\"%s points=\"",
                          line.colour, line.width,
                          line.dash.empty() ? "" : absl::StrCat(" stroke-dasharray=\"", line.dash, "\""));
    for (const auto& [capacity, miss] : line.points)
      absl::StrAppendFormat(&svg_, "%.1f,%.1f ", X(capacity), Y(miss));
    absl::StrAppend(&svg_, "\"><title>", line.policy, "</title></polyline>\n");
  }

  // Labels the lines at the right, in the order of the areas under the curves, the worst on top, each beside
  // a piece of its line.
  void Labels() {
    const auto area = [](const Line& line) {
      double sum = 0;
      for (size_t i = 1; i < line.points.size(); ++i) {
        const auto& [c0, m0] = line.points[i - 1];
        const auto& [c1, m1] = line.points[i];
        sum += (m0 + m1) / 2 * std::log(c1 / c0);
      }
      return sum;
    };
    std::stable_sort(lines_.begin(), lines_.end(),
                     [&](const Line& a, const Line& b) { return area(a) > area(b); });
    const double right = kWidth - kRight;
    double y = kTop + 6;
    Text(right + 44, y - 15, "start", "fill=\"#666666\" font-size=\"12\"", "worst");
    const double room = (kHeight - kTop - kBottom) / static_cast<double>(std::max<size_t>(1, lines_.size()));
    const double gap = std::min(room, kLabelHeight * 1.5);
    for (Line& line : lines_) {
      line.label_y = y;
      y += gap;
      absl::StrAppendFormat(&svg_,
                            "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
                            "stroke-width=\"%.1f\"%s/>\n",
                            right + 14, line.label_y, right + 38, line.label_y, line.colour, line.width,
                            line.dash.empty() ? "" : absl::StrCat(" stroke-dasharray=\"", line.dash, "\""));
      Text(right + 44, line.label_y + 4.5, "start", line.width > 2 ? "font-weight=\"bold\"" : "",
           line.policy);
    }
    Text(right + 44, y + 4, "start", "fill=\"#666666\" font-size=\"12\"", "best");
  }

  const Workload& workload_;
  std::vector<Line> lines_;
  double least_ = 0, most_ = 0, top_ = 1, bottom_ = 0, step_ = 0.1, floor_ = 0;
  std::string svg_;
};

}  // namespace

std::string DrawCurves(const Workload& workload, const std::vector<Result>& results) {
  return Picture(workload, results).Draw();
}

}  // namespace kvpool::sim
