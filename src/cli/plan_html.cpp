// Drawings are SVG in a box of 640 x 260: axes, then what is drawn over them.
#include "cli/plan_html.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <utility>

#include "poise/cli.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

using plan::Plan;

constexpr double kWidth = 640, kHeight = 260, kLeft = 70, kBottom = 30, kTop = 10, kRight = 10;
constexpr const char* kColours[] = {"#4c78a8", "#9ecae9", "#f58518", "#ffbf79",
                                    "#54a24b", "#b279a2", "#e45756", "#bab0ac"};

constexpr const char* kStyle =
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:46rem;padding:0 1rem;"
    "color:#222;background:#fff}svg{width:100%;height:auto}svg text{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.budget{stroke:#d1242f;stroke-dasharray:4 3}table{border-collapse:collapse}"
    "td,th{padding:.2rem .8rem .2rem 0;text-align:left}td.n{text-align:right;"
    "font-variant-numeric:tabular-nums}pre{background:#f6f8fa;padding:.6rem;overflow-x:auto}";

template <class... Values>
std::string text(const char* format, Values... values) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

std::string escaped(const std::string& plain) {
  std::string safe;
  for (const char c : plain) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '>')
      safe += "&gt;";
    else if (c == '&')
      safe += "&amp;";
    else if (c == '"')
      safe += "&quot;";
    else
      safe += c;
  }
  return safe;
}

std::string seconds(double value) {
  return value >= 1 ? text("%.3g s", value) : text("%.3g ms", 1e3 * value);
}

// Where values of both axes lie in the box.
class Axes {
 public:
  Axes(double x_low, double x_high, double y_high)
      : x_low_(x_low),
        x_span_(x_high > x_low ? x_high - x_low : 1),
        y_high_(y_high > 0 ? y_high : 1) {}
  double x(double value) const {
    return kLeft + (value - x_low_) / x_span_ * (kWidth - kLeft - kRight);
  }
  double y(double value) const { return kTop + (1 - value / y_high_) * (kHeight - kTop - kBottom); }
  // Lines at quarters of the vertical axis, bytes beside them.
  std::string bytes() const {
    std::string lines;
    for (int i = 0; i <= 4; ++i) {
      const double value = y_high_ * i / 4;
      lines += text("<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>", kLeft,
                    kWidth - kRight, y(value), y(value));
      lines += text("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>", kLeft - 6,
                    y(value) + 4, memory::format_bytes(static_cast<std::int64_t>(value)).c_str());
    }
    return lines;
  }
  std::string budget(double value) const {
    if (value <= 0 || value > y_high_) return "";
    return text("<line class=\"budget\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>", kLeft,
                kWidth - kRight, y(value), y(value));
  }

 private:
  double x_low_, x_span_, y_high_;
};

std::string drawing(const std::string& inside) {
  return text("<svg viewBox=\"0 0 %g %g\" role=\"img\">", kWidth, kHeight) + inside + "</svg>";
}

std::string row(const std::string& name, const std::string& value) {
  return "<tr><th>" + escaped(name) + "</th><td class=\"n\">" + escaped(value) + "</td></tr>";
}

// Accounts one upon the other, from the first forward to the last backward.
std::string over_an_update(const Page& page, const Plan& plan) {
  const auto& job = page.job;
  const auto all = plan::moments(plan::chain(job, plan.choice), plan.choice, plan::widths(job));
  if (all.empty()) return "";
  double highest = page.answer != nullptr ? static_cast<double>(page.answer->budget) : 0;
  const auto peak = static_cast<double>(plan.memory.peak);
  highest = highest > 2 * peak ? peak * 1.05 : std::max(highest, peak) * 1.05;
  const Axes axes(0, static_cast<double>(all.size()), highest);
  std::string inside = axes.bytes(), legend;
  std::vector<double> below(all.size(), 0.0);
  for (std::size_t account = 0; account < plan.memory.held.size(); ++account) {
    std::string up, down;
    bool any = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto from = below[i];
      below[i] += static_cast<double>(all[i].accounts[account]);
      any = any || all[i].accounts[account] > 0;
      for (const std::size_t edge : {i, i + 1}) {  // steps, not slopes
        const double x = axes.x(static_cast<double>(edge));
        up += text("%.1f,%.1f ", x, axes.y(below[i]));
        down = text("%.1f,%.1f ", x, axes.y(from)) + down;
      }
    }
    if (!any) continue;
    const auto* colour = kColours[account % std::size(kColours)];
    const auto* name = memory::name_of(static_cast<memory::Account>(account));
    inside += text("<polygon fill=\"%s\" points=\"", colour) + up + down + "\"><title>" + name +
              "</title></polygon>";
    legend += text("<span style=\"color:%s\">&#9632;</span> %s &nbsp; ", colour, name);
  }
  inside += axes.budget(page.answer != nullptr ? static_cast<double>(page.answer->budget) : 0);
  inside += text("<text x=\"%g\" y=\"%g\">%s</text>", kLeft, kHeight - 8,
                 escaped(all.front().name).c_str());
  inside += text("<text x=\"%g\" y=\"%g\" text-anchor=\"end\">%s</text>", kWidth - kRight,
                 kHeight - 8, escaped(all.back().name).c_str());
  return "<h2>Memory over an update</h2>" + drawing(inside) + "<p>" + legend + "</p>";
}

std::string front(const plan::Answer& answer) {
  if (answer.front.empty()) return "";
  double fastest = 1e300, slowest = 0, highest = 0;
  for (const auto& plan : answer.front) {
    fastest = std::min(fastest, plan.time.total);
    slowest = std::max(slowest, plan.time.total);
    highest = std::max(highest, static_cast<double>(plan.memory.highest()));
  }
  const Axes axes(fastest, slowest, 1.05 * highest);
  std::string inside = axes.bytes() + axes.budget(static_cast<double>(answer.budget));
  bool marked = false;
  for (const auto& plan : answer.front) {
    const bool fits = plan.memory.highest() <= answer.budget;
    const bool best = fits && !marked;
    marked = marked || fits;
    inside += text(
        "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%d\" fill=\"%s\"><title>%s, %s</title></circle>",
        axes.x(plan.time.total), axes.y(static_cast<double>(plan.memory.highest())), best ? 6 : 3,
        best   ? "#d1242f"
        : fits ? "#1f6feb"
               : "#aaa",
        seconds(plan.time.total).c_str(), memory::format_bytes(plan.memory.highest()).c_str());
  }
  for (const double value : {fastest, slowest}) {
    inside += text("<text x=\"%.1f\" y=\"%g\" text-anchor=\"%s\">%s</text>", axes.x(value),
                   kHeight - 8, value == fastest ? "start" : "end", seconds(value).c_str());
  }
  return "<h2>Time against memory</h2>" + drawing(inside) +
         "<p>No plan is both faster and smaller than one of these; red: the chosen one, grey: too "
         "large for the budget.</p>";
}

std::string levers(const plan::Answer& answer, const std::vector<plan::Lever>& all) {
  if (all.empty()) return "";
  auto highest = static_cast<double>(answer.best.memory.highest());
  for (const auto& lever : all) {
    highest = std::max(highest, static_cast<double>(lever.plan.memory.highest()));
  }
  std::string rows;
  const auto bar = [&](const std::string& name, const std::string& note, const Plan& plan) {
    const double share = static_cast<double>(plan.memory.highest()) / highest;
    rows += "<tr><th>" + escaped(name) + "</th><td>" +
            text("<div style=\"background:%s;height:.8rem;width:%.1frem\"></div>",
                 plan.memory.highest() <= answer.budget ? "#1f6feb" : "#aaa", 14 * share) +
            "</td><td class=\"n\">" + memory::format_bytes(plan.memory.highest()) +
            "</td><td class=\"n\">" + seconds(plan.time.total) + "</td><td>" + escaped(note) +
            "</td></tr>";
  };
  bar("as planned", "", answer.best);
  for (const auto& lever : all) {
    bar(lever.name,
        join(lever.changes_numbers ? "another training; " : "the same training; ", lever.setting),
        lever.plan);
  }
  return "<h2>What each lever buys</h2><table>" + rows +
         "</table><p>Each alone, never pulled unasked; blue fits the budget.</p>";
}

std::string figures(const Page& page, const Plan& plan) {
  const auto& c = plan.choice;
  std::string rows = row("micro-batch x accumulation x ranks",
                         join(c.micro_batch, " x ", c.accumulation, " x ", c.ranks));
  if (c.ranks > 1) rows += row("ZeRO stage", std::to_string(c.stage));
  const auto blocks = std::count(c.recomputed.begin(), c.recomputed.end(), true);
  rows += row("recomputed blocks", join(blocks, " of ", c.recomputed.size()));
  rows += row("peak", memory::format_bytes(plan.memory.highest()) + ", " + plan.memory.moment);
  if (page.answer != nullptr) rows += row("budget", memory::format_bytes(page.answer->budget));
  rows += row("an update", seconds(plan.time.total));
  const std::string counted = page.job.traced ? "samples" : "tokens";
  const auto rate = tokens_per_second(page.job, plan);
  rows += row(counted + " per second and device", text(rate < 100 ? "%.3g" : "%.0f", rate));
  if (page.price.gpu_hour > 0) {
    const auto tokens = static_cast<double>(page.job.global_batch * page.job.sequence);
    const auto cost = plan::cost(plan, tokens, page.price);
    rows += row("cost of a month", text("%.0f", cost.month));
    rows += row("cost of a billion " + counted, text("%.2f", cost.billion_tokens));
  }
  return "<table>" + rows + "</table>";
}

}  // namespace

std::string page_html(const Page& page) {
  const Plan* shown = page.answer != nullptr ? &page.answer->best : page.written;
  POISE_CHECK(shown != nullptr);
  const auto title = join(page.job.model.name, " on ", page.job.machine.ranks, " x ",
                          page.job.machine.device.name);
  std::ostringstream out;
  out << "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>" << escaped(title)
      << "</title><style>" << kStyle << "</style></head><body>\n<h1>" << escaped(title)
      << "</h1>\n";
  if (page.answer != nullptr && !page.answer->fits) {
    out << "<p><b>No plan fits into " << memory::format_bytes(page.answer->budget)
        << "</b>; the smallest, shown here, needs " << memory::format_bytes(page.answer->floor)
        << " (the largest part: " << escaped(page.answer->dominated_by)
        << "); the nearest budget that works is " << budget_text(page.answer->floor) << ".</p>\n";
  }
  out << figures(page, *shown) << '\n' << over_an_update(page, *shown) << '\n';
  if (page.answer != nullptr) {
    out << front(*page.answer) << '\n' << levers(*page.answer, page.levers) << '\n';
  }
  out << "<h2>In a run.json</h2><pre>" << escaped(plan::settings(shown->choice, page.units))
      << "</pre></body></html>\n";
  return out.str();
}

std::string plan_page(const plan::Job& job, const plan::Answer& answer,
                      const std::vector<plan::Lever>& levers, const plan::Price& price,
                      const std::vector<std::string>& units) {
  return page_html({job, &answer, nullptr, levers, price, units});
}

}  // namespace poise::cli
