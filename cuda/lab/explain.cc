#include "cuda/lab/explain.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvpool::lab {
namespace {

constexpr int kCell = 12;
constexpr uint32_t kCellsPerLine = 64;

// The least and the greatest finite score of a row.
std::pair<float, float> RangeOf(const Picture& picture, uint32_t row) {
  float least = INFINITY, greatest = -INFINITY;
  for (uint32_t t = 0; t < picture.tokens; ++t) {
    const float score = picture.scores[uint64_t{row} * picture.tokens + t];
    if (!std::isfinite(score)) continue;
    least = std::min(least, score);
    greatest = std::max(greatest, score);
  }
  return {least, greatest};
}

std::string EscapedForXml(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '<') {
      escaped += "&lt;";
    } else if (c == '&') {
      escaped += "&amp;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

std::string DrawText(const Picture& picture) {
  std::string text = absl::StrCat(picture.title, "\n# stays, . leaves; one line a block\n");
  for (uint32_t row = 0; row < picture.rows; ++row) {
    if (picture.rows > 1) absl::StrAppend(&text, "row ", row, "\n");
    uint32_t kept = 0;
    for (uint32_t first = 0; first < picture.tokens; first += picture.tokens_per_block) {
      const uint32_t end = std::min(picture.tokens, first + picture.tokens_per_block);
      std::string marks;
      double sum = 0;
      for (uint32_t t = first; t < end; ++t) {
        const uint64_t at = uint64_t{row} * picture.tokens + t;
        marks += picture.stays[at] != 0 ? '#' : '.';
        kept += picture.stays[at];
        sum += static_cast<double>(picture.scores[at]);
      }
      absl::StrAppendFormat(&text, "%8u  %s%*s  mean %.6g\n", first, marks,
                            static_cast<int>(picture.tokens_per_block - (end - first)), "",
                            sum / (end - first));
    }
    absl::StrAppend(&text, kept, " of ", picture.tokens, " tokens stay\n");
  }
  return text;
}

std::string DrawSvg(const Picture& picture) {
  const uint32_t columns = std::min(picture.tokens, kCellsPerLine);
  const uint32_t lines = (picture.tokens + kCellsPerLine - 1) / kCellsPerLine;
  const uint64_t width = uint64_t{columns + 2} * kCell;
  const uint64_t height = (uint64_t{lines + 2} * picture.rows + 2) * kCell;
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%u\" height=\"%u\" font-family=\"sans-serif\" "
      "font-size=\"10\">\n<text x=\"%d\" y=\"%d\">%s</text>\n",
      width, height, kCell, kCell, EscapedForXml(picture.title));
  for (uint32_t row = 0; row < picture.rows; ++row) {
    const auto [least, greatest] = RangeOf(picture, row);
    const uint64_t top = (uint64_t{row} * (lines + 2) + 2) * kCell;
    for (uint32_t t = 0; t < picture.tokens; ++t) {
      const uint64_t at = uint64_t{row} * picture.tokens + t;
      const float score = picture.scores[at];
      const float share = std::isfinite(score) && greatest > least ? (score - least) / (greatest - least) : 0;
      const uint64_t x = uint64_t{t % kCellsPerLine + 1} * kCell,
                     y = top + uint64_t{t / kCellsPerLine} * kCell;
      absl::StrAppendFormat(&svg,
                            "<rect x=\"%u\" y=\"%u\" width=\"%d\" height=\"%d\" fill=\"hsl(210,70%%,%d%%)\">"
                            "<title>token %u, block %u: %.6g</title></rect>\n",
                            x, y, kCell - 1, kCell - 1, 95 - static_cast<int>(65 * share), t,
                            t / picture.tokens_per_block, score);
      if (picture.stays[at] != 0) continue;
      absl::StrAppendFormat(&svg, "<path d=\"M%u %ul%d %dm0 -%dl-%d %d\" stroke=\"#c00\"/>\n", x, y,
                            kCell - 1, kCell - 1, kCell - 1, kCell - 1, kCell - 1);
    }
  }
  return absl::StrCat(svg, "</svg>\n");
}

}  // namespace kvpool::lab
